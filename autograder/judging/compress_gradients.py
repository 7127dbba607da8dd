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
NO_BUCKET = 1e-6  # each parameter is sent alone, one of them with a single number
STEPS, LONG = 3, 6
ZERO_STEP, ZERO_NAME = 2, "d"  # this gradient is zero then, and its residual is owed like any other
IMAGES, EPOCHS, SCALE = 300, 60, 2.0**26
NAN_STEP = 20  # of the training: all pixels are NaN

RESIDUAL = (
    r"(residual|owed|memory|error|feedback)\w*\[.*\] *[+-]?=[^=] || (residual|owed|memory)\w*\.(update|setdefault|copy_)\( || "
    r"_residual = || (lost|rest|missing|owed) = || error_feedback || def register"
)

Gradients = dict[str, torch.Tensor]
Owing = tuple[list[Gradients], dict[str, float]]


def draw(grader: Grader, purpose: str, world: int = WORLD) -> list[Gradients]:
    """A gradient for every rank, larger on the higher ranks, whose mean is nowhere near zero at most places."""
    generator = grader.generator(purpose)
    return [
        {name: (rank + 1) * (torch.randn(shape, generator=generator) + 2) for name, shape in SHAPES.items()}
        for rank in range(world)
    ]


def reduce(grader: Grader, cap: float = CAP, **options: object) -> tuple[Run, list[list[Gradients]]]:
    """Several steps without error feedback; the last two have the same gradients."""
    steps = [draw(grader, f"step {min(step, STEPS - 2)}") for step in range(STEPS)]
    return grader.run("reduces", WORLD, each=by_rank(steps), cap=cap, **options), steps


def by_rank(steps: list[list[Gradients]]) -> list[dict[str, Any]]:
    """What each rank is given of `steps[step][rank]`: its own gradients, and nobody else's."""
    return [{"gradients": own} for own in map(list, zip(*steps, strict=True))]


def owing(grader: Grader, sizes: list[float], dtype: torch.dtype = torch.bfloat16) -> Owing:
    """Shares of the mean for each step, and their units in the last place of this dtype.

    Each share lies 0.44 or 0.15 units, in turn, above what it can hold: together more than one half, and never
    near to a tie. Every parameter has a size of its own, so that what one is owed is wrong for any other.
    """
    generator = grader.generator(f"owing {sizes}")
    shares: list[Gradients] = [{} for _ in range(LONG)]
    units = {}
    for (name, shape), size in zip(SHAPES.items(), sizes, strict=True):
        units[name] = size * torch.finfo(dtype).eps
        mantissa = torch.randint(10, 110, shape, generator=generator)
        sign = torch.randint(0, 2, shape, generator=generator) * 2 - 1
        turn = torch.randint(0, 2, shape, generator=generator)
        for step, share in enumerate(shares):
            above = 0.15 + 0.29 * ((turn + step) % 2)
            share[name] = sign * (size + (mantissa + above) * units[name])
    shares[ZERO_STEP][ZERO_NAME].zero_()
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


OVERFLOWS = [1e6, -1e6, torch.nan, torch.inf]  # a third of 1e6 is more than float16 holds


def overflow(grader: Grader) -> tuple[Run, list[Gradients], dict[str, float]]:
    """Four steps with error feedback in float16. In the second, the first numbers of a are `OVERFLOWS`, each on the rank
    whose turn it is.
    """
    shares, units = owing(grader, [1.0] * len(SHAPES), torch.float16)
    for step in (0, 2):
        shares[step]["a"][0, : len(OVERFLOWS)] = 1 + 20.44 * units["a"]
    shares[1]["a"][0, : len(OVERFLOWS)] = torch.tensor(OVERFLOWS) / WORLD
    steps = [split(step) for step in shares[:4]]
    run = grader.run("reduces", WORLD, each=by_rank(steps), cap=CAP, dtype="float16", error_feedback=True)
    return run, shares[:4], units


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


