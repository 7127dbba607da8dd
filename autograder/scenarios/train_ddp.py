"""On the ranks: `train_ddp` is given a model that remembers every batch it was shown. Nothing is judged here."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from lockstep.grading.on_rank import mark, observe, rank, world_size

FEATURES, HIDDEN, CLASSES = 6, 8, 3

batches: list[list[int]] = []
modes: list[bool] = []
created: list[dict[str, torch.Tensor]] = []
sharpness = 1.0
"""Each rank's own, drawn for it: what a rank's loss and gradients are, no other rank can compute."""


class Classifier(nn.Module):
    """A small classifier. The first column of its input is the sample's number, and takes no part in the result.

    The logits are multiplied by this rank's sharpness. The frozen scale is here because a version that averages
    `parameter.grad` for every parameter meets a None in it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, HIDDEN)
        self.second = nn.Linear(HIDDEN, CLASSES)
        self.scale = nn.Parameter(torch.ones(()), requires_grad=False)
        created.append({name: value.detach().clone() for name, value in self.state_dict().items()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, 1 + FEATURES) → (B, CLASSES)."""
        if torch.is_grad_enabled():
            batches.append(x[:, 0].round().long().tolist())
            modes.append(self.training)
        return self.second(torch.tanh(self.first(x[:, 1:]))) * self.scale * sharpness

    def _apply(self, *args, **kwargs):  # .to(), .cuda(), .double() all come through here
        mark("model moved")
        return super()._apply(*args, **kwargs)


class Breaking(Classifier):
    """Fails in its second forward pass, on every rank."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Raises RuntimeError the second time."""
        if batches:
            raise RuntimeError("the model broke in its second step")
        return super().forward(x)


def trains(submission, x: torch.Tensor, y: torch.Tensor, epochs: int, options: dict, own: dict) -> None:
    """Train, and report what was shown, what came back, and what is still open. `own` is what no other rank knows."""
    global sharpness
    sharpness = own["sharpness"]
    torch.manual_seed(own["seed"])  # every rank begins with other weights; only rank 0's may count
    model = submission.train_ddp(rank(), world_size(), Classifier, TensorDataset(x, y), epochs, **options)
    observe("batches", batches)
    observe("modes", modes)
    observe("initial", created[0] if created else {})
    observe("created", len(created))
    observe("group_open", dist.is_available() and dist.is_initialized())
    observe("type", type(model).__name__)
    observe("is_module", isinstance(model, nn.Module))
    observe("is_wrapped", isinstance(model, (DistributedDataParallel, nn.DataParallel)))
    if isinstance(model, nn.Module):
        inner = model.module if isinstance(model, (DistributedDataParallel, nn.DataParallel)) else model
        observe("state", dict(inner.state_dict()))


def breaks(submission, x: torch.Tensor, y: torch.Tensor, epochs: int, options: dict) -> None:
    """Train where the caller is in a group already, then a model that fails; report what reached the caller, and whether
    each group is there afterwards.
    """
    error = ""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # the caller's own
    mine = dist.group.WORLD
    try:
        submission.train_ddp(rank(), world_size(), Classifier, TensorDataset(x, y), epochs, **options)
    except NotImplementedError:
        raise
    except Exception as refused:
        error = type(refused).__name__
    observe("refused", error)
    observe("kept", dist.is_initialized() and dist.group.WORLD is mine)
    if dist.is_initialized():
        dist.destroy_process_group()
    error = ""
    batches.clear()
    try:
        submission.train_ddp(rank(), world_size(), Breaking, TensorDataset(x, y), epochs, **options)
    except NotImplementedError:
        raise
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    observe("error", error)
    observe("group_open", dist.is_initialized())
