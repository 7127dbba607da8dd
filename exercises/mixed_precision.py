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
    """What a step returns.

    Attributes:
        loss: the mean loss of this rank's batch before the step, unscaled, computed in float32.
        grad_norm: the 2-norm of all gradients together, unscaled and before clipping; inf or nan if one of them is.
        skipped: True if the scaler found inf or nan in the gradients and the optimizer took no step.
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
    """Take one optimizer step in mixed precision. Every rank calls it with its own batch.

    Run forward and `loss_fn` under autocast: the layers that gain from it compute in `dtype`, the loss in float32. Run
    backward outside of autocast. The parameters, their gradients and the optimizer's state stay float32, so DDP sends float32
    gradients, once per step. No other collective is needed.

    float16 ends at 65504 and rounds anything below 3e-8 to zero, so `scaler` scales the loss. bfloat16 has the range of
    float32 and needs no scaling: `scaler` then has `enabled=False`, and its methods pass everything through. The same
    code works for both.

    Clip the unscaled gradients so that the 2-norm of all of them together is at most `max_norm`. If it is smaller
    already, they don't change.

    If a loss or a gradient is inf or nan on any rank, DDP's mean carries that to all ranks, and with float16 all skip the
    step together: the parameters don't change, the scale is lowered, and the next call continues. Every rank runs the
    whole step, whatever its own loss is.

    Ignore whatever the parameters' `grad` holds before the call.

    Args:
        ddp_model: a float32 model in DDP, the same on every rank.
        x, y: this rank's batch on the model's device; every rank has the same number of samples.
        loss_fn: takes the model's output and y, returns the mean over the samples as a scalar tensor.
        optimizer: holds the model's parameters.
        scaler: for this device type, with the same state on every rank; enabled for float16, not for bfloat16.
        dtype: torch.float16 or torch.bfloat16.
        max_norm: the largest norm of the gradients that the optimizer may see.
    """
    raise NotImplementedError("mixed_precision: one step in mixed precision")


if __name__ == "__main__":
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)
    rank = dist.get_rank()
    torch.manual_seed(0)  # the same weights everywhere
    model = DDP(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    torch.manual_seed(1 + rank)  # different data on every rank
    for step in range(5):
        x = torch.randn(4, 3)
        y = x.sum(dim=1, keepdim=True)
        if step == 2 and rank == dist.get_world_size() - 1:
            y = y * 1e6
        result = train_step(model, x, y, F.mse_loss, optimizer, scaler, dtype=torch.float16, max_norm=1.0)
        print(f"rank {rank} step {step}: {result}, scale {scaler.get_scale():g}", flush=True)
    # gloo's threads sometimes abort a finished process while the interpreter shuts down; os._exit skips the shutdown.
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)
