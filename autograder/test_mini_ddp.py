"""What `MiniDDP` has to do.

    MiniDDP(module, bucket_cap_mb=25), called like the module
    finish_gradient_synchronization(), no_sync(), state_dict(), load_state_dict(state)

torch's own DDP runs beside it on the same batches: on two ranks every gradient and parameter must be the same to the
last bit. That it overlaps is read from the order of what happened: gradients ready, collectives launched, waits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

import pytest
import torch
from torch.nn.functional import cross_entropy, linear

from lockstep.grading import Grader
from lockstep.grading.verdict import Diagnosis
from lockstep.ranks import Collective, Mark, Run, text
from lockstep.ranks.explain import names
from lockstep.ranks.mismatch import say_mismatch

WORLD, STEPS, BATCH = 2, 4, 6  # two ranks: a + b is b + a to the last bit, in whichever order and bucket
CAP = 0.002  # MiB: several buckets, and the huge parameter has more
LAYERS, PER_BUCKET = 12, 4
FLAGS = 256  # bytes: a collective this small exchanges flags, not gradients

CLASS = r"class MiniDDP"
BROADCAST = r"broadcast\( || def __init__ || " + CLASS
REDUCE = r"all_reduce\( || " + CLASS
HOOK = r"def .*(hook|ready) || register_post_accumulate_grad_hook || register_hook || " + CLASS
FINISH = r"def finish_gradient_synchronization"
DIVIDE = r"/= || div || / || AVG || " + REDUCE
BUCKET = r"cap || bucket || " + CLASS
MISSING = r"grad is None || is not None || " + FINISH

Tensors = dict[str, torch.Tensor]
Step = dict[str, Tensors]
PARAMETERS = {
    "embedding.weight": (11, 6), "never.weight": (2, 6), "never.bias": (2,), "huge.weight": (300, 6), "huge.bias": (300,),
    "back.weight": (6, 300), "back.bias": (6,), "frozen.weight": (6, 6), "frozen.bias": (6,), "side.weight": (6, 6),
    "side.bias": (6,),
}  # fmt: skip


# The runs ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trained:
    """A run beside DDP, and what each rank was given: its weights, its batches `tokens[step, rank]`, and whether it went
    through the side branch, `sides[step][rank]`.
    """

    run: Run
    initial: list[Tensors]
    tokens: torch.Tensor
    sides: list[list[bool]]
    micro: int

    @property
    def steps(self) -> list[list[Step]]:
        """The gradients that each rank saw in each step. Raises ValueError when those of DDP, which runs on the ranks, are
        not what DDP gives: then somebody has had a hand in it.
        """
        found: list[list[Step]] = self.run.observed("gradients")
        for step, wanted in enumerate(self._replayed()):
            for rank, seen in enumerate(found):
                theirs = seen[step]["theirs"]
                if set(theirs) != set(wanted) or not all(
                    (theirs[name].double().cpu() - one).abs().max() <= 1e-4 * one.abs().max() + 1e-6
                    for name, one in wanted.items()
                ):
                    raise ValueError(
                        f"in step {step} torch's own DDP, which trains beside MiniDDP, did not get the mean over the ranks on "
                        f"rank {rank}: something reached into it"
                    )
        return found

    def _replayed(self) -> Iterator[Tensors]:
        """DDP's gradients in each step, computed here: the mean over the ranks of what each has, from rank 0's weights."""
        weights = {name: value.double() for name, value in self.initial[0].items()}
        learned = [name for name in PARAMETERS if not name.startswith("frozen.")]
        momentum: Tensors = {}
        for tokens, sides in zip(self.tokens, self.sides, strict=True):
            own = {name: weights[name].clone().requires_grad_() for name in learned}
            losses = [
                loss_of(weights | own, piece, side)
                for batch, side in zip(tokens, sides, strict=True)
                for piece in batch.chunk(self.micro)
            ]
            total = torch.stack(losses).sum() / len(sides)
            gradients = torch.autograd.grad(total, list(own.values()), allow_unused=True)
            mean = {name: one for name, one in zip(learned, gradients, strict=True) if one is not None}
            yield mean
            for name, gradient in mean.items():
                momentum[name] = gradient + 0.9 * momentum[name] if name in momentum else gradient
                weights[name] = weights[name] - 0.1 * momentum[name]


def loss_of(weights: Tensors, tokens: torch.Tensor, side: bool) -> torch.Tensor:
    """The loss of one micro-batch, as the scenario's model has it."""
    layer = lambda name, x: linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])  # noqa: E731
    x = weights["embedding.weight"][tokens] * weights["unsaved"] + weights["offset"]
    x = layer("frozen", x + layer("back", torch.tanh(layer("huge", x))))
    return cross_entropy((x + layer("side", x) if side else x) @ weights["embedding.weight"].T, tokens.flip(0))


