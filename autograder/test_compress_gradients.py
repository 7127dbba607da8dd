"""What `compress_gradients` has to do.

    register(ddp_model, dtype=torch.float16, error_feedback=False)

Models whose gradients were drawn here run backward under DDP with the submission's hook, beside plain DDP. The gradients
that come out are compared with the mean and, where they are not, with what the usual mistakes would give. Bytes and
number of the collectives are those that were recorded below DDP.

For error feedback only one rank has a gradient at each place, so the all-reduce itself rounds nothing: after any number
of steps the sum of what came out may be no further from the true one than one cast rounds.
"""

from __future__ import annotations

import gzip
import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy
import pytest
import torch

from lockstep.grading import Grader
from lockstep.grading.grader import Lacking
from lockstep.grading.verdict import Diagnosis
from lockstep.ranks import Collective, Mark, Run
from lockstep.ranks.explain import names

WORLD = 3  # not a power of two: a fixed 2 or 4 in the code shows
SHAPES = {"a": (9, 30), "b": (12, 25), "c": (12, 25), "d": (250,), "e": (), "f": (20, 13)}
CAP = 260 * 4 / 2**20  # MiB: several buckets
ONE_BUCKET = 1.0
STEPS, LONG = 3, 6
IMAGES, EPOCHS, SCALE = 300, 60, 2.0**26

REGISTER = r"register_comm_hook || def register"
REDUCE = r"all_reduce\( || all_gather || reduce_scatter || " + REGISTER
DIVIDE = r"/= || div || / || AVG || " + REDUCE
CAST = r"\.to\( || \.half\(\) || \.bfloat16\(\) || \.type\( || " + REDUCE
RESULT = r"\.then\( || set_result || return || " + REDUCE
WAIT = r"\.wait\( || all_reduce\( || " + REGISTER
RESIDUAL = (
    r"(residual|owed|memory|error|feedback)\w*\[.*\] *[+-]?=[^=] || (residual|owed|memory)\w*\.(update|setdefault|copy_)\( || "
    r"_residual = || (lost|rest|missing|owed) = || error_feedback || def register"
)
GROUP = r"get_world_size || group || all_reduce\( || " + REGISTER

Gradients = dict[str, torch.Tensor]
Owing = tuple[list[Gradients], dict[str, float]]


# What goes in --------------------------------------------------------------------------------------------------------


def draw(grader: Grader, purpose: str, world: int = WORLD) -> list[Gradients]:
    """A gradient for every rank, larger on the higher ranks, whose mean is nowhere near zero at most places."""
    generator = torch.Generator().manual_seed(grader.random(purpose).randrange(1 << 30))
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
    generator = torch.Generator().manual_seed(grader.random(f"owing {sizes}").randrange(1 << 30))
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


def read_failure(grader: Grader, run: Run) -> Diagnosis | None:
    """Name what a failed run of this exercise usually means."""
    cause = run.cause
    assert cause is not None
    error = cause.error
    if error is None:
        return None
    said = f"{names(cause.ranks).capitalize()} raised {error.type}: {' '.join(error.message.split())[:320]}"
    known = {
        "must return a torch.futures.Future": ("hook-returns-no-future", RESULT),
        "expected the hook result is a PyObject": ("hook-returns-no-future", RESULT),
        "setStorage": ("hook-returns-no-future", RESULT),
        "BF16 all reduce communication hook required": ("builtin-hook-refuses", r"bf16_compress_hook || " + REGISTER),
    }
    for part, (id, at) in known.items():
        if part in error.message:
            return grader.diagnosis(id, f"{said}.", of=cause.ranks, at=at)
    if any(run.observed("error feedback")) and ("size of tensor" in error.message or "shape" in error.message):
        return grader.diagnosis(
            "residual-of-others",
            f"{said}. After the first step DDP had rebuilt its buckets, and the residual kept under a bucket's index "
            "belonged to another set of parameters.",
            of=cause.ranks,
            at=RESIDUAL,
        )
    return None


# What comes out ------------------------------------------------------------------------------------------------------


def mean_of(ranks: list[Gradients], name: str) -> torch.Tensor:
    """The mean over the ranks."""
    return torch.stack([own[name].double() for own in ranks]).mean(0)


