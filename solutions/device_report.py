"""Exercise device_report: say where each tensor is, and how to move one that is on the wrong device.

Chapter 3, "Devices". To see it at work, no GPU needed (the "meta" device stands in for one):

    python exercises/device_report.py
"""

import dataclasses
from collections.abc import Iterator, Mapping  # solution-only
from typing import Any

import torch
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel


@dataclasses.dataclass(frozen=True)
class Placed:
    """One tensor and its place.

    `kind` is "parameter" or "buffer" for what a module has registered, "attribute" for any other tensor that it holds,
    and "batch" for the data. `path` says how to reach it: `model.encoder.weight`, `loss.weight`, `batch[1]["mask"]`.
    """

    kind: str
    path: str
    device: torch.device
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True)
class DeviceReport:
    """What `device_report` found: every tensor, in order, and the device that all of them should be on."""

    device: torch.device
    tensors: list[Placed]

    @property
    def misplaced(self) -> list[Placed]:
        """The tensors that are not on `self.device`. "cuda" without an index stands for any GPU."""
        return [
            one
            for one in self.tensors
            if one.device.type != self.device.type or self.device.index not in (None, one.device.index)
        ]

    def __str__(self) -> str:
        """The verdict in the first line; further down one line for each tensor, with its path, device and dtype.

        If every tensor is on `self.device`, the first line starts with "all" and names this device. Otherwise it names
        the first misplaced tensor, the device it is on, the device it should be on, and the fix:

        - a parameter or buffer moves with its module: `model.to("cuda")`, `loss.to("cuda")`;
        - data are moved by hand: `batch[1]["mask"] = batch[1]["mask"].to("cuda")`;
        - no `.to()` moves an attribute: register it first, with `register_buffer` (or `nn.ModuleList`, for modules in a
          plain list).
        """
        # --- solution: say the verdict in the first line, then every tensor ---
        verdicts = [
            f"{one.path} is on {one.device}, and should be on {self.device}: {_remedy(one, self.device)}"
            for one in self.misplaced
        ]
        if not verdicts:
            verdicts = [f"all {len(self.tensors)} tensors are on {self.device}"]
        width = max((len(one.path) for one in self.tensors), default=0)
        table = [
            f"  {one.path:<{width}}  {one.kind:<9}  {one.device}  {str(one.dtype).removeprefix('torch.')}"
            for one in self.tensors
        ]
        return "\n".join(verdicts + table)
        # --- end ---


def device_report(
    model: nn.Module, *batch: Any, loss: Any = None, device: torch.device | str | None = None
) -> DeviceReport:
    """Find every tensor that a training step uses, with its device and dtype.

    Do not move, change or compute anything. List each tensor once, in this order:

    1. The model's parameters, frozen ones too, and then its buffers, including those that are not in its `state_dict`.
       Their paths are the names from `named_parameters()` and `named_buffers()`, with the prefix `model.`. If DDP wraps
       the model, look inside the wrapper: no name contains `module.`.
    2. The model's attributes: unregistered tensors that a module holds, directly or in lists, tuples and dictionaries,
       and the parameters and buffers of modules in a plain list and of their children. `model.to(device)` moves none of
       these. Don't list a parameter or buffer again as an attribute, even if a module keeps a second list of them, as
       `nn.LSTM` does. You may assume that no list leads back to the model.
    3. The same for `loss`, with the prefix `loss.`, if it is a module. `nn.CrossEntropyLoss(weight=…)` holds a tensor;
       a loss without tensors is not mentioned.
    4. The batch, however it is nested: mappings, lists, tuples, named tuples and dataclasses. Its paths look like
       `batch[0]`, `batch[1]["boxes"][2]` and `batch[1].mask`. Skip numbers, text and None.

    Args:
        model: the module that is trained, wrapped in DDP or not.
        batch: what the training step takes from its loader, in one argument or in several; `batch[0]` is the first.
        loss: the loss, a module or a function.
        device: where every tensor should be; by default the device of most of the model's parameters. Count tensors or
            elements, as you like; if there are no parameters, or two devices have the same number, either will do.
    """
    # --- solution: collect every tensor, and decide where they should be ---
    if isinstance(model, DistributedDataParallel):
        model = model.module
    seen: set[int] = set()
    tensors = list(_of_module(model, "model", seen))
    where = [one.device for one in tensors if one.kind == "parameter"]
    if isinstance(loss, nn.Module):
        tensors += _of_module(loss, "loss", seen)
    for number, item in enumerate(batch):
        tensors += [_placed("batch", path, tensor) for path, tensor in _inside(item, f"batch[{number}]", seen)]
    if device is None:
        where = where or [one.device for one in tensors] or [torch.device("cpu")]
        device = max(where, key=where.count)  # the first of them, where two are equally frequent
    return DeviceReport(torch.device(device), tensors)
    # --- end ---


# --- solution-only ---
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))  # where nn.Module itself keeps parameters, buffers, children and hooks


def _remedy(one: Placed, device: torch.device) -> str:
    """The line that brings it there."""
    if one.kind == "batch":
        return f'{one.path} = {one.path}.to("{device}")'
    if one.kind == "attribute":
        return f'no .to() moves it; use register_buffer (nn.ModuleList for modules), then .to("{device}")'
    return f'{one.path.partition(".")[0]}.to("{device}")'


def _placed(kind: str, path: str, tensor: torch.Tensor) -> Placed:
    return Placed(kind, path, tensor.device, tensor.dtype)


def _of_module(module: nn.Module, path: str, seen: set[int]) -> Iterator[Placed]:
    """What a module has registered, then what it only holds."""
    for kind, named in (("parameter", module.named_parameters()), ("buffer", module.named_buffers())):
        for name, tensor in named:
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield _placed(kind, f"{path}.{name}", tensor)
    for name, part in module.named_modules(prefix=path):
        for attribute, value in vars(part).items():
            if attribute not in _OF_EVERY_MODULE:
                for where, tensor in _inside(value, f"{name}.{attribute}", seen):
                    yield _placed("attribute", where, tensor)


def _inside(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in a nest of containers, each once, with the way to them. `seen` also ends nests that hold themselves."""
    parts: list[tuple[str, Any]]
    if isinstance(value, torch.Tensor):
        parts = []
    elif isinstance(value, nn.Module):
        registered = [*value.named_parameters(), *value.named_buffers()]
        held = [(name, item) for name, item in vars(value).items() if name not in _OF_EVERY_MODULE]
        children = list(value.named_children())  # their registered tensors are named by then
        parts = [(f"{path}.{name}", item) for name, item in (*registered, *held, *children)]
    elif isinstance(value, Mapping):
        parts = [
            (f'{path}["{key}"]' if isinstance(key, str) else f"{path}[{key!r}]", item) for key, item in value.items()
        ]
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        parts = [(f"{path}.{name}", getattr(value, name)) for name in value._fields]
    elif isinstance(value, (list, tuple)):
        parts = [(f"{path}[{number}]", item) for number, item in enumerate(value)]
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = [(f"{path}.{field.name}", getattr(value, field.name)) for field in dataclasses.fields(value)]
    else:
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield path, value
    for where, item in parts:
        yield from _inside(item, where, seen)


# --- end ---
if __name__ == "__main__":
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).to("meta")
    data = {"x": torch.randn(2, 4, device="meta"), "y": torch.tensor([0, 2])}
    print(device_report(net, data, loss=nn.CrossEntropyLoss(weight=torch.ones(3))))

# lockstep-canary: d8b3cf535af5f15e