def train(grader: Grader, purpose: str, sides: list[list[bool]], micro: int = 1) -> Trained:
    """Train beside DDP; `sides[step][rank]` says who goes through the side branch."""
    generator = torch.Generator().manual_seed(grader.random(purpose).randrange(1 << 30))
    tokens = torch.randint(0, 11, (len(sides), WORLD, BATCH), generator=generator)
    initial: list[Tensors] = []
    for rank in range(WORLD):
        parameters = {
            name: torch.randn(shape, generator=generator) / (2 * shape[-1] ** 0.5) for name, shape in PARAMETERS.items()
        }
        buffers = {
            "offset": torch.randn(6, generator=generator),
            "unsaved": torch.rand(6, generator=generator) + 0.5,
            "count": torch.tensor(rank),
        }
        initial.append(parameters | buffers)
    each = [
        {"initial": own, "tokens": tokens[:, rank], "sides": [step[rank] for step in sides]}
        for rank, own in enumerate(initial)
    ]
    return Trained(grader.run("trains", WORLD, each=each, cap=CAP, micro=micro), initial, tokens, sides, micro)


def main_run(grader: Grader) -> Trained:
    """Every rank uses everything that is ever used."""
    return train(grader, "main", [[True, True]] * STEPS)


def unused_run(grader: Grader) -> Trained:
    """The side branch is used by rank 0, by rank 1, by nobody, by both."""
    return train(grader, "unused", [[True, False], [False, True], [False, False], [True, True]])


def overlap_run(grader: Grader) -> Run:
    """Equal layers, of which PER_BUCKET fill a bucket exactly."""
    return grader.run("overlaps", WORLD, layers=LAYERS, per_bucket=PER_BUCKET)


def events(run: Run, rank: int) -> list[Mark | Collective]:
    """What a rank did in its last step, from the mark `backward` to `finished`, in order."""
    report = run.ranks[rank]
    begin = max(mark.number for mark in report.marks if mark.name == "backward")
    end = max(mark.number for mark in report.marks if mark.name == "finished")
    both: list[Mark | Collective] = [*report.marks, *report.collectives]
    return sorted((event for event in both if begin <= event.number <= end), key=lambda event: event.number)


def is_reduction(event: Mark | Collective) -> bool:
    """True for a collective that carries gradients."""
    return isinstance(event, Collective) and event.kind != "broadcast" and event.nbytes > FLAGS


def read_failure(grader: Grader, run: Run) -> Diagnosis | None:
    """Name what a failed run of this exercise usually means."""
    cause = run.cause
    assert cause is not None
    headline = cause.headline[0].upper() + cause.headline[1:].rstrip(".")
    error = cause.error
    if error is not None and "that doesn't require gradient" in error.message:
        return grader.diagnosis(
            "hooks-frozen",
            f"{names(cause.ranks).capitalize()} raised {error}.",
            of=cause.ranks,
            at=error.frame,
        )
    if error is not None and ("NoneType" in error.message or "None" in error.message):
        return grader.diagnosis(
            "trips-over-none", f"{names(cause.ranks).capitalize()} raised {error}.", of=cause.ranks, at=error.frame
        )
    if cause.kind not in ("hang", "mismatch", "crashed"):
        return None
    sent = [[call.nbytes for call in calls if call.kind == "all_reduce"] for calls in run.collectives]
    brought = "; ".join(f"rank {rank}: {len(own)}" for rank, own in enumerate(sent))
    evidence = text.evidence(run)
    shortest = min(map(len, sent))
    if shortest and len({tuple(own[:shortest]) for own in sent}) > 1:
        return grader.diagnosis(
            "order-differs",
            f"{headline}. All-reduces in another order, or of other sizes, on each rank; seen were {brought}.",
            evidence=evidence,
            of=cause.ranks,
            at=HOOK,
        )
    return grader.diagnosis(
        "bucket-never-launched",
        f"{headline}. One rank did not use the side branch in this step. All-reduces seen: {brought}.",
        evidence=evidence,
        of=cause.ranks,
        at=FINISH,
    )


