"""What the mends of silent cases are compared with: the same training again, on one process, from the records that were read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from clinic.case import DATA, samples
from clinic.support import clinic_data
from torch.utils.data import DataLoader, DistributedSampler

from lockstep.grading import Grader, Hypothesis, Run, Tolerance

State = dict[str, torch.Tensor]
Batch = tuple[torch.Tensor, torch.Tensor]
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


DIVIDES = r"/ ?= || backward\(\) || /"
NEAR = Tolerance(relative=1e-4, absolute=2e-5)
"""As `CLOSE`, for `Grader.explain`."""


def read(run: Run, records: int, epochs: int = 1) -> list[list[int]]:
    """The indices that each rank read; a job that takes none one by one is believed to take those of a DistributedSampler."""
    seen = [[index for _, index in part] for part in samples(run)]
    if any(seen):
        return seen
    samplers = [DistributedSampler(range(records), run.world_size, rank) for rank in range(run.world_size)]  # type: ignore[arg-type, var-annotated]
    for epoch in range(epochs):
        for sampler, part in zip(samplers, seen, strict=True):
            sampler.set_epoch(epoch)
            part.extend(sampler)
    return seen


def again(
    seen: Sequence[Sequence[int]], model: torch.nn.Module, size: int, times: float = 1.0, **options: float
) -> State:
    """The model's state after SGD with `options` on what the ranks have `seen` of 48 records, in batches of `size`.

    Each step's gradient is the mean of the ranks' gradients, `times` a number.
    """
    optimizer, records = torch.optim.SGD(model.parameters(), **options), clinic_data.Records(48)
    for together in zip(*(cut(part, size) for part in seen), strict=False):
        optimizer.zero_grad()
        for part in together:
            features, classes = batch(records, part)
            loss = torch.nn.functional.cross_entropy(model(features), classes)
            (loss * times / len(together)).backward()
        optimizer.step()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def mistakes(trained: Callable[[float], State], ranks: int, begin: State | None = None) -> list[Hypothesis]:
    """What else may have been made of the model: `trained(times)` is that with gradients `times` as large.

    `begin` is the model of before the first step, where gradients of zero change it.
    """
    told = "That is what gradients {} give."
    return [
        Hypothesis(
            "untrained-weights-returned",
            "Those are the values of before the first step.",
            lambda: begin or trained(0),
            r"deepcopy || return ",
        ),
        Hypothesis("double-averaging", told.format(f"divided by {ranks} twice"), lambda: trained(1 / ranks), DIVIDES),
        Hypothesis(
            "gradients-summed",
            told.format(f"summed over the {ranks} ranks"),
            lambda: trained(ranks),
            r"all_reduce || " + DIVIDES,
        ),
    ]


def judge_shares(grader: Grader, run: Run, records: int, epochs: int = 1, at: str = DATA) -> None:
    """In each epoch the ranks have to share the records between them, each taking as many as the others."""
    share, size = -(-records // run.world_size), run.world_size
    seen = read(run, records, epochs)
    for rank, part in enumerate(seen):
        if len(part) == records * epochs:
            said = f"Rank {rank} of {size} trains on all {records} records, and not on {share} of them."
            grader.fail("same-shard", said, of=[rank], at=at)
        if not records // size * epochs <= len(part) <= share * epochs:
            said = f"Rank {rank} of {size} read {len(part)} records; {epochs} epoch{'s' * (epochs > 1)} of {share} are {share * epochs}."
            grader.fail("another-illness", said, of=[rank], at=r"for .*epoch || " + at)
    for epoch in range(epochs):
        all_parts = [index for part in seen for index in cut(part, len(part) // epochs)[epoch]]
        if missing := records - len(set(all_parts)):
            said = f"In epoch {epoch} the {size} ranks read {records - missing} of the {records} records, {missing} of them more than once."
            grader.fail("another-illness", said, at=at)


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

    def start(self) -> torch.nn.Module:
        """The network before the first step, made without a trace on this process's random numbers."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.network()

    def train(
        self, world_size: int, *, divisor: float = 0, alone: bool = False, steps: int | None = None
    ) -> list[Trained]:
        """What each rank has in the end, where the gradients of all are added and divided by `divisor` (0: their number).

        `alone`: each rank follows its own gradients. Only the first `steps` are taken where this is given.
        """
        shares = [share[:steps] for share in self.shares(world_size)]
        models = [self.start() for _ in shares]
        losses: list[list[float]] = [[] for _ in shares]
        for step, batches in enumerate(zip(*shares, strict=True)):
            gradients = []
            for rank, (model, (features, classes)) in enumerate(zip(models, batches, strict=True)):
                loss = torch.nn.functional.cross_entropy(self.forward(model, features, rank, step), classes)
                losses[rank].append(loss.item())
                parameters = list(model.parameters())
                gradients.append(torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True))
            mean = [sum(same) / (divisor or world_size) for same in zip(*gradients, strict=True)]
            for model, own in zip(models, gradients, strict=True):
                with torch.no_grad():
                    for parameter, gradient in zip(model.parameters(), own if alone else mean, strict=True):
                        parameter -= self.rate * gradient
        states = [{name: value.detach().clone() for name, value in model.state_dict().items()} for model in models]
        return [Trained(*one) for one in zip(states, losses, strict=True)]

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
