"""Exercise find_divergence: which tensor is no longer the same on all ranks, where, by how much, and since when.

Chapter 3, “Silent divergence”. To see it at work on three ranks:

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
    """One value that is not the same on all ranks.

    `kind` is "parameter", "buffer", "gradient" or "optimizer". `ranks` are those that differ from the majority, in
    ascending order: from what most ranks have or, where two are equally frequent, from the one that the lowest rank has.
    `largest` is the largest absolute difference between an element of theirs and the majority's, as a float; `inf`
    where there is no such number: the value is missing on one side, has another shape or type, or NaN stands against a
    number.
    """

    kind: str
    name: str
    ranks: tuple[int, ...]
    largest: float


@dataclasses.dataclass(frozen=True)
class Divergence:
    """What `DivergenceWatch` found: at `step` there were `differences`; after step `agreed` there were none (0: never)."""

    step: int
    agreed: int
    differences: list[Difference]


def find_divergence(
    model: nn.Module, optimizer: Optimizer | None = None, *, gradients: bool = True, tolerance: float = 0.0
) -> list[Difference]:
    """Find what differs between the ranks. Called on all of them; all get the same list, empty when everything agrees.

    Compared are the model's parameters and buffers, their gradients (unless `gradients` is False) and, with an optimizer,
    its state and its hyper-parameters. In this order, and each kind in the model's order. Names are those of
    `named_parameters()` and `named_buffers()`, a gradient's is its parameter's; a DDP wrapper is looked through, so that
    there is no `module.` in a name. The optimizer's: `encoder.weight.exp_avg` for a parameter's state, tensor or number,
    and `param_groups[0].lr` for a number in a group.

    - Bits are compared: a NaN equals a NaN of the same bits, and 0.0 differs from -0.0 (then `largest` is 0.0). With a
      `tolerance` above 0 only what has a `largest` above it is in the list.
    - A gradient or a state that only some ranks have is a difference; one that nobody has is none.
    - Any type (bfloat16, integers, bool), any shape (no dimension, no element), any values: elements that have only
      changed places, or changes that cancel out in the sum, are found like all others.
    - Nothing is changed: no parameter, gradient or state, and no random number is drawn. Nothing is repaired either.
    - It is cheap where all agree: at most two collectives, and at most 64 bytes plus 16 a tensor from each rank.

    Args:
        model: the same model on every rank, wrapped in DDP or not.
        optimizer: its optimizer. Parameters of it that the model does not have are named `param_groups[0].params[3]`.
        gradients: whether to compare gradients. Inside `no_sync()` they differ, and should.
        tolerance: the largest absolute difference that is not worth reporting.
    """
    raise NotImplementedError("find_divergence: compare checksums, and fetch values only where these differ")


class DivergenceWatch:
    """Looks every so many steps whether the ranks still agree, and keeps the first time that they did not."""

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
        """Count a step, and look if it is the `every`-th, the 2·`every`-th, … Called on all ranks after each step.

        Returns None as long as all ranks agreed whenever it looked. From the first difference on it returns that one, the
        same at each call, and communicates no more: what has diverged once only gets worse, and its beginning counts.
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
                net[0].weight[0, 0] += 0.25  # as a step would that one rank makes alone
        seen = watch.step()
        if rank == 0:
            print(f"step {step}: {seen or 'all ranks agree'}", flush=True)
    # gloo's threads now and then abort a finished process while the interpreter shuts down: leave without that.
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)
