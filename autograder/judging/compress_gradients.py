"""What `compress_gradients` is given, and what must come out: gradients, their mean, and what error feedback owes.

For error feedback only one rank has a gradient at each place, so the all-reduce itself rounds nothing: after any number
of steps the sum of what came out may be no further from the true one than one cast rounds.
"""

from __future__ import annotations

import gzip
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch

from lockstep.grading import Collective, Grader, Lacking, Mark, Run

WORLD = 3  # not a power of two: a fixed 2 or 4 in the code shows
SHAPES = {"a": (9, 30), "b": (12, 25), "c": (12, 25), "d": (250,), "e": (), "f": (20, 13)}
CAP = 260 * 4 / 2**20  # MiB: several buckets
ONE_BUCKET = 1.0
STEPS, LONG = 3, 6
IMAGES, EPOCHS, SCALE = 300, 60, 2.0**26
NAN_STEP = 20  # of the training: all pixels are NaN

Gradients = dict[str, torch.Tensor]
Owing = tuple[list[Gradients], dict[str, float]]


def draw(grader: Grader, purpose: str, world: int = WORLD) -> list[Gradients]:
    """A gradient for every rank, larger on the higher ranks, whose mean is nowhere near zero at most places."""
    generator = grader.generator(purpose)
    return [
        {name: (rank + 1) * (torch.randn(shape, generator=generator) + 2) for name, shape in SHAPES.items()}
        for rank in range(world)
    ]


def reduce(grader: Grader, **options: object) -> tuple[Run, list[list[Gradients]]]:
    """Several steps without error feedback; the last two have the same gradients."""
    steps = [draw(grader, f"step {min(step, STEPS - 2)}") for step in range(STEPS)]
    return grader.run("reduces", WORLD, each=by_rank(steps), cap=CAP, **options), steps


def by_rank(steps: list[list[Gradients]]) -> list[dict[str, Any]]:
    """What each rank is given of `steps[step][rank]`: its own gradients, and nobody else's."""
    return [{"gradients": own} for own in map(list, zip(*steps, strict=True))]


def owing(grader: Grader, sizes: list[float]) -> Owing:
    """Shares of the mean for each step, and their units in the last place of bfloat16.

    Each share lies 0.44 or 0.15 units, in turn, above what bfloat16 can hold: together more than one half, and never
    near to a tie. Every parameter has a size of its own, so that what one is owed is wrong for any other.
    """
    generator = grader.generator(f"owing {sizes}")
    shares: list[Gradients] = [{} for _ in range(LONG)]
    units = {}
    for (name, shape), size in zip(SHAPES.items(), sizes, strict=True):
        units[name] = size * torch.finfo(torch.bfloat16).eps
        mantissa = torch.randint(10, 110, shape, generator=generator)
        sign = torch.randint(0, 2, shape, generator=generator) * 2 - 1
        turn = torch.randint(0, 2, shape, generator=generator)
        for step, share in enumerate(shares):
            above = 0.15 + 0.29 * ((turn + step) % 2)
            share[name] = sign * (size + (mantissa + above) * units[name])
    return shares, units


def split(shares: Gradients) -> list[Gradients]:
    """Give each place's gradient to one rank alone, in turn."""
    turns = {name: torch.arange(share.numel()).view(share.shape) % WORLD for name, share in shares.items()}
    return [
        {name: torch.where(turns[name] == rank, WORLD * share, torch.zeros(())) for name, share in shares.items()}
        for rank in range(WORLD)
    ]


def feed_back(grader: Grader, cap: float) -> tuple[Run, list[Owing]]:
    """Several steps with error feedback, in two models of other sizes."""
    sizes = [16.0**number for number in range(len(SHAPES))]
    drawn = [owing(grader, sizes), owing(grader, sizes[::-1])]
    given = [[split(step) for step in shares] for shares, _ in drawn]
    each = [{"gradients": [[step[rank] for step in steps] for steps in given]} for rank in range(WORLD)]
    run = grader.run("two_models", WORLD, each=each, cap=cap, dtype="bfloat16", error_feedback=True)
    return run, drawn


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """The first handwritten digits of scikit-learn: pixels (IMAGES, 64) between 0 and 1, classes (IMAGES,)."""
    found = importlib.util.find_spec("sklearn")
    places = list(found.submodule_search_locations or ()) if found is not None else []
    file = next((path for place in places for path in Path(place).glob("datasets/data/digits.csv.gz")), None)
    if file is None:
        raise Lacking("scikit-learn, which has the digits, is not installed")
    with gzip.open(file) as lines:
        table = torch.from_numpy(numpy.loadtxt(lines, delimiter=",", max_rows=IMAGES, dtype=numpy.float32))
    return table[:, :64] / 16, table[:, 64].long()


def train_plainly(pixels: torch.Tensor, classes: torch.Tensor) -> list[list[float]]:
    """The loss of each rank in each step of the same training without a hook: the two halves are equally large, so the
    mean of their gradients is that of all images.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    losses: list[list[float]] = [[], []]
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        each = torch.nn.functional.cross_entropy(model(pixels), classes, reduction="none")
        for rank, own in enumerate(losses):
            own.append(each[rank::2].mean().item())
        each.mean().backward()
        optimizer.step()
    return losses


def section(run: Run, rank: int, title: str, step: int) -> list[Mark | Collective]:
    """What a rank did in one backward, in order."""
    report = run.ranks[rank]
    begin = [mark.number for mark in report.marks if mark.name == title][step]
    end = min(mark.number for mark in report.marks if mark.name == "end" and mark.number > begin)
    both: list[Mark | Collective] = [*report.marks, *report.collectives]
    return sorted((event for event in both if begin < event.number < end), key=lambda event: event.number)


def collectives(run: Run, rank: int, title: str, step: int) -> list[Collective]:
    """What a rank sent in one backward."""
    return [event for event in section(run, rank, title, step) if isinstance(event, Collective)]


def say(calls: list[Collective]) -> str:
    """`3 × all_reduce of float32`."""
    counted: dict[str, int] = {}
    for call in calls:
        title = f"{call.kind} of {call.dtype}"
        counted[title] = counted.get(title, 0) + 1
    return " and ".join(f"{number} × {title}" for title, number in counted.items()) or "nothing"


def mean_of(ranks: list[Gradients]) -> Gradients:
    """The mean over the ranks."""
    return {name: torch.stack([own[name].double() for own in ranks]).mean(0) for name in ranks[0]}


def times(gradients: Gradients, factor: float) -> Gradients:
    """Every number times this."""
    return {name: gradient * factor for name, gradient in gradients.items()}


Keep = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def follow(shares: list[torch.Tensor], keep: Keep) -> list[torch.Tensor]:
    """What comes out step by step. `keep(step, owed, share, sum, sent)` is what is owed after a step."""
    owed, out = torch.zeros_like(shares[0]), []
    for step, share in enumerate(shares):
        total = share + owed
        sent = total.bfloat16().float()
        out.append(sent)
        owed = keep(step, owed, share, total, sent)
    return out