# Values --------------------------------------------------------------------------------------------------------------


def judge_gradients(grader: Grader, trained: Trained) -> None:
    """Every gradient of every step against DDP's; fails with what it is instead."""
    met = trained.run.silent_mismatch
    if met:
        grader.fail("order-differs", f"In one all-reduce {say_mismatch(met)}.", of=met, at=HOOK)
    steps = trained.steps
    for step in range(len(steps[0])):
        for name in steps[0][step]["theirs"]:
            for rank in range(WORLD):
                seen = steps[rank][step]
                if name not in seen["mine"] or not torch.equal(seen["mine"][name], seen["theirs"][name]):
                    _explain(grader, [steps[r][step] for r in range(WORLD)], step, rank, name)
        for rank in range(WORLD):
            invented = sorted(set(steps[rank][step]["mine"]) - set(steps[rank][step]["theirs"]))
            if invented:
                grader.fail(
                    "invents-gradients",
                    f"In step {step} nobody used {invented[0]}, and on rank {rank} it has a gradient; with DDP it has None.",
                    of=[rank],
                    at=MISSING,
                )


def _explain(grader: Grader, ranks: list[Step], step: int, rank: int, name: str) -> NoReturn:
    wanted = ranks[rank]["theirs"][name]
    if name not in ranks[rank]["mine"]:
        grader.fail(
            "missing-stays-missing",
            f"In step {step} another rank used {name}, and on rank {rank} its grad is still None.",
            of=[rank],
            at=MISSING,
        )
    got = ranks[rank]["mine"][name]
    away = (got - wanted).abs().max().item()
    what = f"In step {step} {name}.grad on rank {rank} is up to {away:.2g} away from DDP's."
    alone = [one["alone"].get(name) for one in ranks]
    own = alone[rank]
    here = ranks[rank]
    averaged = [
        n for n, g in here["mine"].items() if torch.equal(g, here["theirs"][n]) and not _close(g, here["alone"][n])
    ]
    if own is not None and _close(got, own) and averaged:
        grader.fail(
            "bucket-never-launched",
            f"{what} It is that rank's own gradient, while that of {averaged[0]} is averaged. Nobody used never.weight, so "
            "a bucket was never full.",
            of=[rank],
            at=FINISH,
        )
    if own is not None and _close(got, own):
        grader.fail("not-averaged", f"{what} It is that rank's own gradient.", of=[rank], at=FINISH)
    if _close(got, wanted * WORLD):
        grader.fail(
            "never-divides", f"{what} It is the sum over the ranks, {WORLD} times too large.", of=[rank], at=REDUCE
        )
    if _close(got, wanted / WORLD):
        grader.fail("divides-twice", f"{what} It is {WORLD} times too small.", of=[rank], at=DIVIDE)
    others = [one["mine"].get(name) for one in ranks]
    if own is not None and others[0] is not None and all(o is not None and _close(o, others[0]) for o in others):
        grader.fail("wrong-mean", f"{what} All ranks have the same.", of=range(WORLD), at=REDUCE)
    grader.fail("wrong-mean", what, of=[rank], at=REDUCE)


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-5, atol=1e-7)


def judge_parameters(grader: Grader, run: Run) -> None:
    """The parameters after all steps against DDP's."""
    mine, theirs = run.observed("mine"), run.observed("theirs")
    for rank in range(WORLD):
        for name, wanted in theirs[rank].items():
            if not torch.equal(mine[rank][name], wanted):
                away = (mine[rank][name] - wanted).abs().max().item()
                grader.fail(
                    "different-weights",
                    f"After {STEPS} steps {name} on rank {rank} is {away:.2g} away from DDP's.",
                    of=[rank],
                    at=FINISH,
                )


