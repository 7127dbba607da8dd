"""What `find_divergence` and `DivergenceWatch` have to do.

    find_divergence(model, optimizer=None, *, gradients=True, tolerance=0.0) -> list[Difference]
    DivergenceWatch(model, optimizer=None, every=1).step() -> Divergence | None

Three ranks hold equal models, and single numbers are changed on one of them: by so much, at this place, drawn anew for
every seed. What is expected follows from what was changed. What it costs is counted in the recorded collectives.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

from lockstep.grading import Grader
from lockstep.grading.verdict import Diagnosis
from lockstep.ranks import Collective, Run
from lockstep.ranks.explain import names
from lockstep.ranks.text import evidence

WORLD = 3  # with two ranks there is no majority
EVERY, STEPS = 2, 7
TENSORS = 60  # what there is to compare in the largest of the models here: parameters, buffers, gradients and state
BYTES = 64 + 16 * TENSORS

FUNCTION = r"def find_divergence"
CHECKSUM = r"def _?\w*(checksum|fingerprint|digest|hash) || checksum || sum\( || " + FUNCTION
WALK = r"named_parameters || parameters\( || " + FUNCTION
BUFFERS = r"named_buffers || buffers\( || " + WALK
GRADIENTS = r"\.grad\b || " + FUNCTION
STATE = r"\.state\b || optimizer is || " + FUNCTION
GATHER = r"all_gather || broadcast || all_reduce || " + FUNCTION
MAJORITY = r"Counter\(|\.count\(|most_common || == 0 || \[0\] || " + FUNCTION
LARGEST = r"\babs\( || \.max\(\) || largest = || " + FUNCTION
WATCH = r"def step"

Expected = tuple[str, str, list[int], float]
Change = dict[str, Any]

MISSED = {
    "parameter": ("parameters-not-compared", WALK),
    "buffer": ("buffers-not-compared", BUFFERS),
    "gradient": ("gradients-not-compared", GRADIENTS),
    "optimizer": ("optimizer-not-compared", STATE),
}
"""What it usually means that nothing was found, by the kind of what was changed."""


def compared(
    grader: Grader,
    case: str,
    changes: list[Change],
    *,
    world: int = WORLD,
    wrapped: bool = False,
    stepped: bool = True,
    **options: Any,
) -> Run:
    """Compare once, after these changes, of which each rank knows its own."""
    seed = grader.random("model").randrange(1 << 30)
    each = [{"changes": [one for one in changes if one["rank"] == rank]} for rank in range(world)]
    return grader.run(
        "compares", world, each=each, case=case, seed=seed, options=options, wrapped=wrapped, stepped=stepped
    )


def add(grader: Grader, rank: int, kind: str, name: str, size: int) -> tuple[Change, Expected]:
    """Add a number to one element of this tensor on one rank; and what is to be found then."""
    random = grader.random(f"{rank} {kind} {name}")
    by = (random.choice((0.5, 0.75, 1.25)) + random.random() / 8) * (-1 if rank == 1 else 1)  # a missing abs() shows
    change = {"do": "add", "rank": rank, "kind": kind, "name": name, "at": random.randrange(size), "by": by}
    return change, (kind, name, [rank], abs(by))


def read_failure(grader: Grader, run: Run) -> Diagnosis | None:
    """Name what a failed run of this exercise usually means."""
    cause = run.cause
    assert cause is not None
    case = run.observed("case")[0]
    what = {
        "missing": "Rank 1 had no gradient for one parameter, and rank 2 no optimizer state for another",
        "parameter": "One number differed on one rank",
        "agree": "All ranks held the same",
    }.get(case, "")
    if cause.kind == "raised" and cause.error is not None and case == "missing":
        return grader.diagnosis(
            "missing-on-some-overlooked",
            f"{what}, and {names(cause.ranks)} raised {cause.error}.",
            of=cause.ranks,
            at=cause.error.frame,
        )
    if cause.kind in ("hang", "mismatch", "crashed") and what:
        headline = cause.headline[0].upper() + cause.headline[1:].rstrip(".")
        return grader.diagnosis(
            "uneven-collectives",
            f"{what}, and the ranks no longer called the same collectives. {headline}.",
            evidence=evidence(run),
            of=cause.ranks,
            at=cause.frame or GATHER,
        )
    return None


def between(run: Run, rank: int, begin: str, end: str) -> list[Collective]:
    """What this rank sent between two marks."""
    report = run.ranks[rank]
    at = {mark.name: mark.number for mark in report.marks}
    return [call for call in report.collectives if at[begin] < call.number < at[end]]


# Judging a list of differences ---------------------------------------------------------------------------------------


def say(difference: list[Any] | Expected) -> str:
    """`parameter encoder.weight on rank 1, by 0.5`."""
    kind, name, ranks, largest = difference
    return f"{kind} {name} on {names(ranks)}, by {largest:.4g}"


def say_all(found: list[list[Any]]) -> str:
    """A list of differences, in words."""
    more = f" and {len(found) - 2} more" if len(found) > 2 else ""
    return "; ".join(say(one) for one in found[:2]) + more if found else "nothing"


def judge(
    grader: Grader,
    run: Run,
    expected: list[Expected],
    missed: tuple[str, str] | None = None,
    why: str = "",
    found: list[Any] | None = None,
) -> None:
    """All ranks must have found this and nothing else. `missed` is the diagnosis when something was not found."""
    each = run.observed("found") if found is None else found
    odd = [rank for rank in range(run.world_size) if repr(each[rank]) != repr(each[0])]
    if odd and any(each):
        longest = max(range(run.world_size), key=lambda rank: len(each[rank]))
        other = next(rank for rank in range(run.world_size) if repr(each[rank]) != repr(each[longest]))
        grader.fail(
            "only-some-ranks-know",
            f"Rank {longest} was told: {say_all(each[longest])}. Rank {other} was told: {say_all(each[other])}. All ranks "
            "should get the same list, so that all can stop, or go on, together.",
            of=[other],
            at=r"get_rank\(\) == 0|rank == 0|rank != 0|get_rank\(\) != 0|if rank || get_rank || " + FUNCTION,
        )
    seen = {(kind, name): [kind, name, ranks, largest] for kind, name, ranks, largest in each[0]}
    keys = {(kind, name) for kind, name, *_ in expected}
    for want in expected:
        key = want[:2]
        if key not in seen:
            wrapper = next((name for _, name in seen if name.endswith(f".{want[1]}")), None)
            if wrapper is not None:
                grader.fail(
                    "wrapper-in-names",
                    f"{want[1]} was reported as {wrapper}: the name that it has inside DDP.",
                    at=r"\.module || " + WALK,
                )
            id, at = missed or MISSED[want[0]]
            grader.fail(
                id, f"{why or 'There is a difference'}: {say(want)}. Found: {say_all(each[0])}.", of=want[2], at=at
            )
    for key, one in seen.items():
        if key not in keys:
            grader.fail(
                "false-alarm", f"All ranks agree on {key[1]} ({key[0]}), and it was reported: {say(one)}.", at=CHECKSUM
            )
    if len(each[0]) > len(seen):
        twice = next(one for one in each[0] if sum(one[:2] == other[:2] for other in each[0]) > 1)
        grader.fail("false-alarm", f"{twice[1]} ({twice[0]}) was reported more than once.", at=WALK)
    for want in expected:
        _, name, ranks, largest = seen[want[:2]]
        if ranks != want[2]:
            blamed = sorted({*range(run.world_size)} - {*ranks})
            what = f"{name} differs on {names(want[2])} from what the others have; the report blames {names(ranks)}."
            id = "blames-the-majority" if blamed == want[2] and 0 in want[2] else "wrong-ranks"
            grader.fail(id, what, of=want[2], at=MAJORITY)
        if missed and math.isinf(want[3]) and not math.isinf(largest):
            grader.fail(missed[0], f"{why}: {say(want)}. Found: {say(seen[want[:2]])}.", of=want[2], at=missed[1])
        if not (largest == want[3] or math.isclose(largest, want[3], rel_tol=1e-3)):
            grader.fail(
                "wrong-amount",
                f"{name} differs by {want[3]:.6g} at most, on {names(want[2])}; the report says {largest:.6g}.",
                of=want[2],
                at=LARGEST,
            )


# The checks ----------------------------------------------------------------------------------------------------------


def test_agree(grader: Grader) -> None:
    """finds nothing when all ranks hold the same"""
    run = compared(grader, "agree", [])
    for found in run.observed("found"):
        if any(name == "odd" for _, name, *_ in found):
            grader.fail(
                "nan-differs-from-itself",
                "The buffer `odd` holds NaN and infinity, the same bits on all ranks, and was reported: "
                f"{say(next(one for one in found if one[1] == 'odd'))}.",
                at=CHECKSUM,
            )
    judge(grader, run, [])


@pytest.mark.needs("test_agree")
def test_parameter(grader: Grader) -> None:
    """names the parameter, the rank and the largest difference"""
    pairs = [
        add(grader, 1, "parameter", "encoder.weight", 12),
        add(grader, 2, "parameter", "frozen", 6),
        add(grader, 1, "parameter", "scale", 1),
    ]
    run = compared(grader, "parameter", [change for change, _ in pairs], stepped=False)
    judge(grader, run, [expected for _, expected in pairs])


def one_of_each_kind(grader: Grader) -> list[tuple[Change, Expected]]:
    """What is not a parameter, changed on one rank each."""
    return [
        add(grader, 2, "buffer", "norm.running_mean", 3),
        add(grader, 1, "buffer", "precise", 3),
        add(grader, 1, "gradient", "decoder.weight", 12),
        add(grader, 2, "optimizer", "encoder.bias.exp_avg", 3),
        add(grader, 1, "optimizer", "scale.step", 1),
    ]


@pytest.mark.needs("test_parameter")
def test_kinds(grader: Grader) -> None:
    """compares buffers, gradients and the optimizer's state as well"""
    pairs = one_of_each_kind(grader)
    judge(grader, compared(grader, "kinds", [change for change, _ in pairs]), [expected for _, expected in pairs])


