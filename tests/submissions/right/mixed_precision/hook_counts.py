# style: notices a skipped step by a hook of the optimizer; half inputs under autocast
from collections import namedtuple

import torch
from torch.nn.utils import clip_grad_norm_, get_total_norm

StepResult = namedtuple("StepResult", "loss grad_norm skipped")


def train_step(ddp_model, x, y, loss_fn, optimizer, scaler, *, dtype, max_norm):
    stepped = []
    handle = optimizer.register_step_post_hook(lambda *_: stepped.append(True))
    ddp_model.zero_grad(set_to_none=True)
    with torch.autocast(x.device.type, dtype):
        logits = ddp_model(x.to(dtype))
    loss = loss_fn(logits.float(), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = get_total_norm([p.grad for p in ddp_model.parameters() if p.grad is not None])
    clip_grad_norm_(ddp_model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()
    handle.remove()
    return StepResult(loss.item(), norm.item(), not stepped)