# The checks ----------------------------------------------------------------------------------------------------------


def test_construction(grader: Grader) -> None:
    """at construction rank 0's parameters and buffers come to all ranks"""
    trained = main_run(grader)
    original = trained.initial
    constructed = trained.run.observed("constructed")
    wrong = [
        (rank, name)
        for name in original[0]
        for rank in range(WORLD)
        if not torch.equal(constructed[rank][name], original[0][name])
    ]
    if not wrong:
        return
    rank, name = wrong[0]
    buffers = ("offset", "unsaved", "count")
    theirs = "still its own" if torch.equal(constructed[rank][name], original[rank][name]) else "something else"
    what = f"After MiniDDP(module) {name} on rank {rank} is not rank 0's; it is {theirs}."
    missing = {name for _, name in wrong}
    if missing <= set(buffers):
        also = " state_dict does not name it." if missing == {"unsaved"} else ""
        grader.fail("forgets-buffers", what + also, of=[rank], at=BROADCAST)
    if all(name.startswith("frozen.") for name in missing):
        grader.fail("forgets-frozen", what, of=[rank], at=BROADCAST)
    if rank == 0:
        grader.fail("wrong-source", f"{what} Rank 0's are what counts.", of=[rank], at=BROADCAST)
    grader.fail("no-broadcast", what, of=[rank], at=BROADCAST)


@pytest.mark.needs("test_construction")
def test_matches_ddp(grader: Grader) -> None:
    """gradients and parameters are those of torch's DDP, to the last bit"""
    trained = main_run(grader)
    judge_gradients(grader, trained)
    judge_parameters(grader, trained.run)


@pytest.mark.needs("test_matches_ddp")
def test_unused(grader: Grader) -> None:
    """a branch that is used on some ranks, or on none, is handled as DDP does"""
    trained = unused_run(grader)
    judge_gradients(grader, trained)
    judge_parameters(grader, trained.run)


@pytest.mark.needs("test_matches_ddp")
def test_overlap(grader: Grader) -> None:
    """the first all-reduce is launched while backward still computes"""
    run = overlap_run(grader)
    for rank in range(WORLD):
        seen = events(run, rank)
        first = next(index for index, event in enumerate(seen) if is_reduction(event))
        done = next(index for index, event in enumerate(seen) if event_name(event) == "backward done")
        last = max(index for index, event in enumerate(seen) if event_name(event).startswith("ready"))
        ready = sum(event_name(event).startswith("ready") for event in seen[:first])
        if first > done:
            grader.fail(
                "launches-after-backward",
                f"Rank {rank} launched its first all-reduce when backward had returned: all {ready} gradients were "
                f"ready by then. The first {PER_BUCKET} filled a bucket.",
                of=[rank],
                at=FINISH,
            )
        waits = [index for index, event in enumerate(seen[:done]) if event_name(event) == "wait"]
        if waits:
            before = sum(event_name(event).startswith("ready") for event in seen[: waits[0]])
            grader.fail(
                "waits-in-hook",
                f"Rank {rank} waited for an all-reduce {len(waits)} times before backward had returned, first when "
                f"{before} of {LAYERS} gradients were ready. Backward stood still for so long.",
                of=[rank],
                at=r"wait\( || " + HOOK,
            )
        if first > last:
            collectives = sum(map(is_reduction, seen))
            one = collectives == 1
            grader.fail(
                "one-bucket" if one else "forward-order",
                f"Rank {rank} launched its first all-reduce when all {LAYERS} gradients were ready"
                + (
                    ": everything is in one bucket."
                    if one
                    else ": the bucket that is first to go is the last to be full."
                ),
                of=[rank],
                at=BUCKET if one else r"parameters\( || " + BUCKET,
            )


def event_name(event: Mark | Collective) -> str:
    """A mark's name; empty for a collective."""
    return event.name if isinstance(event, Mark) else ""