@pytest.mark.needs("test_parameter")
def test_majority(grader: Grader) -> None:
    """blames the ranks that differ from the majority, rank 0 too"""
    odd, expected = add(grader, 0, "parameter", "encoder.weight", 12)
    first, (_, _, _, by) = add(grader, 1, "parameter", "decoder.weight", 12)
    second = first | {"rank": 2, "by": 2 * first["by"]}
    run = compared(grader, "majority", [odd, first, second])
    # All three hold another decoder: there is no majority, and the lowest rank's stands for it.
    judge(grader, run, [expected, ("parameter", "decoder.weight", [1, 2], 2 * by)])


@pytest.mark.needs("test_parameter")
def test_same_sum(grader: Grader) -> None:
    """finds elements that have changed places, and changes that cancel out"""
    one, other = grader.random("places").sample(range(12), 2)
    places = {"rank": 2, "kind": "parameter", "at": one, "other": other}
    changes = [
        places | {"do": "cancel", "name": "encoder.weight", "by": 0.5},
        places | {"do": "swap", "name": "decoder.weight"},
    ]
    run = compared(grader, "same sum", changes)
    found = [
        [[kind, name, ranks, 0.0 if name == "decoder.weight" else largest] for kind, name, ranks, largest in each]
        for each in run.observed("found")
    ]  # how far apart the two are that have changed places is another question
    seen = [name for _, name, *_ in found[0]]
    why = (
        "Two elements have changed places, so that sum and norm are the same"
        if "encoder.weight" in seen
        else "One element is 0.5 larger, another 0.5 smaller, and the sum has not changed"
    )
    expected: list[Expected] = [("parameter", "encoder.weight", [2], 0.5), ("parameter", "decoder.weight", [2], 0.0)]
    judge(grader, run, expected, ("order-blind-checksum", CHECKSUM), why, found)


