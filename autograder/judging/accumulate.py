"""What a step of `accumulate` has to come to: each micro-batch's loss and gradient, in double precision.

A submission's gradient is a mean over the ranks of sums over their micro-batches, each with some weight. The right weight
and every usual mistake's differ in nothing else, so `Step.mean` takes the weight as a function.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.nn import functional as F

from lockstep.grading import Collective, Grader, Mark, Run

FEATURES, HIDDEN, CLASSES = 6, 16, 5
SHAPES = {
    "first.weight": (HIDDEN, FEATURES), "first.bias": (HIDDEN,), "second.weight": (CLASSES, HIDDEN),
    "second.bias": (CLASSES,),
}  # fmt: skip
NUMBERS = [torch.Size(shape).numel() for shape in SHAPES.values()]
PAYLOAD = 4 * sum(NUMBERS)
FREE = 64  # bytes: a collective this small carries a number of samples or a loss
LR, STALE = 0.5, 0.75

Gradients = dict[str, torch.Tensor]
Sizes = list[list[list[int]]]
"""The number of samples of each micro-batch: `sizes[rank][step]`."""


@dataclass(frozen=True)
class Micro:
    """One micro-batch as it should come out: its number of samples, the mean loss over them, and its gradient."""

    count: int
    loss: float
    gradient: torch.Tensor


Weight = Callable[[list[Micro], Micro], float]
"""How much a micro-batch counts among those of its rank."""


@dataclass(frozen=True)
class Step:
    """One step: what the ranks held and saw, and what follows from it."""

    ranks: list[list[Micro]]
    plain: list[list[Micro]]  # without the smoothing
    after: list[list[Micro]]  # with the parameters after the step
    seen: list[dict[str, Any]]

    @property
    def sizes(self) -> list[list[int]]:
        """By rank, the numbers of samples of its micro-batches."""
        return [[micro.count for micro in own] for own in self.ranks]

    @cached_property
    def counts(self) -> list[int]:
        """The samples of each rank."""
        return [sum(own) for own in self.sizes]

    @property
    def total(self) -> int:
        """The samples of all ranks."""
        return sum(self.counts)

    @property
    def used(self) -> list[Gradients]:
        """By rank, the gradients that the optimizer used; a missing one counts as zeros."""
        return [whole(one["used"][0]) for one in self.seen]

    def mean(self, weight: Weight, ranks: list[list[Micro]] | None = None) -> Gradients:
        """DDP's mean of what the ranks have added up with this weight."""
        return named(torch.stack([weighted(own, weight) for own in ranks or self.ranks]).mean(0))

    @property
    def moved(self) -> list[Gradients]:
        """By rank, how far the step moved each parameter."""
        return [{name: one["end"][name].double() - one["start"][name].double() for name in SHAPES} for one in self.seen]

    @property
    def right(self) -> Gradients:
        """The gradient of the one big batch."""
        return self.mean(self.share)

    def loss(self, ranks: list[list[Micro]]) -> float:
        """The mean loss over all samples."""
        return sum(micro.loss * micro.count for own in ranks for micro in own) / self.total

    def share(self, own: list[Micro], micro: Micro) -> float:
        """The right weight: after DDP's division, that of the samples among all."""
        return micro.count * len(self.ranks) / self.total

    def sent_after(self, early: int) -> list[Gradients]:
        """By rank: the first `early` micro-batches were averaged, and the others stayed where they were."""
        total = torch.stack([weighted(own[:early], self.share) for own in self.ranks]).mean(0)
        return [named(total + weighted(own[early:], self.share)) for own in self.ranks]


