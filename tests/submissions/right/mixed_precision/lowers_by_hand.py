# style: tells the scaler of the overflow and leaves the step
"""Exercise mixed_precision: one DDP step in half precision, with loss scaling and clipping in the right order.

Chapter 4, "Mixed precision". To see it at work on two ranks, one of which overflows in the third step:

    torchrun --nproc-per-node=2 exercises/mixed_precision.py
"""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


@dataclass(frozen=True)
class StepResult:
    """What a step has come to.

    Attributes:
        loss: the mean loss of this rank's batch before the step, unscaled, computed in float32.
        grad_norm: the 2-norm of all gradients together, unscaled and before clipping; inf or nan after an overflow.
        skipped: True when the scaler found an inf or nan in the gradients and the optimizer made no step.
    """

    loss: float
    grad_norm: float
    skipped: bool


def train_step(
    ddp_model: DDP,
    x: torch.Tensor,
    y: torch.Tensor,
    loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    *,
    dtype: torch.dtype,
    max_norm: float,
) -> StepResult:
    """Take one optimizer step in mixed precision. Called on every rank, each with its own batch.

    Forward runs under autocast, where the layers that gain from it compute in `dtype`; the loss is a float32. Backward
    runs outside of autocast. The parameters, their gradients and the optimizer's state stay float32, so DDP sends
    float32 gradients, once a step. No other collective is needed.

    float16 ends at 65504 and loses what is below 6e-8, so its loss is scaled by what `scaler` says. bfloat16 has the
    range of float32 and needs none of that: `scaler` then comes with `enabled=False`, and its methods pass everything
    through. The same lines work for both.

    The gradients are clipped so that their 2-norm, of all of them together and unscaled, is at most `max_norm`. When it
    is less, they stay as they are.

    When the gradients overflow on any rank, DDP's mean brings inf or nan to all ranks, and all skip the step together:
    the parameters stay as they are, the scale is lowered, and the next call goes on. Every rank goes through the whole
    step, whatever its own loss is.

    What the parameters hold in `grad` beforehand does not count.

    Args:
        ddp_model: a float32 model in DDP, the same on every rank.
        x, y: this rank's batch on the model's device; equally many samples on every rank.
        loss_fn: takes the model's output and y, returns the mean over the samples as a scalar tensor.
        optimizer: has the model's parameters.
        scaler: for this device type, with the same state on every rank; enabled for float16, not for bfloat16.
        dtype: torch.float16 or torch.bfloat16.
        max_norm: the largest norm that the gradients may have in the step.
    """
    optimizer.zero_grad()
    with torch.autocast(x.device.type, dtype=dtype):
        loss = loss_fn(ddp_model(x), y)

    scaler.scale(loss).backward()  # each operation goes back in the type that its forward had
    scaler.unscale_(optimizer)  # before anybody looks at the gradients; it also looks for inf and nan
    grad_norm = nn.utils.clip_grad_norm_(ddp_model.parameters(), max_norm)

    scale = scaler.get_scale()
    if not torch.isfinite(grad_norm):
        scaler.update(scale / 2)
        return StepResult(loss.item(), grad_norm.item(), True)
    scaler.step(optimizer)  # not if an inf or nan was found
    scaler.update()  # lowers the scale if there was one, raises it after a long time without
    return StepResult(loss.item(), grad_norm.item(), skipped=scaler.get_scale() < scale)


