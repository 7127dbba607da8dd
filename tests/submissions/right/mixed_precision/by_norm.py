# style: skipping is read from the norm, clipping is written out
import math
from typing import NamedTuple

import torch
import torch.nn as nn


class StepResult(NamedTuple):
    loss: float
    grad_norm: float
    skipped: bool


@torch.no_grad()
def _clip(parameters, max_norm):
    gradients = [p.grad for p in parameters if p.grad is not None]
    total = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients]))
    if total > max_norm:
        for g in gradients:
            g.mul_(max_norm / total)
    return float(total)


def train_step(ddp_model: nn.Module, x, y, loss_fn, optimizer, scaler, *, dtype, max_norm) -> StepResult:
    for parameter in ddp_model.parameters():
        parameter.grad = None
    context = torch.amp.autocast(x.device.type, dtype)
    with context:
        loss = loss_fn(ddp_model(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = _clip(list(ddp_model.parameters()), max_norm)
    scaler.step(optimizer)
    scaler.update()
    return StepResult(loss=loss.detach().float().item(), grad_norm=norm, skipped=scaler.is_enabled() and not math.isfinite(norm))
