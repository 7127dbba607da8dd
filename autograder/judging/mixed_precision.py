"""What a step of `mixed_precision` has to come to: each batch's loss and gradient, in double precision."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.nn import functional as F

from lockstep.grading import Collective, Grader, Run

WORLD = 3  # not a power of two: a fixed 2 or 4 in the code shows
BATCH, FEATURES, HIDDEN, MIDDLE, CLASSES = 6, 6, 16, 8, 5
SHAPES = {
    "first.weight": (HIDDEN, FEATURES), "first.bias": (HIDDEN,), "middle.weight": (MIDDLE, HIDDEN),
    "middle.bias": (MIDDLE,), "last.weight": (CLASSES, MIDDLE), "last.bias": (CLASSES,),
}  # fmt: skip
FIRST_GROUP = 2  # so many parameters are in the optimizer's first group
NUMBERS = [torch.Size(shape).numel() for shape in SHAPES.values()]
PAYLOAD = 4 * sum(NUMBERS)
FREE = 64  # bytes: a collective this small carries a flag or a loss
SCALE, STALE = 1024.0, 0.75
WIDE, NARROW = 1e6, 0.05  # a norm that the gradients never reach, not even scaled, and one that they always exceed
NORMS = [WIDE, NARROW, WIDE, NARROW, NARROW]
CLIPPED = 1  # a step in which they have to be clipped
OVERFLOWS = {
    1: "rank 1's gradients overflowed float16, its loss did not",
    2: "rank 1's forward overflowed float16",
    3: "rank 1's loss was inf",
}


@dataclass(frozen=True, eq=False)
class Played:
    """A run of some steps, and the data that each rank had: `x[rank, step]`, `y[rank, step]`, `sizes[rank, step]`."""

    run: Run
    dtype: str
    x: torch.Tensor
    y: torch.Tensor
    sizes: torch.Tensor
    max_norms: list[float]

    @property
    def steps(self) -> list[list[dict[str, Any]]]:
        """What was seen in each step by each rank: `steps[step][rank]`."""
        return list(map(list, zip(*self.run.observed("steps"), strict=True)))

    def used(self, step: int) -> list[torch.Tensor]:
        """By rank, all gradients that the optimizer used in a step, in one vector; a missing one counts as zeros."""
        used = [seen["used"][0] for seen in self.steps[step]]
        return [
            torch.cat([own.get(name, torch.zeros(s)).flatten() for name, s in SHAPES.items()]).double() for own in used
        ]

    def losses(self, step: int) -> list[float]:
        """The loss of each rank's batch."""
        return [self._compute(rank, step)[0] for rank in range(WORLD)]

    def gradient(self, step: int) -> torch.Tensor:
        """The mean over the ranks in one vector: unscaled, unclipped."""
        return torch.stack([self._compute(rank, step)[1] for rank in range(WORLD)]).mean(0)

    def sent(self, rank: int, step: int) -> list[Collective]:
        """The collectives of one call that carry gradients, not a few numbers or DDP's own bookkeeping."""
        report = self.run.ranks[rank]
        begin, end = ([mark.number for mark in report.marks if mark.name == name][step] for name in ("call", "done"))
        found = [one for one in report.collectives if begin < one.number < end]
        return [one for one in found if one.nbytes > FREE and one.inside not in ("forward", "DDP()")]

    @cache  # noqa: B019  # as many as a check plays
    def _compute(self, rank: int, step: int) -> tuple[float, torch.Tensor]:
        start = self.steps[step][rank]["start"]
        own = {name: start[name].detach().double().cpu().requires_grad_() for name in SHAPES}
        hidden = torch.tanh(F.linear(self.x[rank, step].double(), own["first.weight"], own["first.bias"]))
        hidden = torch.tanh(F.linear(hidden, own["middle.weight"], own["middle.bias"]))
        logits = F.linear(hidden, own["last.weight"], own["last.bias"])
        y = self.y[rank, step]
        y = y.double() if y.is_floating_point() else y
        loss = F.cross_entropy(logits, y, label_smoothing=0.3) * self.sizes[rank, step].item()
        gradients = torch.autograd.grad(loss, list(own.values()))
        return loss.item(), torch.cat([gradient.flatten() for gradient in gradients])


def clipped(gradient: torch.Tensor, max_norm: float) -> torch.Tensor:
    """This vector, no longer than that."""
    return gradient * min(1.0, max_norm / float(gradient.norm()))


def draw(grader: Grader, purpose: str, dtype: str, max_norms: list[float]) -> dict[str, Any]:
    """Weights and data for these steps."""
    generator = grader.generator(purpose)
    count = len(max_norms)
    # Each rank's samples lie somewhere else, so that the ranks' gradients differ.
    place = torch.randn(WORLD, 1, 1, 1, generator=generator)
    return {
        "initial": {name: torch.randn(shape, generator=generator) / 2 for name, shape in SHAPES.items()},
        "dtype": dtype,
        "scale": SCALE if dtype == "float16" else 0.0,
        "stale": STALE * SCALE if dtype == "float16" else STALE,  # unscale_ divides what is left over as well
        "x": torch.randn(WORLD, count, BATCH, FEATURES, generator=generator) + place,
        "y": torch.randint(0, CLASSES, (WORLD, count, BATCH), generator=generator),
        "sizes": torch.ones(WORLD, count, dtype=torch.float64),
        "max_norms": max_norms,
    }


def play(grader: Grader, drawn: dict[str, Any]) -> Played:
    """Call the submission once a step."""
    own = ("x", "y", "sizes")
    each = [{name: drawn[name][rank] for name in own} for rank in range(WORLD)]
    shared = {name: value for name, value in drawn.items() if name not in own}
    run = grader.run("steps", WORLD, each=each, first_group=FIRST_GROUP, **shared)
    return Played(run, drawn["dtype"], drawn["x"], drawn["y"], drawn["sizes"], drawn["max_norms"])


def float16_run(grader: Grader) -> Played:
    """Five good steps with a scaler; some have to be clipped."""
    return play(grader, draw(grader, "float16", "float16", NORMS))


def bfloat16_run(grader: Grader) -> Played:
    """Two steps without a scaler. The targets are probabilities, in float32; loss_fn has to get them like that."""
    drawn = draw(grader, "bfloat16", "bfloat16", [WIDE, NARROW])
    drawn["y"] = torch.rand(*drawn["y"].shape, CLASSES, generator=grader.generator("targets")).softmax(-1)
    return play(grader, drawn)


def bfloat16_overflow_run(grader: Grader) -> Played:
    """One step in which rank 1's batch makes the gradients nan, and no scaler is enabled that would notice."""
    drawn = draw(grader, "bfloat16 overflow", "bfloat16", [NARROW])
    drawn["x"][1, 0] = torch.inf
    return play(grader, drawn)


def overflow_run(grader: Grader) -> Played:
    """A step without any gradient; one in which rank 1 overflows in backward; in forward; in the loss; a good one."""
    drawn = draw(grader, "overflow", "float16", [NARROW] * 5)
    drawn["sizes"][:, 0] = 0
    drawn["sizes"][1, 1] = 1e6  # a loss that float32 can hold, with gradients that float16 cannot
    drawn["x"][1, 2] *= 1e6  # beyond float16 as soon as the first layer takes it in
    drawn["sizes"][1, 3] = 1e60  # beyond float32
    return play(grader, drawn)
