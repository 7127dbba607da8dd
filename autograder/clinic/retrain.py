"""What a mended job is compared with: the same training again, in one process. `trained` judges by it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from clinic.case import samples
from clinic.support import clinic_data
from judging.sampling import orders
from torch.utils.data import DataLoader, DistributedSampler

from lockstep.grading import Run

State = dict[str, torch.Tensor]
Batch = tuple[torch.Tensor, torch.Tensor]
Groups = Sequence[Sequence[int]]
Forward = Callable[[torch.nn.Module, torch.Tensor, int, int], torch.Tensor]
"""(model, features, rank, step from 0) to scores."""
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


def read(run: Run, records: int, epochs: int = 1) -> list[list[int]]:
    """The indices that each rank read; a job that takes none one by one is believed to take those of a DistributedSampler."""
    seen = [[index for _, index in part] for part in samples(run)]
    if any(seen):
        return seen
    for dealt in orders(records, run.world_size, epochs):
        for order, part in zip(dealt, seen, strict=True):
            part.extend(order)
    return seen


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


@dataclass(frozen=True)
class Trained:
    """One rank's model in the end, and its own loss in each step, before the update."""

    state: State
    losses: list[float]


@dataclass(frozen=True)
class Job:
    """How a fixed job trains: a network made under seed 0, SGD, and `shares(world_size)[rank]`, a rank's batches in order."""

    network: Callable[[], torch.nn.Module]
    rate: float
    shares: Callable[[int], list[list[Batch]]]
    epochs: int = 1
    forward: Forward = lambda model, features, rank, step: model(features)
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.nn.functional.cross_entropy
    weight_decay: float = 0.0
    seed: Callable[[int], int] = lambda rank: 0

    def start(self, rank: int = 0) -> torch.nn.Module:
        """The network before the first step, made without a trace on this process's random numbers."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed(rank))
            return self.network()

    def train(
        self, world_size: int, *, divisor: float = 0, groups: Groups = (), only: str = "", steps: int | None = None
    ) -> list[Trained]:
        """What each rank has in the end, where the gradients of a group are added and divided by `divisor` (0: its size).

        All ranks are one group where none is given. The parameters besides `only` this one follow each rank's own
        gradients. Only the first `steps` are taken where this is given.
        """
        shares = [share[:steps] for share in self.shares(world_size)]
        models = [self.start(rank) for rank in range(world_size)]
        losses: list[list[float]] = [[] for _ in shares]
        for step, batches in enumerate(zip(*shares, strict=True)):
            gradients = []
            for rank, (model, (features, classes)) in enumerate(zip(models, batches, strict=True)):
                loss = self.loss(self.forward(model, features, rank, step), classes)
                losses[rank].append(loss.item())
                named = dict(model.named_parameters())
                own = torch.autograd.grad(loss, list(named.values()), allow_unused=True, materialize_grads=True)
                gradients.append(dict(zip(named, own, strict=True)))
            for group in groups or [range(world_size)]:
                for name in [only] if only else list(gradients[0]):
                    mean = sum(gradients[rank][name] for rank in group) / (divisor or len(group))
                    for rank in group:
                        gradients[rank][name] = mean
            for model, gradient in zip(models, gradients, strict=True):
                with torch.no_grad():
                    for name, parameter in model.named_parameters():
                        parameter -= self.rate * (gradient[name] + self.weight_decay * parameter)
        states = [{name: value.detach().clone() for name, value in model.state_dict().items()} for model in models]
        return [Trained(*one) for one in zip(states, losses, strict=True)]

    def state(self, world_size: int, **how: Any) -> State:
        """Rank 0's model after `train`."""
        return self.train(world_size, **how)[0].state

    def alone(self, world_size: int) -> list[State]:
        """Each rank's model where it follows its own gradients."""
        return [one.state for one in self.train(world_size, groups=[[rank] for rank in range(world_size)])]

    def going(self, forward: Forward) -> Job:
        """The same job with another forward pass."""
        return replace(self, forward=forward)


def sampled(
    size: int, epochs: int = 1, told: bool = True, dtype: torch.dtype = torch.float32, count: int = 48
) -> Callable[[int], list[list[Batch]]]:
    """Batches of `size` as a DistributedSampler deals out the clinic's records, told each epoch, or with epoch 0's order."""

    def shares(world_size: int) -> list[list[Batch]]:
        records, dealt = clinic_data.Records(count), []
        for rank in range(world_size):
            sampler = DistributedSampler(records, num_replicas=world_size, rank=rank)
            loader, share = DataLoader(records, batch_size=size, sampler=sampler), []
            for epoch in range(epochs):
                sampler.set_epoch(epoch if told else 0)
                share += [(features.to(dtype), classes) for features, classes in loader]
            dealt.append(share)
        return dealt

    return shares


def as_read(run: Run, size: int, records: int = 48, epochs: int = 1) -> Callable[[int], list[list[Batch]]]:
    """Batches of `size` of the records that the ranks of this run read, however they shared them."""

    def shares(world_size: int) -> list[list[Batch]]:
        every = clinic_data.Records(records)
        dealt = [[batch(every, part) for part in cut(seen, size)] for seen in read(run, records, epochs)]
        return [share[: min(map(len, dealt))] for share in dealt]

    return shares


def mean(states: Sequence[State]) -> State:
    """The mean of several models."""
    return {name: sum(state[name] for state in states) / len(states) for name in states[0]}  # type: ignore[misc]
