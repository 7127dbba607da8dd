"""What the mends of silent cases are compared with: the same training again, on one process, from the records that were read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from clinic.support import clinic_data

from lockstep.grading import Run

State = dict[str, torch.Tensor]
VALUES = (clinic_data.FEATURES + 1) * clinic_data.CLASSES  # of the linear model
CLOSE = 1e-4
"""Sums in a different order differ by less than this after a few steps; a different training differs by more."""


def start(seed: int = 0) -> torch.nn.Linear:
    """The linear model that `torch.manual_seed(seed)` gives, without a trace on this process's random numbers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return torch.nn.Linear(clinic_data.FEATURES, clinic_data.CLASSES)


def batch(records: clinic_data.Records, indices: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Features of shape (N, 8) and classes of shape (N,)."""
    chosen = torch.tensor(list(indices), dtype=torch.int64)
    return records.features[chosen], records.classes[chosen]


def cut(items: Sequence[Any], size: int) -> list[Sequence[Any]]:
    """Parts of `size`, the last one with what is left."""
    return [items[begin : begin + size] for begin in range(0, len(items), size)]


def apart(state: State, other: State) -> float:
    """The largest difference of two states; infinite where they have other tensors or shapes."""
    if state.keys() != other.keys() or any(state[name].shape != other[name].shape for name in state):
        return float("inf")
    return max((float((state[name].double() - other[name].double()).abs().max()) for name in state), default=0.0)


def reductions(run: Run) -> list[int]:
    """How many all-reduces each rank took part in, whoever called them, those of DDP's constructor left out."""
    return [sum(call.kind == "all_reduce" and call.inside != "DDP()" for call in calls) for calls in run.collectives]


def averaged(run: Run, values: int) -> list[float]:
    """How often each rank put as many float values as the model has into all-reduces, those of DDP's constructor left out.

    By hand, in a hook or in DDP's backward, in pieces or as one tensor, in any precision.
    """
    return [
        sum(
            call.nbytes / getattr(torch, call.dtype).itemsize
            for call in calls
            if call.kind == "all_reduce" and call.inside != "DDP()" and "float" in call.dtype
        )
        / values
        for calls in run.collectives
    ]
