# style: the loss outside of autocast, with an output made float32 by hand; a hook sees the step
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class StepResult:
    loss: float
    grad_norm: float
    skipped: bool


class _Taken:
    def __init__(self, optimizer):
        self.yes = False
        self.handle = optimizer.register_step_post_hook(self._note)

    def _note(self, *_):
        self.yes = True


def train_step(ddp_model, x, y, loss_fn, optimizer, scaler, *, dtype, max_norm):
    ddp_model.zero_grad()
    with torch.autocast(device_type=x.device.type, dtype=dtype, cache_enabled=True):
        logits = ddp_model(x)
    loss = loss_fn(logits.float(), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    everything = [p for group in optimizer.param_groups for p in group["params"]]
    grad_norm = torch.nn.utils.clip_grad_norm_(everything, max_norm, foreach=False)
    taken = _Taken(optimizer)
    try:
        scaler.step(optimizer)
    finally:
        taken.handle.remove()
    scaler.update()
    return StepResult(loss=loss.item(), grad_norm=grad_norm.item(), skipped=not taken.yes)