@pytest.mark.needs("test_parameter")
def test_bits(grader: Grader) -> None:
    """compares bits: the last one of a half, an integer above 2**53, -0.0 against 0.0"""
    random = grader.random("bits")
    cases: list[tuple[Change, float, str]] = [
        (
            {"do": "add", "kind": "parameter", "name": "brief", "by": 2**-7},
            2**-7,
            "One bfloat16 is 1.0078125 instead of 1",
        ),
        ({"do": "add", "kind": "buffer", "name": "ids", "by": 1}, 1.0, "One integer, about 2**60, is larger by 1"),
        (
            {"do": "add", "kind": "buffer", "name": "precise", "by": 2.0**-40},
            2.0**-40,
            "One float64 is larger by 2**-40",
        ),
        ({"do": "flip", "kind": "buffer", "name": "mask"}, 1.0, "One bool has been flipped"),
        ({"do": "negative zero", "kind": "buffer", "name": "zeros"}, 0.0, "One zero is -0.0 instead of 0.0"),
    ]
    changes = [case[0] | {"rank": 1, "at": random.randrange(3)} for case in cases]
    run = compared(grader, "bits", changes)
    expected = [(change["kind"], change["name"], [1], largest) for change, largest, _ in cases]
    missed = {name for _, name, *_ in expected} - {name for _, name, *_ in run.observed("found")[0]}
    why = next((what for change, _, what in cases if change["name"] in missed), "")
    judge(grader, run, expected, ("rounds-bits-away", CHECKSUM), why)


