"""In a launcher's process: `launch_distributed` with a model that tells where it was trained. Nothing is judged here."""

from __future__ import annotations

import multiprocessing
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from lockstep.ranks import observe

FEATURES, CLASSES = 6, 3


class Classifier(nn.Module):
    """A linear classifier with the same first weights in every process; reports the process that trains it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES)
        with torch.no_grad():
            self.linear.weight.copy_(torch.linspace(-0.5, 0.5, FEATURES * CLASSES).view(CLASSES, FEATURES))
            self.linear.bias.zero_()
        self.told = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, FEATURES) → (B, CLASSES)."""
        if not self.told:
            self.told = True
            seen = {
                "pid": os.getpid(),
                "parent": os.getppid(),
                "port": os.environ.get("MASTER_PORT", ""),
                "rank": -1,
                "world_size": 1,
            }
            if dist.is_initialized():
                seen |= {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
            observe("trained_in", seen)
        return self.linear(x)


class Breaking(Classifier):
    """Fails on rank 1, in its second forward pass."""

    steps = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Raises ValueError on rank 1 the second time."""
        self.steps += 1
        if self.steps == 2 and dist.is_initialized() and dist.get_rank() == 1:
            raise ValueError(f"rank 1 ran out of luck ({os.environ['LOCKSTEP_WORD']})")
        return super().forward(x)


def launches(submission, ranks: int, x: torch.Tensor, y: torch.Tensor, epochs: int) -> None:
    """Launch, and report what came back and what was changed."""
    before = dict(os.environ)
    observe("launcher", os.getpid())
    weights = submission.launch_distributed(ranks, Classifier, TensorDataset(x, y), epochs)
    observe("type", type(weights).__name__)
    if isinstance(weights, dict):
        observe("weights", _tensors(weights))
    changed = {name for name in {*before, *os.environ} if before.get(name) != os.environ.get(name)}
    observe("changed", sorted(changed))
    observe("children", len(multiprocessing.active_children()))


def launches_in_turn(submission, sizes: list[int], x: torch.Tensor, y: torch.Tensor, epochs: int) -> None:
    """Launch once with each number of ranks, and report what came back each time."""
    returned = []
    for ranks in sizes:
        weights = submission.launch_distributed(ranks, Classifier, TensorDataset(x, y), epochs)
        returned.append(_tensors(weights) if isinstance(weights, dict) else {})
    observe("in turn", returned)


def _tensors(weights: dict) -> dict[str, torch.Tensor]:
    return {str(name): value for name, value in weights.items() if isinstance(value, torch.Tensor)}


def breaks(submission, ranks: int, x: torch.Tensor, y: torch.Tensor, epochs: int, word: str) -> None:
    """Launch a training that fails on rank 1, and report what reached the caller."""
    os.environ["LOCKSTEP_WORD"] = word
    error = None
    try:
        submission.launch_distributed(ranks, Breaking, TensorDataset(x, y), epochs)
    except NotImplementedError:
        raise
    except BaseException as caught:
        error = f"{type(caught).__name__}: {caught}"
    observe("error", error)
    observe("children", len(multiprocessing.active_children()))