def close(seen: torch.Tensor, wanted: torch.Tensor, ranks: list[Gradients], name: str, dtype: torch.dtype) -> bool:
    """Equal but for the rounding of `dtype`: once in the cast and once or more in the sum."""
    rounding = 4 * torch.finfo(dtype).eps * mean_of([{name: own[name].abs()} for own in ranks], name)
    return bool((seen.double() - wanted).abs().le(rounding + 1e-6).all())


def first(tensor: torch.Tensor) -> str:
    """Its first number, as a learner would print it."""
    return f"{tensor.flatten()[0].item():.5g}"


def judge_mean(grader: Grader, run: Run, step: int, steps: list[list[Gradients]], dtype: torch.dtype) -> None:
    """The gradients of one step on every rank against the mean; fails with what they are instead.

    A later step may be off by what the casts of the step before have lost: that nothing is carried over is another check.
    """
    seen = [every[step] for every in run.observed("seen")]
    given, before = steps[step], steps[max(step - 1, 0)]
    for name in SHAPES:
        wanted = mean_of(given, name)
        rounded = [{name: torch.maximum(a[name].abs(), b[name].abs())} for a, b in zip(given, before, strict=True)]
        wrong = [rank for rank in range(WORLD) if not close(seen[rank][name], wanted, rounded, name, dtype)]
        if wrong:
            _explain(grader, run, step, given, name, wrong, dtype)
        for rank in range(1, WORLD):
            if not torch.equal(seen[0][name], seen[rank][name]):
                place = int((seen[0][name] != seen[rank][name]).flatten().nonzero()[0])
                mine, theirs = (seen[r][name].flatten()[place].item() for r in (0, rank))
                grader.fail(
                    "gradients-differ",
                    f"In step {step} number {place} of {name}.grad is {mine:.8g} on rank 0 and {theirs:.8g} on rank {rank}. "
                    "Both are near the mean, and they are not the same.",
                    of=[rank],
                    at=RESULT,
                )


def _explain(
    grader: Grader, run: Run, step: int, given: list[Gradients], name: str, wrong: list[int], dtype: torch.dtype
) -> NoReturn:
    wanted = mean_of(given, name)
    rank = wrong[0]
    got = run.observed("seen")[rank][step][name]
    own = given[rank][name].double()
    what = (
        f"In step {step} {name}.grad begins with {first(got)} on rank {rank}; the mean over {WORLD} ranks begins with "
        f"{first(wanted)}."
    )

    def like(candidate: torch.Tensor) -> bool:
        factor = max(1.0, (candidate.abs().mean() / wanted.abs().mean()).item())
        scaled = [{name: factor * other[name]} for other in given]
        return close(got, candidate, scaled, name, dtype)

    if like(own) or like(own / WORLD):
        sent = collectives(run, rank, "compressed", step)
        also = "" if like(own) else f", divided by {WORLD}"
        if sent:
            grader.fail(
                "hook-discards-result",
                f"{what} It is that rank's own gradient{also}, though {say(sent)} was launched.",
                of=wrong,
                at=RESULT,
            )
        grader.fail(
            "hook-never-communicates",
            f"{what} It is that rank's own gradient{also}, and no collective was launched.",
            of=wrong,
            at=RESULT,
        )
    if like(WORLD * wanted):
        grader.fail("hook-never-divides", f"{what} It is the sum, {WORLD} times too large.", of=wrong, at=REDUCE)
    if like(wanted / WORLD):
        grader.fail("hook-divides-twice", f"{what} It was divided by {WORLD} twice.", of=wrong, at=DIVIDE)
    ratio = (got.double().sum() / wanted.sum()).item()
    if like(wanted * ratio):
        what += f" It is the sum of all gradients divided by {WORLD / ratio:.3g} instead of {WORLD}."
    elif len(wrong) < WORLD:
        what += f" On {names([r for r in range(WORLD) if r not in wrong])} it is the mean."
    grader.fail("hook-wrong-mean", what, of=wrong, at=REDUCE)


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