FEEDBACK: list[tuple[str, str, Keep]] = [
    ("ignores-error-feedback", "Each step is cast separately: what one step loses is never sent.",
     lambda step, owed, share, total, sent: torch.zeros_like(share)),
    ("residual-never-updated", "What step 0 had lost is added in every step, and what later steps lose is dropped.",
     lambda step, owed, share, total, sent: owed if step else total - sent),
    ("drops-residual", "What step 0 had lost was never sent; from step 1 on nothing is lost.",
     lambda step, owed, share, total, sent: total - sent if step else torch.zeros_like(share)),
    ("wrong-residual", "Residuals accumulate, although each was already sent in the following step.",
     lambda step, owed, share, total, sent: owed + total - sent),
    ("wrong-residual", "The residual has the wrong sign: what was lost is subtracted again.",
     lambda step, owed, share, total, sent: sent - total),
    ("wrong-residual", "The residual is gradient minus what was sent, and leaves out the previous residual.",
     lambda step, owed, share, total, sent: share - sent),
    ("wrong-residual", f"The residual is {WORLD} times too large, and leaves out the previous one: it is what was not divided minus what was sent.",
     lambda step, owed, share, total, sent: WORLD * (share - sent)),
    ("wrong-residual", f"The residual is {WORLD} times too large: it was taken before the division and added after it.",
     lambda step, owed, share, total, sent: WORLD * (total - sent)),
    ("wrong-residual", f"The residual is {WORLD} times too small: it was taken after the division and added before it.",
     lambda step, owed, share, total, sent: (total - sent) / WORLD),
]  # fmt: skip
"""What it is, what is seen, and what is owed after a step."""


def judge_feedback(grader: Grader, run: Run, drawn: list[Owing]) -> None:
    """The sums over 1, 2, … LONG steps against the true ones, in units of the last place that the cast keeps."""
    found: list[tuple[float, int, int, str, torch.Tensor]] = []
    for model, (shares, units) in enumerate(drawn):
        for rank in range(WORLD):
            seen: list[Gradients] = run.observed("seen")[rank][model]
            for name in SHAPES:
                came = torch.stack([gradients[name] for gradients in seen]).double().cumsum(0)
                true = torch.stack([step[name] for step in shares]).double().cumsum(0)
                away = ((came - true) / units[name]).nan_to_num(nan=torch.inf).abs().reshape(LONG, -1).amax(1)
                if away.max() > 0.55:
                    found.append((away.max().item(), model, rank, name, away))
    if not found:
        return
    largest, model, rank, name, away = max(found, key=lambda one: one[0])
    if largest <= 4:
        largest, model, rank, name, away = found[0]
    shares, units = drawn[model]
    seen = [gradients[name] for gradients in run.observed("seen")[rank][model]]
    step = int((away > 0.55).nonzero()[0])
    other = " of the second model" if model else ""
    what = f"After {step + 1} step{'s' if step else ''} the gradients of {name}{other} that came out on rank {rank} are away from the sum of the true ones "
    what += f"by up to {away[step].item():.3g} units in the last place of bfloat16, after {LONG} steps by {away[-1].item():.3g}. One cast loses half a unit."
    for id, said, keep in FEEDBACK:
        would = follow([one[name] for one in shares], keep)
        if all(torch.allclose(a, b, rtol=0, atol=0.05 * units[name]) for a, b in zip(seen, would, strict=True)):
            grader.fail(id, f"{what} {said}", of=[rank], at=RESIDUAL)
    if step and largest > 4:
        off, before = seen[step] - shares[step][name], seen[step - 1]
        times_before = (-off / before)[off.abs() > 4 * units[name]]
        if len(times_before) and (times_before - times_before.round().clamp(1, WORLD)).abs().max() < 0.05:
            said = f"In step {step + 1} they lack what had come out in step {step}, or a multiple of it: what the cast lost was computed from the sum over the ranks, not from this rank's cast."
            grader.fail("residual-of-sum", f"{what} {said}", of=[rank], at=RESIDUAL)
    if name == ZERO_NAME and not seen[ZERO_STEP].any():
        said = f"In step {ZERO_STEP + 1} the gradient of {name} was zero, and what step {ZERO_STEP} had lost was not sent either."
        grader.fail("wrong-residual", f"{what} {said}", of=[rank], at=RESIDUAL)
    if largest > 4:
        said = "That is far more than its own casts can have lost: it received the residuals of other parameters."
        grader.fail("residual-of-others", f"{what} {said}", of=[rank], at=RESIDUAL)
    grader.fail("wrong-residual", what, of=[rank], at=RESIDUAL)
