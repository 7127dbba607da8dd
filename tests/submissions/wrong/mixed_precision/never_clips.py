# diagnosis: never-clips
# why: computes the norm and does nothing with it
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class StepResult:
    loss: float
    grad_norm: float
    skipped: bool


def train_step(ddp_model, x, y, loss_fn, optimizer, scaler, *, dtype, max_norm):
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast(device_type=x.device.type, dtype=dtype):
        output = ddp_model(x)
        loss = loss_fn(output, y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.get_total_norm([p.grad for p in ddp_model.parameters()])
    old_scale = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    skipped = scaler.get_scale() < old_scale
    return StepResult(loss.item(), norm.item(), skipped)