@pytest.mark.needs("test_kinds")
def test_missing(grader: Grader) -> None:
    """takes it for a difference when only some ranks have a gradient, or a state"""
    run = compared(
        grader,
        "missing",
        [
            {"do": "drop gradient", "rank": 1, "name": "encoder.bias"},
            {"do": "drop state", "rank": 2, "name": "decoder.weight"},
        ],
    )
    state = [f"decoder.weight.{entry}" for entry in ("step", "exp_avg", "exp_avg_sq")]
    expected: list[Expected] = [("gradient", "encoder.bias", [1], math.inf)]
    judge(
        grader,
        run,
        expected + [("optimizer", name, [2], math.inf) for name in state],
        ("missing-on-some-overlooked", GRADIENTS),
        "Only some ranks have it, and there is no number for how far it is from the others",
    )


@pytest.mark.needs("test_kinds")
def test_hyper_parameters(grader: Grader) -> None:
    """compares the optimizer's hyper-parameters"""
    run = compared(grader, "lr", [{"do": "lr", "rank": 1, "to": 0.03}])
    expected: list[Expected] = [("optimizer", "param_groups[0].lr", [1], 0.02)]
    judge(
        grader,
        run,
        expected,
        ("hyper-parameters-not-compared", r"param_groups || " + STATE),
        "Rank 1 trains with a learning rate of 0.03, the others with 0.01",
    )


@pytest.mark.needs("test_kinds")
def test_options(grader: Grader) -> None:
    """leaves out gradients when told so, and what is within the tolerance"""
    gradient, _ = add(grader, 2, "gradient", "encoder.weight", 12)
    gradient["by"] += 4
    small, (kind, name, ranks, by) = add(grader, 1, "parameter", "encoder.weight", 12)
    big = small | {"by": -by - 4, "name": "decoder.weight"}
    run = compared(grader, "options", [gradient, small, big], gradients=False, tolerance=3.0)
    for found in run.observed("found"):
        for seen_kind, seen, _, largest in found:
            if seen_kind == "gradient" or seen == name:
                said = "gradients=False" if seen_kind == "gradient" else "tolerance=3.0"
                grader.fail(
                    "ignores-options",
                    f"With {said} the {seen_kind} {seen} was reported, which differs by {largest:.4g}.",
                    at=r"tolerance || " + FUNCTION if seen == name and seen_kind == kind else GRADIENTS,
                )
    judge(grader, run, [("parameter", "decoder.weight", ranks, by + 4)])


@pytest.mark.needs("test_parameter")
def test_wrapped(grader: Grader) -> None:
    """names things as the plain model does when it is wrapped in DDP"""
    pairs = [add(grader, 2, "parameter", "encoder.weight", 12), add(grader, 1, "buffer", "precise", 3)]
    run = compared(grader, "wrapped", [change for change, _ in pairs], wrapped=True, stepped=False)
    judge(grader, run, [expected for _, expected in pairs])


