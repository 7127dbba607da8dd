# style: one path for each type
from dataclasses import dataclass

import torch
from torch.nn.utils import clip_grad_norm_


@dataclass
class StepResult:
    loss: float
    grad_norm: float
    skipped: bool


def _forward(ddp_model, x, y, loss_fn, dtype):
    with torch.autocast(x.device.type, dtype=dtype):
        return loss_fn(ddp_model(x), y)


def _plain(model, optimizer, loss, max_norm):
    loss.backward()
    norm = clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    return norm, False


def _scaled(model, optimizer, loss, max_norm, scaler):
    before = scaler.get_scale()
    (loss * before).backward()
    scaler.scale(torch.ones((), device=loss.device))  # the scaler makes its state when it is first asked to scale
    scaler.unscale_(optimizer)
    norm = clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()
    return norm, before > scaler.get_scale()


def train_step(ddp_model, x, y, loss_fn, optimizer, scaler, *, dtype, max_norm):
    optimizer.zero_grad()
    loss = _forward(ddp_model, x, y, loss_fn, dtype)
    if scaler.is_enabled():
        norm, skipped = _scaled(ddp_model, optimizer, loss, max_norm, scaler)
    else:
        norm, skipped = _plain(ddp_model, optimizer, loss, max_norm)
    return StepResult(float(loss.detach()), float(norm), skipped)
