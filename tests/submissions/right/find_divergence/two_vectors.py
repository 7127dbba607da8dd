# style: all-reduce of the largest and the smallest checksum, a vector of all tensors
import dataclasses
import hashlib
from collections import Counter

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel


@dataclasses.dataclass(frozen=True)
class Difference:
    kind: str
    name: str
    ranks: tuple[int, ...]
    largest: float


@dataclasses.dataclass(frozen=True)
class Divergence:
    step: int
    agreed: int
    differences: list[Difference]


def collect(model, optimizer, gradients):
    """Everything to compare: {(kind, name): tensor}."""
    model = model.module if isinstance(model, DistributedDataParallel) else model
    values = {}
    for name, p in model.named_parameters():
        values["parameter", name] = p.detach()
    for name, b in model.named_buffers():
        values["buffer", name] = b.detach()
    if gradients:
        for name, p in model.named_parameters():
            if p.grad is not None:
                values["gradient", name] = p.grad.detach()
    if optimizer is not None:
        names = {p: name for name, p in model.named_parameters()}
        for g, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                for k, number in enumerate(value) if isinstance(value, tuple) else [("", value)]:
                    if isinstance(number, (bool, int, float)):
                        place = f"[{k}]" if isinstance(value, tuple) else ""
                        values["optimizer", f"param_groups[{g}].{key}{place}"] = torch.tensor(number, dtype=torch.float64)
            for i, p in enumerate(group["params"]):
                for key, value in optimizer.state.get(p, {}).items():
                    name = names.get(p, f"param_groups[{g}].params[{i}]")
                    if not isinstance(value, torch.Tensor):
                        value = torch.tensor(value, dtype=torch.float64)
                    values["optimizer", f"{name}.{key}"] = value.detach()
    return values


def checksum(tensor):
    """Python integers: the bytes as one long number, modulo a prime."""
    data = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    number = int.from_bytes(b"\1" + data, "little") % ((1 << 61) - 1)
    return (number * 31 + sum(f"{tensor.dtype}{list(tensor.shape)}".encode())) % ((1 << 61) - 1)


def distance(one, other):
    if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
        return float("inf")
    if one.numel() == 0:
        return 0.0
    if one.dtype.is_complex:
        one, other = one.to(torch.complex128), other.to(torch.complex128)
    elif one.dtype.is_floating_point:
        one, other = one.double(), other.double()
    else:
        one, other = one.long(), other.long()
    equal = (one == other) | ((one != one) & (other != other))
    gap = (one - other).abs().double().masked_fill(equal, 0.0)
    return float(torch.where(gap.isnan(), torch.full_like(gap, float("inf")), gap).max())


def find_divergence(model, optimizer=None, *, gradients=True, tolerance=0.0):
    values = collect(model, optimizer, gradients)
    sums = {key: checksum(value) for key, value in values.items()}
    world = dist.get_world_size()

    # First whether all hold the same names, so that the second vector is as long everywhere.
    names = int.from_bytes(hashlib.sha256(repr(list(sums)).encode()).digest()[:7], "big")
    head = torch.tensor([names, -names])
    dist.all_reduce(head, op=dist.ReduceOp.MAX)
    if head[0] == -head[1]:
        vector = torch.tensor(list(sums.values()))
        both = torch.cat([vector, -vector])
        dist.all_reduce(both, op=dist.ReduceOp.MAX)
        if torch.equal(both[: len(vector)], -both[len(vector) :]):
            return []

    tables = [None] * world
    dist.all_gather_object(tables, sums)
    order = []
    for table in tables:
        order += [key for key in table if key not in order]
    kinds = ["parameter", "buffer", "gradient", "optimizer"]
    order.sort(key=lambda key: kinds.index(key[0]))
    suspects = [key for key in order if len({table.get(key) for table in tables}) > 1]
    held = [None] * world
    dist.all_gather_object(held, {key: values[key].cpu() for key in suspects if key in values})
    found = []
    for key in suspects:
        every = [table.get(key) for table in tables]
        counts = Counter(every)
        usual = max(every, key=lambda one: counts[one])
        source = every.index(usual)
        ranks = tuple(r for r in range(world) if every[r] != usual)
        largest = max(distance(held[r].get(key), held[source].get(key)) for r in ranks)
        if tolerance == 0 or largest > tolerance:
            found.append(Difference(key[0], key[1], ranks, largest))
    return found


class DivergenceWatch:
    def __init__(self, model, optimizer=None, every=1, *, gradients=True, tolerance=0.0):
        if every < 1:
            raise ValueError(f"every must be at least 1, not {every}")
        self.model, self.optimizer, self.every = model, optimizer, every
        self.options = {"gradients": gradients, "tolerance": tolerance}
        self.steps = 0
        self.agreed = 0
        self.first = None

    def step(self):
        self.steps += 1
        if self.first is not None or self.steps % self.every != 0:
            return self.first
        found = find_divergence(self.model, self.optimizer, **self.options)
        if found:
            self.first = Divergence(self.steps, self.agreed, found)
        else:
            self.agreed = self.steps
        return self.first