def judge_bytes(grader: Grader, run: Run, given: list[list[Gradients]], dtype: torch.dtype) -> None:
    """One all-reduce for each of plain DDP's, of half its bytes, in every step on every rank."""
    for rank in range(WORLD):
        for step in range(STEPS):
            plain, sent = collectives(run, rank, "plain", step), collectives(run, rank, "compressed", step)
            before, now = sum(call.nbytes for call in plain), sum(call.nbytes for call in sent)
            what = f"In step {step} rank {rank} put {now} bytes into {say(sent)}; plain DDP puts {before} into {say(plain)}."
            other = [call for call in sent if call.kind != "all_reduce"]
            if other:
                grader.fail("not-an-all-reduce", what, of=[rank], at=other[0].kind + r" || " + REDUCE)
            if len(sent) != len(plain):
                grader.fail("more-collectives", what, of=[rank], at=REDUCE)
            wide = [call for call in sent if call.dtype == "float32"]
            if len(wide) == len(sent):
                seen = run.observed("seen")[rank][step]
                exact = all(
                    torch.allclose(seen[name].double(), mean_of(given[step], name), rtol=1e-6, atol=1e-6)
                    for name in SHAPES
                )
                if exact and all(_all_wide(run, r, s) for r in range(WORLD) for s in range(STEPS)):
                    grader.fail(
                        "not-compressed",
                        f"{what} No gradient has lost a bit, as if there were no hook.",
                        of=[rank],
                        at=REGISTER,
                    )
                if not exact:
                    grader.fail(
                        "sends-float32",
                        f"{what} The gradients have been rounded, and what is sent is float32 again.",
                        of=[rank],
                        at=r"\.float\(\) || float32 || " + CAST,
                    )
            if wide:
                grader.fail(
                    "not-always-compressed",
                    f"{what} {len(wide)} of them {'is' if len(wide) == 1 else 'are'} float32.",
                    of=[rank],
                    at=CAST,
                )
            wrong = [call for call in sent if call.dtype != str(dtype).removeprefix("torch.")]
            if wrong:
                grader.fail(
                    "ignores-dtype",
                    f"register was called with dtype={dtype}, and rank {rank} sent {wrong[0].tensor}.",
                    of=[rank],
                    at=r"\.half\(\) || \.bfloat16\(\) || float16 || " + CAST,
                )
            if 2 * now != before:
                grader.fail("not-always-compressed", what, of=[rank], at=CAST)


def _all_wide(run: Run, rank: int, step: int) -> bool:
    return all(call.dtype == "float32" for call in collectives(run, rank, "compressed", step))


def say(calls: list[Collective]) -> str:
    """`3 × all_reduce of float32`."""
    counted: dict[str, int] = {}
    for call in calls:
        title = f"{call.kind} of {call.dtype}"
        counted[title] = counted.get(title, 0) + 1
    return " and ".join(f"{number} × {title}" for title, number in counted.items()) or "nothing"


# Error feedback: what each mistake would give ------------------------------------------------------------------------

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


MISTAKES: dict[str, tuple[str, Keep]] = {
    "Each step is cast by itself: what is lost in one never comes back.": (
        "ignores-error-feedback",
        lambda step, owed, share, total, sent: torch.zeros_like(share),
    ),
    "What step 0 had lost is added in every step, and what the later ones lose is forgotten.": (
        "residual-never-updated",
        lambda step, owed, share, total, sent: owed if step else total - sent,
    ),
    "What step 0 had lost never came back; from step 1 on nothing is lost.": (
        "drops-residual",
        lambda step, owed, share, total, sent: total - sent if step else torch.zeros_like(share),
    ),
    "Residuals are added up, though each of them has been sent in the step after it.": (
        "wrong-residual",
        lambda step, owed, share, total, sent: owed + total - sent,
    ),
    "The residual has the wrong sign: what was lost is taken away once more.": (
        "wrong-residual",
        lambda step, owed, share, total, sent: sent - total,
    ),
    "The residual is gradient minus what was sent, and leaves out what was owed before.": (
        "wrong-residual",
        lambda step, owed, share, total, sent: share - sent,
    ),
    f"The residual is {WORLD} times too large: it was taken before the division and added after it.": (
        "wrong-residual",
        lambda step, owed, share, total, sent: WORLD * (total - sent),
    ),
    f"The residual is {WORLD} times too small: it was taken after the division and added before it.": (
        "wrong-residual",
        lambda step, owed, share, total, sent: (total - sent) / WORLD,
    ),
}


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
    what = (
        f"After {step + 1} step{'s' if step else ''} the gradients of {name}{other} that came out on rank {rank} are away from "
        f"the sum of the true ones by up to {away[step].item():.3g} units in the last place of bfloat16, after {LONG} steps by "
        f"{away[-1].item():.3g}. One cast loses half a unit."
    )
    for said, (id, keep) in MISTAKES.items():
        would = follow([one[name] for one in shares], keep)
        if all(torch.allclose(a, b, rtol=0, atol=0.05 * units[name]) for a, b in zip(seen, would, strict=True)):
            grader.fail(id, f"{what} {said}", of=[rank], at=RESIDUAL)
    if largest > 4:
        said = "That is far more than its own casts can have lost: it was given what others are owed."
        grader.fail("residual-of-others", f"{what} {said}", of=[rank], at=RESIDUAL)
    grader.fail("wrong-residual", what, of=[rank], at=RESIDUAL)


