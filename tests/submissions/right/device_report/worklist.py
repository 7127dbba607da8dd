# style: a stack of things to look at, no recursion
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel


@dataclasses.dataclass(frozen=True)
class Placed:
    kind: str
    path: str
    device: torch.device
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True)
class DeviceReport:
    device: torch.device
    tensors: list[Placed]

    @property
    def misplaced(self) -> list[Placed]:
        return [
            one
            for one in self.tensors
            if one.device.type != self.device.type or self.device.index not in (None, one.device.index)
        ]

    def __str__(self) -> str:
        lines = []
        for one in self.misplaced:
            if one.kind == "batch":
                todo = f"{one.path} = {one.path}.to({self.device!r})"
            elif one.kind == "attribute":
                todo = "register it, with register_buffer or nn.ModuleList"
            else:
                owner = one.path.split(".")[0]
                todo = f"{owner}.to({self.device!r})"
            lines.append(f"{one.path} is on {one.device} instead of {self.device}: {todo}")
        if not lines:
            lines.append(f"All {len(self.tensors)} tensors are on {self.device}.")
        for one in self.tensors:
            lines.append(f"{one.kind} {one.path}: {one.device}, {one.dtype}")
        return "\n".join(lines)


KNOWN = frozenset(nn.Module().__dict__)


def parts(value, path):
    """What lies in value, one level down."""
    if isinstance(value, nn.Module):
        for name, item in [*value.named_parameters(recurse=False), *value.named_buffers(recurse=False)]:
            yield item, path + "." + name
        for name, item in value.__dict__.items():
            if name not in KNOWN:
                yield item, path + "." + name
        for name, item in value.named_children():
            yield item, path + "." + name
    elif isinstance(value, Mapping):
        for key in value:
            yield value[key], path + ("['" + key + "']" if isinstance(key, str) else f"[{key}]").replace("'", '"')
    elif hasattr(value, "_fields"):
        for name, item in zip(value._fields, value):
            yield item, path + "." + name
    elif isinstance(value, (list, tuple)):
        for number in range(len(value)):
            yield value[number], path + "[" + str(number) + "]"
    elif dataclasses.is_dataclass(value):
        for name, item in vars(value).items():
            yield item, path + "." + name


def search(root, path, named):
    stack, result = [(root, path)], []
    while stack:
        value, where = stack.pop()
        if isinstance(value, torch.Tensor):
            if id(value) not in named:
                named[id(value)] = where
                result.append((where, value))
        else:
            stack.extend(reversed(list(parts(value, where))))
    return result


def of_module(module, title, named):
    result = []
    registered = [("parameter", *pair) for pair in module.named_parameters()]
    registered += [("buffer", *pair) for pair in module.named_buffers()]
    for kind, name, tensor in registered:
        if id(tensor) not in named:
            named[id(tensor)] = name
            result.append(Placed(kind, f"{title}.{name}", tensor.device, tensor.dtype))
    return result + [Placed("attribute", path, t.device, t.dtype) for path, t in search(module, title, named)]


def device_report(model: nn.Module, *batch: Any, loss=None, device=None) -> DeviceReport:
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    named: dict = {}
    rows = of_module(inner, "model", named)
    votes: dict = {}
    for row in rows:
        if row.kind == "parameter":
            votes[row.device] = votes.get(row.device, 0) + 1
    if hasattr(loss, "named_buffers"):
        rows.extend(of_module(loss, "loss", named))
    for index, item in enumerate(batch):
        rows.extend(Placed("batch", path, t.device, t.dtype) for path, t in search(item, f"batch[{index}]", named))
    best = device if device is not None else sorted(votes, key=lambda d: -votes[d])[0]
    return DeviceReport(torch.device(best), rows)
