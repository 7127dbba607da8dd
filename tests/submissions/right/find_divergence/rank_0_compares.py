# style: rank 0 collects, compares and broadcasts its list
import dataclasses
import zlib

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


def everything(model, optimizer, gradients):
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


class Rank0:
    """Rank 0 compares, and tells the others."""

    def __init__(self, values):
        self.values = values
        self.world, self.rank = dist.get_world_size(), dist.get_rank()

    def crc(self, key):
        tensor = self.values[key]
        data = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return zlib.crc32(data, zlib.crc32(repr((key, tensor.dtype, tensor.shape)).encode()))

    def fetch(self, value):
        got = [None] * self.world if self.rank == 0 else None
        dist.gather_object(value, got, dst=0)
        return got

    def tell(self, value):
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def compare(self, tolerance):
        sums = {key: self.crc(key) for key in self.values}
        tables = self.fetch(sums)
        wanted = None
        if self.rank == 0:
            keys = [key for table in tables for key in table]
            keys = sorted(set(keys), key=lambda key: (("parameter", "buffer", "gradient", "optimizer").index(key[0]), keys.index(key)))
            wanted = [key for key in keys if len({table.get(key, -1) for table in tables}) > 1]
        wanted = self.tell(wanted)
        copies = self.fetch({key: self.values[key].cpu() for key in wanted if key in self.values})
        found = []
        for key in wanted if self.rank == 0 else ():
            sums = [table.get(key, -1) for table in tables]
            usual = next(one for one in sums if sums.count(one) == max(map(sums.count, sums)))
            model = copies[sums.index(usual)].get(key)
            ranks = [rank for rank in range(self.world) if sums[rank] != usual]
            far = max(apart(model, copies[rank].get(key)) for rank in ranks)
            if not tolerance or far > tolerance:
                found.append(Difference(*key, tuple(ranks), far))
        return self.tell(found)


def apart(one, other):
    if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
        return float("inf")
    largest = 0.0
    for a, b in zip(one.flatten().tolist(), other.flatten().tolist()):
        if a == b or (a != a and b != b):
            continue
        gap = abs(a - b)
        largest = max(largest, float("inf") if gap != gap else float(gap))
    return largest


def find_divergence(model, optimizer=None, *, gradients=True, tolerance=0.0):
    job = Rank0(everything(model, optimizer, gradients))
    total = 0
    for number, key in enumerate(job.values):
        total = (total * 1000003 + job.crc(key) + number) % (1 << 52)
    agree = [None] * job.world
    dist.all_gather_object(agree, total)
    return [] if len(set(agree)) == 1 else job.compare(tolerance)


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