@pytest.mark.needs("test_agree")
def test_cheap(grader: Grader) -> None:
    """costs at most two small collectives when all ranks agree"""
    run = compared(grader, "agree", [])
    for rank in range(WORLD):
        calls = between(run, rank, "begin", "end")
        sent = sum(call.nbytes for call in calls)
        if len(calls) > 2 or sent > BYTES:
            grader.fail(
                "sends-everything",
                f"All ranks agreed, and rank {rank} needed {len(calls)} collectives and {sent} bytes to see it; two and "
                f"{BYTES} bytes (64, and 16 for each of {TENSORS} tensors) are enough.",
                of=[rank],
                at=GATHER,
            )


@pytest.mark.needs("test_kinds")
def test_only_compares(grader: Grader) -> None:
    """changes neither model, gradients, optimizer nor random state"""
    pairs = one_of_each_kind(grader)
    for run in (compared(grader, "agree", []), compared(grader, "kinds", [change for change, _ in pairs])):
        changed = [rank for rank, one in enumerate(run.observed("changed")) if one]
        if changed:
            grader.fail(
                "changes-what-it-compares",
                f"After the call the model, its gradients or the optimizer's state had changed on {names(changed)}. Who looks "
                "for the cause needs to see it as it was.",
                of=changed,
                at=r"broadcast\( || all_reduce\( || zero_grad || " + FUNCTION,
            )
        drew = [rank for rank, one in enumerate(run.observed("drew")) if one]
        if drew:
            grader.fail(
                "touches-random-state",
                f"After the call the random state had changed on {names(drew)}: dropout now draws other masks than without it.",
                of=drew,
                at=r"manual_seed || rand || " + FUNCTION,
            )


@pytest.mark.needs("test_kinds")
def test_watch(grader: Grader) -> None:
    """watches, and keeps the first step at which something differed"""
    first, expected = add(grader, 1, "parameter", "encoder.weight", 12)
    later, _ = add(grader, 2, "parameter", "decoder.weight", 12)
    seed = grader.random("model").randrange(1 << 30)
    changes = {"3": first, "5": later}
    each = [{"changes": {n: one for n, one in changes.items() if one["rank"] == rank}} for rank in range(WORLD)]
    run = grader.run("watches", WORLD, each=each, seed=seed, every=EVERY, steps=STEPS)
    seen = run.observed("seen")
    for rank, each in enumerate(seen):
        for step in range(1, STEPS + 1):
            found = each[step - 1]
            calls = between(run, rank, f"step {step}", f"step {step + 1}" if step < STEPS else "end")
            if step % EVERY and (calls if step < 4 else False):
                grader.fail(
                    "looks-too-often",
                    f"every={EVERY}, and rank {rank} called {len(calls)} collectives at step {step}.",
                    of=[rank],
                    at=r"%.*every || self\.every || " + WATCH,
                )
            if step < 4 and found is not None:
                at = found[0]
                grader.fail(
                    "looks-too-often" if at % EVERY else "false-alarm",
                    f"every={EVERY}; at step {step} rank {rank} was told of a difference at step {at}.",
                    of=[rank],
                    at=r"%.*every || self\.every || " + WATCH,
                )
            if step >= 4 and (found is None or found[0] != 4):
                was = "None" if found is None else f"a difference at step {found[0]}"
                grader.fail(
                    "not-the-first-step",
                    f"With every={EVERY} the ranks were seen to differ at step 4 for the first time; at step {step} rank {rank} was "
                    f"told {was}.",
                    of=[rank],
                    at=WATCH,
                )
            if step >= 4 and found[1] != 2:
                grader.fail(
                    "not-the-first-step",
                    f"The last time that all agreed was step 2; rank {rank} was told {found[1]}.",
                    of=[rank],
                    at=r"= Divergence\( || Divergence\(self || " + WATCH,
                )
    last = [each[-1][2] for each in seen]
    if any(len(found) > 1 for found in last):
        grader.fail(
            "not-the-first-step",
            f"At step 4 one parameter differed; at step {STEPS} the same report names {len(last[0])} differences. What came "
            "later hides what came first.",
            at=WATCH,
        )
    judge(grader, run, [expected], found=last)


@pytest.mark.needs("test_agree")
def test_one_rank(grader: Grader) -> None:
    """one rank alone has nobody to differ from"""
    judge(grader, compared(grader, "alone", [], world=1), [])
