"""Exercise find_divergence: which tensor differs between ranks, on which ranks, by how much, and since which step.

Chapter 3, "Silent divergence". To see it at work on three ranks:

    torchrun --nproc-per-node=3 exercises/find_divergence.py
"""

import dataclasses
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer


@dataclasses.dataclass(frozen=True)
class Difference:
    """One value that differs between ranks.

    `kind` is "parameter", "buffer", "gradient" or "optimizer". `ranks` lists in ascending order the ranks that differ
    from the majority. The majority is the value that most ranks have; in a tie, the one that the lowest rank has.
    `largest` is the largest absolute difference between an element on one of these ranks and the majority's, as a
    float. It is `inf` if there is no such number: the value is missing on one side, has a different shape or dtype, or
    one side is NaN.
    """

    kind: str
    name: str
    ranks: tuple[int, ...]
    largest: float


@dataclasses.dataclass(frozen=True)
class Divergence:
    """What `DivergenceWatch` found: `differences` at `step`. The ranks last agreed after step `agreed` (0: never)."""

    step: int
    agreed: int
    differences: list[Difference]


def find_divergence(
    model: nn.Module, optimizer: Optimizer | None = None, *, gradients: bool = True, tolerance: float = 0.0
) -> list[Difference]:
    """Find what differs between the ranks. Every rank calls it; all get the same list, empty when everything agrees.

    Compare the model's parameters and buffers, their gradients (unless `gradients` is False) and, with an optimizer,
    its state and its hyper-parameters. List them in this order: parameters, buffers, gradients, optimizer; parameters
    and buffers in the model's order. Use the names from `named_parameters()` and `named_buffers()`; a gradient has its
    parameter's name. Leave out the `module.` that a DDP wrapper adds to each name; a plain model may have a submodule
    named `module`. In the optimizer, a parameter's state (a tensor or a number) has a name like
    `encoder.weight.exp_avg`, and a group's hyper-parameter (a number, a flag, None or a tuple of numbers) one like
    `param_groups[0].lr`. A tuple is one entry, or one for each of its numbers.

    - Compare bits: a NaN equals a NaN of the same bits, and 0.0 differs from -0.0 (with a `largest` of 0.0). The
      majority is decided by bits, too. A `tolerance` above 0 only leaves out differences whose `largest` doesn't exceed
      it.
    - Compare a Python number, such as a learning rate or one of `betas`, in float64: float32 would round it. None
      counts as missing.
    - If only some ranks have a gradient or a state, that is a difference; if no rank has it, it isn't.
    - It works with any dtype (bfloat16, integers, bool, complex), any shape (no dimensions or no elements, too) and any
      values: swapped elements and changes that cancel out in the sum are found.
    - Change nothing: no parameter, gradient or state, and draw no random numbers. Don't repair anything either.
    - If all ranks agree, it takes at most two collectives. In both together, each rank sends at most 64 bytes plus 16
      per tensor.

    Args:
        model: the same model on every rank, wrapped in DDP or not.
        optimizer: its optimizer. A parameter that isn't the model's has a name like `param_groups[0].params[3]`.
        gradients: whether to compare gradients. Inside `no_sync()` they differ, and should.
        tolerance: the largest absolute difference that isn't worth reporting.
    """
    raise NotImplementedError("find_divergence: compare checksums, and fetch values only where these differ")


class DivergenceWatch:
    """Checks every few steps whether the ranks still agree, and keeps the first difference."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        every: int = 1,
        *,
        gradients: bool = True,
        tolerance: float = 0.0,
    ) -> None:
        """`every` is in steps; ValueError unless it is at least 1. The rest is handed on to `find_divergence`."""
        if every < 1:
            raise ValueError(f"every is {every}; it must be at least 1")
        self.model, self.optimizer, self.every = model, optimizer, every
        self.gradients, self.tolerance = gradients, tolerance
        self.steps = 0
        self.agreed = 0
        self.first: Divergence | None = None

    def step(self) -> Divergence | None:
        """Count a step; compare the ranks if the count is a multiple of `every`. Every rank calls it after each
        step.

        Returns None as long as all comparisons agreed. From the first difference on, every call returns that same
        difference and communicates no more: ranks that have diverged stay apart, and the first difference is the clue.
        """
        raise NotImplementedError("find_divergence: look when it is time, and keep the first difference")


if __name__ == "__main__":
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    watch = DivergenceWatch(net, every=2)
    for step in range(1, 7):
        if step == 3 and rank == 1:
            with torch.no_grad():
                net[0].weight[0, 0] += 0.25  # as if rank 1 alone had taken a step
        seen = watch.step()
        if rank == 0:
            print(f"step {step}: {seen or 'all ranks agree'}", flush=True)
    # gloo's threads sometimes abort a finished process while the interpreter shuts down; os._exit skips the shutdown.
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)
