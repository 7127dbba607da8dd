"""Exercise device_report: say where each tensor is, and how to move one that is on the wrong device.

Chapter 3, "Devices". To see it at work, no GPU needed (the "meta" device stands in for one):

    python exercises/device_report.py
"""

import dataclasses
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
        raise NotImplementedError("device_report: say the verdict in the first line, then every tensor")


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
    raise NotImplementedError("device_report: collect every tensor, and decide where they should be")


if __name__ == "__main__":
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).to("meta")
    data = {"x": torch.randn(2, 4, device="meta"), "y": torch.tensor([0, 2])}
    print(device_report(net, data, loss=nn.CrossEntropyLoss(weight=torch.ones(3))))
