# style: a small all-reduce of its own tells whether anybody overflowed
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class StepResult:
    loss: float
    grad_norm: float
    skipped: bool


def train_step(ddp_model, x, y, loss_fn, optimizer, scaler, *, dtype, max_norm):
    optimizer.zero_grad()
    with torch.autocast(x.device.type, dtype=dtype):
        loss = loss_fn(ddp_model(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    bad = torch.zeros((), device=x.device)
    for parameter in ddp_model.parameters():
        bad += (~torch.isfinite(parameter.grad)).any()
    dist.all_reduce(bad, op=dist.ReduceOp.MAX)
    norm = torch.nn.utils.clip_grad_norm_(ddp_model.parameters(), max_norm=max_norm)
    scaler.step(optimizer)
    scaler.update()
    return StepResult(loss.item(), norm.item(), scaler.is_enabled() and bool(bad.item()))
