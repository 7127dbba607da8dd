# style: one small function for each kind of container, chosen by type
import dataclasses
import functools
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

    def advice(self, one: Placed) -> str:
        match one.kind:
            case "batch":
                return f"write {one.path} = {one.path}.to(device)"
            case "attribute":
                return "call register_buffer in __init__, or use an nn.ModuleList, so that .to() knows of it"
            case _:
                return f"write {one.path.partition('.')[0]}.to(device)"

    def __str__(self) -> str:
        table = [" | ".join([one.path, one.kind, str(one.device), str(one.dtype)]) for one in self.tensors]
        wrong = [f"{one.path}: {one.device} -> {self.device}; {self.advice(one)}" for one in self.misplaced]
        return "\n".join((wrong or [f"ALL on {self.device}"]) + table)


@functools.singledispatch
def inside(value):
    if dataclasses.is_dataclass(value):
        return [(f".{field.name}", getattr(value, field.name)) for field in dataclasses.fields(value)]
    return []


@inside.register(Mapping)
def _(value):
    return [(f'["{key}"]' if type(key) is str else f"[{key}]", item) for key, item in value.items()]


@inside.register(list)
def _(value):
    return [(f"[{i}]", item) for i, item in enumerate(value)]


@inside.register(tuple)
def _(value):
    names = getattr(value, "_fields", None)
    return [(f".{names[i]}" if names else f"[{i}]", item) for i, item in enumerate(value)]


@inside.register(nn.Module)
def _(value):
    own = [(f".{k}", v) for k, v in vars(value).items() if k not in vars(nn.Module())]
    return [(f".{k}", v) for k, v in [*value.named_parameters(), *value.named_buffers()]] + own


def leaves(value, path):
    if isinstance(value, torch.Tensor):
        yield path, value
    for step, item in inside(value) if not isinstance(value, torch.Tensor) else ():
        yield from leaves(item, path + step)


def module_rows(module, root, known):
    for kind, pairs in (("parameter", module.named_parameters()), ("buffer", module.named_buffers())):
        for name, tensor in pairs:
            if known.setdefault(id(tensor), (root, name)) == (root, name):
                yield kind, f"{root}.{name}", tensor
    for name, part in module.named_modules(prefix=root):
        for path, tensor in leaves(part, name):
            if id(tensor) not in known:
                known[id(tensor)] = None
                yield "attribute", path, tensor


def device_report(model, *batch, loss=None, device=None):
    model = getattr(model, "module", model) if isinstance(model, DistributedDataParallel) else model
    known = {}
    rows = list(module_rows(model, "model", known))
    places = [tensor.device for kind, _, tensor in rows if kind == "parameter"]
    if isinstance(loss, nn.Module):
        rows += module_rows(loss, "loss", known)
    for path, tensor in leaves(list(batch), "batch"):
        if id(tensor) not in known:
            known[id(tensor)] = None
            rows.append(("batch", path, tensor))
    if device is None:
        device = max(set(places), key=places.count)
    return DeviceReport(torch.device(device), [Placed(kind, path, t.device, t.dtype) for kind, path, t in rows])