# The checks ----------------------------------------------------------------------------------------------------------


def test_mean(grader: Grader) -> None:
    """every gradient becomes the mean over the ranks, but for the rounding of the cast"""
    run, given = reduce(grader)
    for step in range(STEPS):
        judge_mean(grader, run, step, given, torch.float16)


@pytest.mark.needs("test_mean")
def test_bytes(grader: Grader) -> None:
    """a step has as many all-reduces as plain DDP, of half the bytes"""
    run, given = reduce(grader)
    judge_bytes(grader, run, given, torch.float16)


@pytest.mark.needs("test_bytes")
def test_dtype(grader: Grader) -> None:
    """dtype says which type is sent"""
    run, given = reduce(grader, dtype="bfloat16")
    for step in range(STEPS):
        judge_mean(grader, run, step, given, torch.bfloat16)
    judge_bytes(grader, run, given, torch.bfloat16)


@pytest.mark.needs("test_bytes")
def test_overlap(grader: Grader) -> None:
    """backward does not wait for the all-reduce of a bucket"""
    run, _ = reduce(grader)
    for rank in range(WORLD):
        seen = section(run, rank, "compressed", STEPS - 1)
        waits = [index for index, event in enumerate(seen) if isinstance(event, Mark) and event.name == "wait"]
        if waits:
            ready = sum(isinstance(event, Mark) and event.name.startswith("ready") for event in seen[: waits[0]])
            buckets = len(collectives(run, rank, "compressed", STEPS - 1))
            launched = sum(isinstance(event, Collective) for event in seen[: waits[0]])
            grader.fail(
                "hook-waits",
                f"Rank {rank} waited {len(waits)} times within backward, first when {ready} of {len(SHAPES)} gradients were "
                f"ready and {launched} of {buckets} buckets on their way.",
                of=[rank],
                at=WAIT,
            )


@pytest.mark.needs("test_bytes")
def test_overflow(grader: Grader) -> None:
    """neither a large gradient nor the sum over the ranks overflows float16"""
    given = draw(grader, "overflow")
    for rank, own in enumerate(given):
        own["a"] = torch.full(SHAPES["a"], 40000.0)
        own["c"] = torch.full(SHAPES["c"], 150000.0 if rank == 1 else 0.0)
    run = grader.run("reduces", WORLD, each=by_rank([given]), cap=CAP)
    for rank, (seen,) in enumerate(run.observed("seen")):
        if not close(seen["a"], mean_of(given, "a"), given, "a", torch.float16):
            grader.fail(
                "sum-overflows",
                f"All {WORLD} ranks had a gradient of 40000; the mean came out as {first(seen['a'])} on rank {rank}. The "
                f"largest float16 is 65504, the sum is {WORLD * 40000}.",
                of=[rank],
                at=DIVIDE,
            )
        if not close(seen["c"], mean_of(given, "c"), given, "c", torch.float16):
            grader.fail(
                "casts-before-dividing",
                f"Rank 1 had a gradient of 150000, the others 0; the mean, 50000, came out as {first(seen['c'])} on rank "
                f"{rank}. The largest float16 is 65504.",
                of=[rank],
                at=CAST,
            )


