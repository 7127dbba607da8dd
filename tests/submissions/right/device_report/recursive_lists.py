# style: one function that calls itself and fills a list
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


OWN = set(vars(nn.Module()))


def walk(value, path, kind, seen, out):
    if isinstance(value, torch.Tensor):
        if id(value) not in seen:
            seen.add(id(value))
            out.append(Placed(kind, path, value.device, value.dtype))
    elif isinstance(value, nn.Module):
        for name, tensor in value.named_parameters():
            walk(tensor, f"{path}.{name}", kind, seen, out)
        for name, tensor in value.named_buffers():
            walk(tensor, f"{path}.{name}", kind, seen, out)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            step = f'["{key}"]' if isinstance(key, str) else f"[{key!r}]"
            walk(item, path + step, kind, seen, out)
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        for name in value._fields:
            walk(getattr(value, name), f"{path}.{name}", kind, seen, out)
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            walk(item, f"{path}[{number}]", kind, seen, out)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            walk(getattr(value, field.name), f"{path}.{field.name}", kind, seen, out)


def module_tensors(module, path, seen):
    out = []
    for name, tensor in module.named_parameters():
        walk(tensor, f"{path}.{name}", "parameter", seen, out)
    for name, tensor in module.named_buffers():
        walk(tensor, f"{path}.{name}", "buffer", seen, out)
    for name, part in module.named_modules():
        for key, value in vars(part).items():
            if key in OWN:
                continue
            where = f"{path}.{name}.{key}" if name else f"{path}.{key}"
            walk(value, where, "attribute", seen, out)
    return out


def device_report(model, *batch: Any, loss: Any = None, device=None) -> DeviceReport:
    if isinstance(model, DistributedDataParallel):
        model = model.module
    seen = set()
    tensors = module_tensors(model, "model", seen)
    devices = [one.device for one in tensors if one.kind == "parameter"]
    if isinstance(loss, nn.Module):
        tensors += module_tensors(loss, "loss", seen)
    for number, item in enumerate(batch):
        walk(item, f"batch[{number}]", "batch", seen, tensors)
    if device is None:
        device = max(devices, key=devices.count)
    return DeviceReport(torch.device(device), tensors)
