"""Exercise device_report: which tensor is where, and what to write where one is in the wrong place.

Chapter 3, “Devices”. To see it at work, no GPU needed (the "meta" device stands in for one):

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
    """What `device_report` found: every tensor, in order, and the device on which all of them should be."""

    device: torch.device
    tensors: list[Placed]

    @property
    def misplaced(self) -> list[Placed]:
        """The tensors that are on another device. "cuda" without an index stands for any GPU."""
        return [
            one
            for one in self.tensors
            if one.device.type != self.device.type or self.device.index not in (None, one.device.index)
        ]

    def __str__(self) -> str:
        """The verdict, then one line for every tensor, with its path, device and type.

        All is well: the first line begins with "all" and names the device. Otherwise it names the first misplaced
        tensor, the device where it is, the device where it should be, and what to write to get it there:

        - a registered parameter or buffer moves with its module: `model.to("cuda")`, `loss.to("cuda")`;
        - data are moved by hand: `batch[1]["mask"] = batch[1]["mask"].to("cuda")`;
        - an attribute is moved by no `.to()`: it has to be registered first, with `register_buffer` (or, for modules in
          a plain list, with `nn.ModuleList`).
        """
        raise NotImplementedError("device_report: say the verdict in the first line, then every tensor")


def device_report(
    model: nn.Module, *batch: Any, loss: Any = None, device: torch.device | str | None = None
) -> DeviceReport:
    """Find every tensor that a training step touches, and say on which device and of which type it is.

    Nothing is moved, changed or computed.

    - The model's parameters, frozen ones too, and its buffers, also those that are not in its `state_dict`, under the
      names of `named_parameters()` and `named_buffers()`, behind `model.`. A tied parameter comes once. A DDP wrapper is
      looked through: there is no `module.` in a name.
    - Its attributes: tensors that a module holds without having registered them, directly or in lists, tuples and
      dictionaries, and the tensors of modules that lie in such a list. `model.to(device)` leaves all of these where they
      are. What has been named as a parameter or buffer is not named again (an `nn.LSTM` keeps a second list of its).
    - `loss`, looked at in the same way when it is a module, behind `loss.`. A plain loss holds no tensor, and there is
      nothing to move; `nn.CrossEntropyLoss(weight=…)` holds one.
    - The batch, however it is nested: mappings, lists, tuples, named tuples and dataclasses. `batch[0]`,
      `batch[1]["boxes"][2]`, `batch[1].mask`. What is no tensor is passed over. The lengths in a `PackedSequence` stay on
      the CPU by design, and are passed over too.

    Order: model (parameters, buffers, attributes), loss, batch. The optimizer is not looked at: its state follows its
    parameters, and its step counters stay on the CPU.

    Args:
        model: the module that is trained, wrapped in DDP or not.
        batch: what the training step takes from its loader, in one piece or in several.
        loss: the loss, a module or a function.
        device: where all of it should be; by default where most of the model's parameters are.
    """
    raise NotImplementedError("device_report: collect every tensor, and decide where they should be")


if __name__ == "__main__":
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).to("meta")
    data = {"x": torch.randn(2, 4, device="meta"), "y": torch.tensor([0, 2])}
    print(device_report(net, data, loss=nn.CrossEntropyLoss(weight=torch.ones(3))))