@pytest.mark.needs("test_mean")
def test_group(grader: Grader) -> None:
    """a model that was wrapped for some of the ranks is averaged over these"""
    world, size = 4, 2
    given = draw(grader, "groups", world)
    run = grader.run("in_groups", world, each=[{"gradients": own} for own in given], size=size)
    for rank, seen in enumerate(run.observed("seen")):
        members = list(range(rank % (world // size), world, world // size))
        for name in SHAPES:
            wanted = mean_of([given[member] for member in members], name)
            if close(seen[name], wanted, given, name, torch.float16):
                continue
            over_all = close(seen[name], mean_of(given, name), given, name, torch.float16)
            less = close(seen[name], wanted * size / world, given, name, torch.float16)
            grader.fail(
                "ignores-group",
                f"The process group of rank {rank}'s model is {names(members)}. {name}.grad begins with "
                f"{first(seen[name])}; their mean begins with {first(wanted)}."
                + (f" It is the mean over all {world} ranks." if over_all else "")
                + (f" It was divided by {world}." if less else ""),
                of=[rank],
                at=GROUP,
            )


@pytest.mark.needs("test_bytes")
def test_no_feedback(grader: Grader) -> None:
    """without error feedback every step stands for itself"""
    run, _ = reduce(grader)
    for rank, steps in enumerate(run.observed("seen")):
        for name in SHAPES:
            if not torch.equal(steps[-1][name], steps[-2][name]):
                grader.fail(
                    "feedback-always-on",
                    f"Steps {STEPS - 2} and {STEPS - 1} had the same gradients, and {name}.grad came out different on rank "
                    f"{rank}. error_feedback was not asked for.",
                    of=[rank],
                    at=RESIDUAL,
                )


@pytest.mark.needs("test_dtype", "test_overflow")
def test_feedback(grader: Grader) -> None:
    """with error feedback, what the cast loses comes in the next step"""
    judge_feedback(grader, *feed_back(grader, CAP))


@pytest.mark.needs("test_feedback")
def test_rebuilt_order(grader: Grader) -> None:
    """what is owed stays with its parameter when DDP orders a bucket anew"""
    judge_feedback(grader, *feed_back(grader, ONE_BUCKET))


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


@pytest.mark.needs("test_rebuilt_order")
def test_digits(grader: Grader) -> None:
    """training on digits gets as far as plain DDP, also when the loss scale overflows at first"""
    pixels, classes = digits()
    each = [{"pixels": pixels[rank::2], "classes": classes[rank::2]} for rank in range(2)]
    run = grader.run("trains", 2, each=each, steps=EPOCHS, scale=SCALE, dtype="float16", error_feedback=True)
    plain, seen = train_plainly(pixels, classes), run.observed("compressed")
    for rank in range(2):
        losses, scale = seen[rank]["losses"], seen[rank]["scale"]
        what = (
            f"After {EPOCHS} steps the loss on rank {rank} is {losses[-1]:.3f}, with plain DDP {plain[rank][-1]:.3f}."
        )
        if scale < 1:
            grader.fail(
                "residual-poisoned",
                f"{what} With a loss scale of {SCALE:.3g} the gradients overflow float16 in the first steps, and here they "
                f"never stopped: the scaler has gone down to {scale:.2g}.",
                of=[rank],
                at=RESIDUAL,
            )
        if scale == SCALE:
            grader.fail(
                "hides-overflow",
                f"{what} The loss scale was {SCALE:.3g}, with which the gradients do not fit float16, and no gradient came out "
                "infinite: the scaler saw nothing.",
                of=[rank],
                at=r"nan_to_num\(.*value || clamp || clip || nan_to_num || " + CAST,
            )
        skipped = round(math.log2(SCALE / scale))
        wanted = plain[rank][-1 - skipped]
        if not losses[-1] <= 1.5 * wanted + 0.01:
            grader.fail(
                "does-not-converge",
                f"{what} {skipped} steps were skipped because the loss scale overflowed; so many steps earlier plain DDP had "
                f"{wanted:.3f}.",
                of=[rank],
                at=REDUCE,
            )
    if not torch.equal(seen[0]["weight"], seen[1]["weight"]):
        away = (seen[0]["weight"] - seen[1]["weight"]).abs().max().item()
        grader.fail(
            "gradients-differ",
            f"After {EPOCHS} steps the first layer's weights differ by up to {away:.2g} between rank 0 and rank 1.",
            of=[1],
            at=RESULT,
        )
