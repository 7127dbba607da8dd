"""Exercise find_divergence: which tensor differs between ranks, on which ranks, by how much, and since which step.

Chapter 3, "Silent divergence". To see it at work on three ranks:

    torchrun --nproc-per-node=3 exercises/find_divergence.py
"""

import dataclasses
import hashlib  # solution-only
import os
import sys
from collections import Counter  # solution-only
from typing import Any  # solution-only

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
    # --- solution: compare checksums, and fetch values only where these differ ---
    values = _collect(model, optimizer, gradients)
    checksums = {key: _checksum(value) for key, value in values.items()}

    # What a rank holds has one number. Two ranks with the same one hold the same; so nothing else has to be sent. Names
    # and shapes are in it: nothing goes wrong where one rank holds more than another.
    device = _device()
    own = torch.tensor([_in_all(checksums)], dtype=torch.int64, device=device)
    everybody = torch.empty(dist.get_world_size(), dtype=torch.int64, device=device)
    dist.all_gather(list(everybody.split(1)), own)
    if len(set(everybody.tolist())) == 1:
        return []

    tables: list[dict[tuple[str, str], tuple[str, int]]] = [{} for _ in everybody]
    dist.all_gather_object(tables, checksums)
    found = []
    for key in _in_order(tables):
        held = [table.get(key) for table in tables]
        usual = max(held, key=Counter(held).__getitem__)  # the first of them, where two are equally frequent
        ranks = tuple(rank for rank, one in enumerate(held) if one != usual)
        if ranks:
            largest = _largest_difference(values.get(key), held, held.index(usual))
            if tolerance <= 0 or largest > tolerance:
                found.append(Difference(*key, ranks, largest))
    return found
    # --- end ---


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
        # --- solution: look when it is time, and keep the first difference ---
        self.steps += 1
        if self.first is None and self.steps % self.every == 0:
            differences = find_divergence(
                self.model, self.optimizer, gradients=self.gradients, tolerance=self.tolerance
            )
            if differences:
                self.first = Divergence(self.steps, self.agreed, differences)
            else:
                self.agreed = self.steps
        return self.first
        # --- end ---


# --- solution-only ---
_CHUNK = 1 << 22  # elements that are worked on at once: 32 MiB for each intermediate result
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _collect(model: nn.Module, optimizer: Optimizer | None, gradients: bool) -> dict[tuple[str, str], torch.Tensor]:
    """All that is compared, by kind and name."""
    if isinstance(model, DistributedDataParallel):
        model = model.module
    values: dict[tuple[str, str], torch.Tensor] = {}
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        values["parameter", name] = parameter.detach()
    for name, buffer in model.named_buffers():
        values["buffer", name] = buffer.detach()
    for name, parameter in parameters.items() if gradients else ():
        if parameter.grad is not None:
            values["gradient", name] = parameter.grad.detach()
    if optimizer is None:
        return values
    names = {parameter: name for name, parameter in parameters.items()}
    for number, group in enumerate(optimizer.param_groups):
        for option, value in group.items():
            if option != "params":
                _add(values, f"param_groups[{number}].{option}", value)
        for place, parameter in enumerate(group["params"]):
            name = names.get(parameter, f"param_groups[{number}].params[{place}]")
            for entry, value in optimizer.state.get(parameter, {}).items():
                _add(values, f"{name}.{entry}", value)
    return values


def _add(values: dict[tuple[str, str], torch.Tensor], name: str, value: Any) -> None:
    """A tensor, a number or a sequence of these; None and text are passed over."""
    if isinstance(value, torch.Tensor):
        values["optimizer", name] = value.detach()
    elif isinstance(value, (bool, int, float)):
        values["optimizer", name] = torch.tensor(value, dtype=torch.float64)
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            _add(values, f"{name}[{number}]", item)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Its elements in one row, as integers of the same bits; of a sparse tensor those of its dense form."""
    dense = tensor.to_dense() if tensor.layout != torch.strided else tensor
    real = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
    return real.contiguous().view(_INTEGERS[real.element_size()]).reshape(-1)


def _checksum(tensor: torch.Tensor) -> tuple[str, int]:
    """Type and shape, and 64 bits of what is in it: every element is mixed with its place before it is added.

    Integer arithmetic modulo 2**64 (torch wraps around): exact, independent of the order of addition, and done where the
    tensor is. The mixing is that of splitmix64, with arithmetic shifts.
    """
    total = 0
    for number, words in enumerate(_bits(tensor).split(_CHUNK)):
        place = torch.arange(number * _CHUNK, number * _CHUNK + len(words), device=words.device)
        mixed = words.to(torch.int64) + (place + 1) * -7046029254386353131
        mixed = (mixed ^ (mixed >> 30)) * -4658895280553007687
        mixed = (mixed ^ (mixed >> 27)) * -7723592293110705685
        total += int((mixed ^ (mixed >> 31)).sum())
    return f"{tensor.dtype} {tuple(tensor.shape)}", total % (1 << 64)


def _in_all(checksums: dict[tuple[str, str], tuple[str, int]]) -> int:
    """One number for all of them. Not Python's `hash`: that of a text is another in every process."""
    digest = hashlib.blake2b(repr(list(checksums.items())).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def _in_order(tables: list[dict[tuple[str, str], tuple[str, int]]]) -> list[tuple[str, str]]:
    """Every key that some rank has, in an order that all ranks come to."""
    keys = dict.fromkeys(key for table in tables for key in table)
    kinds = ["parameter", "buffer", "gradient", "optimizer"]
    return sorted(keys, key=lambda key: kinds.index(key[0]))  # and as found, within a kind


def _largest_difference(own: torch.Tensor | None, held: list[tuple[str, int] | None], source: int) -> float:
    """How far the ranks are from what rank `source` has. Called on all ranks; each compares its own."""
    usual = held[source]
    if usual is None or any(one is None or one[0] != usual[0] for one in held):
        return float("inf")  # all ranks know that, and nothing has to be sent
    assert own is not None
    sent = own.to_dense() if own.layout != torch.strided else own
    sent = sent.to(_device()).contiguous().clone()
    dist.broadcast(sent.view(-1).view(torch.uint8), src=source)  # bytes: no backend minds their type
    largest = torch.tensor(_distance(own, sent.to(own.device)), dtype=torch.float64, device=_device())
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest absolute difference of two tensors of one type and shape; `inf` where a NaN is on one side only."""
    if not one.numel():
        return 0.0
    if not (one.is_floating_point() or one.is_complex()):
        one, other = one.to(torch.int64), other.to(torch.int64)  # exact, where a float would round
        return float((torch.maximum(one, other) - torch.minimum(one, other)).max())
    wide = torch.complex128 if one.is_complex() else torch.float64
    one, other = one.to(wide), other.to(wide)
    apart = (one - other).abs()
    apart[(one == other) | (one.isnan() & other.isnan())] = 0.0  # of two infinities, too
    return float(apart.nan_to_num(float("inf"), float("inf")).max())


def _device() -> torch.device:
    """Where the group can take tensors from."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


# --- end ---
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

# lockstep-canary: 6e048121224e4baa