def weighted(own: list[Micro], weight: Weight) -> torch.Tensor:
    """The weighted sum of the micro-batches' gradients; zeros for none."""
    none = torch.zeros(PAYLOAD // 4, dtype=torch.float64)
    return sum((micro.gradient * weight(own, micro) for micro in own), start=none)


def named(vector: torch.Tensor) -> Gradients:
    """One vector, cut into the parameters."""
    return {name: part.view(shape) for (name, shape), part in zip(SHAPES.items(), vector.split(NUMBERS), strict=True)}


def times(gradients: Gradients, factor: float) -> Gradients:
    """Every number times this."""
    return {name: gradient * factor for name, gradient in gradients.items()}


def whole(gradients: Gradients) -> Gradients:
    """With zeros for what is missing, in double precision."""
    return {name: gradients.get(name, torch.zeros(shape)).double() for name, shape in SHAPES.items()}


@dataclass(frozen=True)
class Played:
    """A run of some steps, and the data that each rank had: `x[rank, step]`, `y[rank, step]`."""

    run: Run
    x: torch.Tensor
    y: torch.Tensor
    sizes: Sizes
    special: bool
    """Whether the gradients held nan before the first step, the model has a frozen parameter and tied weights, `x` holds
    whole numbers, and the last `y` has two columns."""

    @cached_property
    def steps(self) -> list[Step]:
        """All steps, each computed from the parameters that the ranks then had."""
        seen = zip(*self.run.observed("steps"), strict=True)
        return [
            Step(self.micros(n), self.micros(n, smoothing=0.0), self.micros(n, "end"), list(of_rank))
            for n, of_rank in enumerate(seen)
        ]

    def micros(self, step: int, when: str = "start", smoothing: float = 0.3) -> list[list[Micro]]:
        """By rank, the micro-batches of one step, with its parameters at the `start` or `end`."""
        found = []
        for rank, seen in enumerate(self.run.observed("steps")):
            sizes = self.sizes[rank][step]
            x, y = (part[rank, step, : sum(sizes)].split(sizes) for part in (self.x, self.y))
            state = seen[step][when]
            found.append([compute(state, own, target, smoothing) for own, target in zip(x, y, strict=True)])
        return found

    def events(self, rank: int, step: int) -> list[Mark | Collective]:
        """What a rank did during one call, in order."""
        report = self.run.ranks[rank]
        begin, end = ([m.number for m in report.marks if m.name == name][step] for name in ("call", "done"))
        both: list[Mark | Collective] = [*report.marks, *report.collectives]
        return sorted((event for event in both if begin < event.number < end), key=lambda event: event.number)

    def marks(self, rank: int, step: int) -> list[str]:
        """The marks alone: `no_sync`, `ddp`, `forward 4`, `held 1`."""
        return [event.name for event in self.events(rank, step) if isinstance(event, Mark)]

    def numbers(self, rank: int, step: int, mark: str) -> list[int]:
        """What the marks of this name say: the samples of each forward, the micro-batches held in it."""
        return [int(name.split()[1]) for name in self.marks(rank, step) if name.startswith(f"{mark} ")]

    def carried(self, rank: int, step: int) -> list[Collective]:
        """The collectives of one call that carry gradients, not a few numbers or DDP's own bookkeeping."""
        found = [event for event in self.events(rank, step) if isinstance(event, Collective)]
        return [one for one in found if one.nbytes > FREE and one.inside not in ("forward", "DDP()")]


def compute(state: Gradients, x: torch.Tensor, y: torch.Tensor, smoothing: float) -> Micro:
    """Loss and gradient of one micro-batch."""
    own = {name: state[name].detach().double().cpu().requires_grad_() for name in SHAPES}
    hidden = torch.tanh(F.linear(x.double(), own["first.weight"], own["first.bias"]))
    loss = F.cross_entropy(F.linear(hidden, own["second.weight"], own["second.bias"]), y, label_smoothing=smoothing)
    gradients = torch.autograd.grad(loss, list(own.values()))
    return Micro(len(x), loss.item(), torch.cat([gradient.flatten() for gradient in gradients]))


def play(
    grader: Grader, purpose: str, sizes: Sizes, once: bool = False, dtype: str = "float32", special: bool = False
) -> Played:
    """Draw weights and data for these micro-batches, and call the submission once a step."""
    generator = grader.generator(purpose)
    initial = {name: torch.randn(shape, generator=generator) / 2 for name, shape in SHAPES.items()}
    world, count, most = len(sizes), len(sizes[0]), max(sum(own) for steps in sizes for own in steps)
    x = torch.randn(world, count, most, FEATURES, generator=generator)
    x += torch.randn(world, 1, 1, 1, generator=generator)  # each rank's lie somewhere else, so their gradients differ
    y = torch.randint(0, CLASSES, (world, count, most), generator=generator)
    x = x.round().long() if special else x
    each = [{"x": x[rank], "y": y[rank], "sizes": sizes[rank]} for rank in range(world)]
    stale = torch.nan if special else STALE
    how = {"once": once, "dtype": dtype, "special": special}
    run = grader.run("steps", world, each=each, initial=initial, lr=LR, stale=stale, **how)
    return Played(run, x, y, sizes, special)
