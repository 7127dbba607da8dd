# style: an object that remembers what it has seen, and visits by asking what a value can do
import dataclasses
from collections import Counter
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
                todo = f"{one.path} = {one.path}.to('{self.device}')"
            elif one.kind == "attribute":
                todo = "register it, with register_buffer or nn.ModuleList"
            else:
                owner = one.path.split(".")[0]
                todo = f"{owner}.to('{self.device}')"
            lines.append(f"{one.path} is on {one.device} instead of {self.device}: {todo}")
        if not lines:
            lines.append(f"All {len(self.tensors)} tensors are on {self.device}.")
        for one in self.tensors:
            lines.append(f"{one.kind} {one.path}: {one.device}, {one.dtype}")
        return "\n".join(lines)


class Visitor:
    def __init__(self):
        self.rows = []
        self.seen = []

    def add(self, kind, path, tensor):
        if any(tensor is known for known in self.seen):
            return
        self.seen.append(tensor)
        self.rows.append(Placed(kind=kind, path=path, device=tensor.device, dtype=tensor.dtype))

    def module(self, module, path):
        for name, tensor in module.named_parameters():
            self.add("parameter", ".".join((path, name)), tensor)
        for name, tensor in module.named_buffers():
            self.add("buffer", ".".join((path, name)), tensor)
        for name, part in module.named_modules(prefix=path):
            for key in part.__dict__.keys() - nn.Module().__dict__.keys():
                self.visit("attribute", f"{name}.{key}", part.__dict__[key])

    def visit(self, kind, path, value):
        if torch.is_tensor(value):
            self.add(kind, path, value)
        elif isinstance(value, nn.Module):
            for name, tensor in value.state_dict(keep_vars=True).items():
                self.visit(kind, f"{path}.{name}", tensor)
            for name, tensor in value.named_buffers():
                self.visit(kind, f"{path}.{name}", tensor)
        elif hasattr(value, "keys"):
            for key in value.keys():
                quoted = '"' + key + '"' if isinstance(key, str) else repr(key)
                self.visit(kind, f"{path}[{quoted}]", value[key])
        elif hasattr(value, "__dataclass_fields__"):
            for name in value.__dataclass_fields__:
                self.visit(kind, f"{path}.{name}", getattr(value, name))
        elif hasattr(value, "_asdict"):
            for name, item in value._asdict().items():
                self.visit(kind, f"{path}.{name}", item)
        elif isinstance(value, (list, tuple)):
            for number, item in enumerate(value):
                self.visit(kind, f"{path}[{number}]", item)


def device_report(model: nn.Module, *batch: Any, loss: Any = None, device: Any = None) -> DeviceReport:
    visitor = Visitor()
    visitor.module(model.module if isinstance(model, DistributedDataParallel) else model, "model")
    if device is None:
        device = Counter(row.device for row in visitor.rows if row.kind == "parameter").most_common(1)[0][0]
    if isinstance(loss, nn.Module):
        visitor.module(loss, "loss")
    for number, item in enumerate(batch):
        visitor.visit("batch", f"batch[{number}]", item)
    return DeviceReport(torch.device(device), visitor.rows)