@pytest.mark.needs("test_overlap")
def test_buckets(grader: Grader) -> None:
    """as many all-reduces as there are buckets of bucket_cap_mb"""
    run = overlap_run(grader)
    wanted = LAYERS // PER_BUCKET
    layer = 32 * 32 * 4
    for rank in range(WORLD):
        sizes = [event.nbytes for event in events(run, rank) if isinstance(event, Collective) and is_reduction(event)]
        what = (
            f"For {LAYERS} parameters of {layer} bytes and bucket_cap_mb={PER_BUCKET * layer / 2**20:g} (so {PER_BUCKET} "
            f"fill a bucket) rank {rank} made {len(sizes)} all-reduces of {sum(sizes)} bytes in all; {wanted} were expected."
        )
        if len(sizes) == LAYERS:
            grader.fail("no-buckets", what, of=[rank], at=REDUCE)
        if sum(sizes) >= 2 * LAYERS * layer:
            grader.fail("sends-twice", what, of=[rank], at=REDUCE)
        if len(sizes) != wanted:
            grader.fail("wrong-bucket-size", f"{what} The first has {sizes[0]} bytes.", of=[rank], at=BUCKET)


@pytest.mark.needs("test_matches_ddp")
def test_no_sync(grader: Grader) -> None:
    """no_sync() exchanges nothing, and the next backward exchanges the sums"""
    trained = train(grader, "no_sync", [[True, True]] * 2, micro=3)
    for rank, report in enumerate(trained.run.ranks):
        marks = sorted(report.marks, key=lambda mark: mark.number)
        begin = 0
        for mark in marks:
            if mark.name == "backward":
                begin = mark.number
            if mark.name != "backward in no_sync done":
                continue
            inside = [c for c in report.collectives if begin < c.number < mark.number and c.kind != "broadcast"]
            if inside:
                grader.fail(
                    "ignores-no-sync",
                    f"In a backward within no_sync() rank {rank} launched {len(inside)} all-reduces of "
                    f"{sum(call.nbytes for call in inside)} bytes.",
                    of=[rank],
                    at=r"def no_sync || " + HOOK,
                )
    steps = trained.steps
    for rank in range(WORLD):
        for name, wanted in steps[rank][0]["theirs"].items():
            got = steps[rank][0]["mine"].get(name)
            if got is None or not torch.equal(got, wanted):
                own = steps[rank][0]["alone"][name]
                seen = "missing" if got is None else f"up to {(got - wanted).abs().max().item():.2g} away from DDP's"
                if got is not None and _close(got, own):
                    seen += ": it is still that rank's own"
                grader.fail(
                    "loses-accumulated",
                    f"After two micro-batches in no_sync() and one outside, {name}.grad on rank {rank} is {seen}.",
                    of=[rank],
                    at=r"def no_sync || " + HOOK,
                )


@pytest.mark.needs("test_matches_ddp")
def test_divides_first(grader: Grader) -> None:
    """gradients are divided before the sum, so that it does not overflow"""
    slope = 3e38
    run = grader.run("overflows", WORLD, slope=slope)
    for rank, gradient in enumerate(run.observed("gradient")):
        if gradient is None or not torch.allclose(gradient, torch.full((3,), slope)):
            now = "None" if gradient is None else f"{gradient[0].item():g}"
            grader.fail(
                "divides-after-the-sum",
                f"Both ranks had a gradient of {slope:g}; the mean of it came out as {now}. The largest float32 is 3.4e+38.",
                of=[rank],
                at=DIVIDE,
            )


@pytest.mark.needs("test_construction")
def test_state_dict(grader: Grader) -> None:
    """state_dict and load_state_dict are those of the plain module"""
    run = grader.run("saves", WORLD)
    for rank in range(WORLD):
        plain, wrapped = run.observed("plain")[rank], run.observed("wrapped")[rank]
        if plain != wrapped:
            other = next((key for key in wrapped if key not in plain), "fewer of them")
            grader.fail(
                "prefixed-state",
                f"The plain module's state_dict has keys like {plain[0]!r}, MiniDDP's has {other!r}.",
                of=[rank],
                at=r"def state_dict || " + CLASS,
            )
        error = run.observed("error")[rank]
        if error or not run.observed("loaded")[rank]:
            grader.fail(
                "cannot-load",
                f"load_state_dict with the plain module's keys {'raised: ' + ' '.join(error.split())[:160] if error else 'changed nothing'}",
                of=[rank],
                at=r"def load_state_dict || " + CLASS,
            )
