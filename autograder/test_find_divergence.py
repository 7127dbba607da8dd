"""What `find_divergence` and `DivergenceWatch` have to do.

    find_divergence(model, optimizer=None, *, gradients=True, tolerance=0.0) -> list[Difference]
    DivergenceWatch(model, optimizer=None, every=1).step() -> Divergence | None

Three ranks hold equal models, and single numbers are changed on one of them: by so much, at this place, drawn anew for
every seed. What is expected follows from what was changed. What it costs is counted in the recorded collectives.
"""

from __future__ import annotations

import math

import pytest
from judging.find_divergence import WORLD, Change, Found, add, between, compared, found, one_of_each_kind, read, say

from lockstep.grading import Cause, Diagnosis, Grader, Run, ending, evidence, names

EVERY, STEPS = 2, 7
TOLERANCE = 0.75
FIRST = 4  # the step at which the watch has to see a difference: made at step 3, and it looks at every second one
TENSORS = 66  # what there is to compare in the largest of the models here: parameters, buffers, gradients and state
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
ON_ONE_RANK = r"get_rank\(\) == 0|rank == 0|rank != 0|get_rank\(\) != 0|if rank || get_rank || " + FUNCTION
WATCH = r"def step"
OFTEN = r"%.*every || self\.every || " + WATCH

MISSED = {
    "parameter": ("parameters-not-compared", WALK),
    "buffer": ("buffers-not-compared", BUFFERS),
    "gradient": ("gradients-not-compared", GRADIENTS),
    "optimizer": ("optimizer-not-compared", STATE),
}
"""What it usually means that nothing was found, by the kind of what was changed."""

CASES = {
    "missing": "Rank 1 had no gradient for one parameter, and rank 2 no optimizer state for another",
    "parameter": "One number differed on one rank",
    "agree": "All ranks held the same",
}


def read_failure(grader: Grader, run: Run, cause: Cause) -> Diagnosis | None:
    """Name what a failed run of this exercise usually means."""
    case = run.observed("case")[0]
    what = CASES.get(case)
    if cause.kind == "raised" and cause.error is not None and case == "missing":
        said = f"{what}, and {names(cause.ranks)} raised {cause.error}."
        return grader.diagnosis("missing-on-some-overlooked", said, of=cause.ranks, at=cause.error.frame)
    if cause.kind in ("hang", "mismatch", "crashed") and what:
        said = f"{what}, and the ranks no longer called the same collectives.{ending(cause)}"
        at = cause.frame or GATHER
        return grader.diagnosis("uneven-collectives", said, evidence=evidence(run), of=cause.ranks, at=at)
    return None


# Judging a list of differences ---------------------------------------------------------------------------------------


def judge(
    grader: Grader,
    each: list[list[Found]],
    expected: list[Found],
    missed: tuple[str, str] | None = None,
    why: str = "There is a difference",
) -> None:
    """All ranks must have found this and nothing else. `missed` is the diagnosis when something was not found."""
    judge_agreement(grader, each)
    seen = {one.key: one for one in each[0]}
    right, told = {want.key: want for want in expected}, set()
    for want in (want for want in expected if want.key not in seen):
        wrapper = next((name for _, name in seen if name.endswith(f".{want.name}")), None)
        if wrapper is not None:
            said = f"{want.name} was reported as {wrapper}: the name that it has inside DDP."
            grader.fail("wrapper-in-names", said, at=r"\.module || " + WALK)
        spare = [
            one for one in each[0] if one.key not in right and (one.kind, one.ranks) == (want.kind, want.ranks)
            and math.isclose(one.largest, want.largest, rel_tol=1e-3)
        ]  # fmt: skip
        if spare and missed is None:
            said = f"{want.name} ({want.kind}) differs on {names(want.ranks)}, and was reported as {spare[0].name}."
            grader.fail("other-names", said, of=want.ranks, at=WALK)
        id, at = missed or MISSED[want.kind]
        grader.fail(id, f"{why}: {want}. Found: {say(each[0])}.", of=want.ranks, at=at)
    for one in each[0]:
        what = f"{one.name} ({one.kind})"
        if one.key not in right:
            said = f"All ranks agree on {what}, and it was reported: {one}."
            grader.fail("false-alarm", said, at=CHECKSUM)
        if one.key in told:
            grader.fail("false-alarm", f"{what} was reported more than once.", at=WALK)
        told.add(one.key)
    for key, want in right.items():
        judge_one(grader, seen[key], want, len(each), missed, why)
    order = sorted(each[0], key=lambda one: one.place)
    if order != each[0]:
        first, second = (
            next(one for one, other in zip(a, b, strict=True) if one != other)
            for a, b in ((order, each[0]), (each[0], order))
        )
        said = f"{first.name} ({first.kind}) comes before {second.name} ({second.kind}), and was reported after it."
        grader.fail("order-of-the-list", said, at=r"sort || " + WALK)


def judge_agreement(grader: Grader, each: list[list[Found]]) -> None:
    """All ranks must have been told the same."""
    longest = max(range(len(each)), key=lambda rank: len(each[rank]))
    other = [rank for rank, own in enumerate(each) if repr(own) != repr(each[longest])][:1]
    said = "".join(f"Rank {rank} was told: {say(each[rank])}. " for rank in (longest, *other))
    said += "All ranks should get the same list, so that all can stop, or continue, together."
    grader.fail_on(other, "only-some-ranks-know", said, at=ON_ONE_RANK)


def judge_one(grader: Grader, seen: Found, want: Found, world: int, missed: tuple[str, str] | None, why: str) -> None:
    """One difference that was found: its ranks, and how far they are from the others."""
    others = [rank for rank in range(world) if rank not in seen.ranks]
    close = seen.largest == want.largest or math.isclose(seen.largest, want.largest, rel_tol=1e-3)
    lost, where = missed or ("wrong-amount", LARGEST)
    no_number = math.isinf(want.largest) and not math.isinf(seen.largest)
    blamed = (
        f"{want.name} differs on {names(want.ranks)} from what the others have; the report blames {names(seen.ranks)}."
    )
    amount = f"{want.name} differs by {want.largest:.6g} at most, on {names(want.ranks)}; the report says {seen.largest:.6g}."
    mistakes = [
        (seen.ranks != want.ranks and others == want.ranks and 0 in others, "blames-the-majority", blamed, MAJORITY),
        (seen.ranks != want.ranks, "wrong-ranks", blamed, MAJORITY),
        (missed is not None and no_number, lost, f"{why}: {want}. Found: {seen}.", where),
        (not close, "wrong-amount", amount, LARGEST),
    ]  # fmt: skip
    for is_so, id, said, at in mistakes:
        grader.fail_on(want.ranks if is_so else [], id, said, at=at)


# The checks ----------------------------------------------------------------------------------------------------------


def test_agree(grader: Grader) -> None:
    """finds nothing when all ranks hold the same"""
    each = found(compared(grader, "agree", []))
    for one in (one for own in each for one in own if one.name == "odd"):
        said = f"The buffer `odd` holds NaN and infinity, the same bits on all ranks, and was reported: {one}."
        grader.fail("nan-differs-from-itself", said, at=CHECKSUM)
    judge(grader, each, [])


@pytest.mark.needs("test_agree")
def test_parameter(grader: Grader) -> None:
    """names the parameter, the rank and the largest difference"""
    changes, expected = zip(
        add(grader, 1, "parameter", "encoder.weight", 12),
        add(grader, 2, "parameter", "frozen", 6),
        add(grader, 1, "parameter", "scale", 1),
        strict=True,
    )
    judge(grader, found(compared(grader, "parameter", list(changes), stepped=False)), list(expected))


@pytest.mark.needs("test_parameter")
def test_kinds(grader: Grader) -> None:
    """compares buffers, gradients and the optimizer's state as well"""
    changes, expected = zip(*one_of_each_kind(grader), strict=True)
    judge(grader, found(compared(grader, "kinds", list(changes))), list(expected))


@pytest.mark.needs("test_parameter")
def test_majority(grader: Grader) -> None:
    """blames the ranks that differ from the majority, rank 0 too"""
    odd, expected = add(grader, 0, "parameter", "encoder.weight", 12)
    first, (*_, by) = add(grader, 1, "parameter", "decoder.weight", 12)
    second = first | {"rank": 2, "by": 2 * first["by"]}
    # All three hold another decoder: there is no majority, and the lowest rank's stands for it.
    none = Found("parameter", "decoder.weight", [1, 2], 2 * by)
    # One more, where the one with the larger difference is not the last.
    far, (*_, least) = add(grader, 2, "parameter", "frozen", 6)
    farther = far | {"rank": 1, "by": 2 * far["by"]}
    most = Found("parameter", "frozen", [1, 2], 2 * least)
    judge(grader, found(compared(grader, "majority", [odd, first, second, far, farther])), [expected, none, most])
    # On five ranks, two have one decoder and two another: rank 0, whose decoder nobody else has, is not one of the majority.
    pairs = [first | {"rank": rank, "by": (rank + 1) // 2 * first["by"]} for rank in (1, 2, 3, 4)]
    tied = Found("parameter", "decoder.weight", [0, 3, 4], by)
    judge(grader, found(compared(grader, "majority", pairs, world=5)), [tied])


@pytest.mark.needs("test_parameter")
def test_same_sum(grader: Grader) -> None:
    """finds elements that have changed places, and changes that cancel out"""
    one, other = grader.random("places").sample(range(12), 2)
    places = {"rank": 2, "kind": "parameter", "at": one, "other": other}
    changes = [
        places | {"do": "cancel", "name": "encoder.weight", "by": 0.5},
        places | {"do": "swap", "name": "decoder.weight"},
    ]
    expected = [Found("parameter", "encoder.weight", [2], 0.5), Found("parameter", "decoder.weight", [2], 0.0)]
    # How far apart the two are that have changed places is another question.
    each = [
        [one._replace(largest=0.0) if one.name == "decoder.weight" else one for one in own]
        for own in found(compared(grader, "same sum", changes))
    ]
    why = (
        "Two elements have changed places, so that sum and norm are the same"
        if expected[0].key in [one.key for one in each[0]]
        else "One element is 0.5 larger, another 0.5 smaller, and the sum has not changed"
    )
    judge(grader, each, expected, ("order-blind-checksum", CHECKSUM), why)


BITS: list[tuple[str, str, Change, float, str]] = [
    ("parameter", "brief", {"do": "add", "by": 2**-7}, 2**-7, "One bfloat16 is 1.0078125 instead of 1"),
    ("buffer", "ids", {"do": "add", "by": 1}, 1.0, "One integer, about 2**60, is larger by 1"),
    ("buffer", "precise", {"do": "add", "by": 2.0**-40}, 2.0**-40, "One float64 is larger by 2**-40"),
    ("buffer", "mask", {"do": "flip"}, 1.0, "One bool has been flipped"),
    ("buffer", "plane", {"do": "turn"}, 0.5, "The imaginary part of one complex number is larger by 0.5"),
    ("buffer", "zeros", {"do": "negative zero"}, 0.0, "One zero is -0.0 instead of 0.0"),
]


@pytest.mark.needs("test_parameter")
def test_bits(grader: Grader) -> None:
    """compares bits: the last one of a half, an integer above 2**53, -0.0 against 0.0"""
    random = grader.random("bits")
    changes = [
        what | {"kind": kind, "name": name, "rank": 1, "at": random.randrange(3)} for kind, name, what, *_ in BITS
    ]
    each = found(compared(grader, "bits", changes))
    seen = {one.name for one in each[0]}
    why = next((why for _, name, _, _, why in BITS if name not in seen), "There is a difference")
    expected = [Found(kind, name, [1], largest) for kind, name, _, largest, _ in BITS]
    judge(grader, each, expected, ("rounds-bits-away", CHECKSUM), why)
    # 300 and 1, whose difference no bfloat16 can hold; 1e300, which no float32 can hold; beside a NaN and an infinity that
    # all ranks have; a NaN alone.
    far = {"do": "add", "rank": 1, "kind": "parameter", "name": "brief", "at": random.randrange(5), "by": 299}
    farther = {"do": "add", "rank": 1, "kind": "buffer", "name": "precise", "at": random.randrange(3), "by": 1e300}
    beside = {"do": "add", "rank": 1, "kind": "buffer", "name": "odd", "at": 2, "by": 0.5}
    alone = {"do": "nan", "rank": 1, "kind": "buffer", "name": "norm.running_var", "at": random.randrange(3)}
    expected = [
        Found("parameter", "brief", [1], 299.0),
        Found("buffer", "odd", [1], 0.5),
        Found("buffer", "precise", [1], 1e300),
        Found("buffer", "norm.running_var", [1], math.inf),
    ]
    judge(grader, found(compared(grader, "nan", [far, farther, beside, alone])), expected)
    kinds = {"precise": "a different type", "mask": "a different shape"}
    changes = [{"do": f"same bytes, {one}", "rank": 1, "kind": "buffer", "name": name} for name, one in kinds.items()]
    each = found(compared(grader, "bytes", changes))
    seen = {one.name for one in each[0]}
    why = next((f"Rank 1 has the same bytes with {one}" for name, one in kinds.items() if name not in seen), "")
    expected = [Found("buffer", name, [1], math.inf) for name in kinds]
    judge(grader, each, expected, ("type-or-shape-overlooked", CHECKSUM), why or "There is no number for that")


@pytest.mark.needs("test_kinds")
def test_missing(grader: Grader) -> None:
    """takes it for a difference when only some ranks have a gradient, or a state"""
    changes: list[Change] = [
        {"do": "drop gradient", "rank": 1, "name": "encoder.bias"},
        {"do": "drop state", "rank": 2, "name": "decoder.weight"},
    ]
    state = [f"decoder.weight.{entry}" for entry in ("step", "exp_avg", "exp_avg_sq")]
    expected = [
        Found("gradient", "encoder.bias", [1], math.inf),
        *[Found("optimizer", name, [2], math.inf) for name in state],
    ]
    why = "Only some ranks have it, and there is no number for how far it is from the others"
    each = found(compared(grader, "missing", changes))
    judge(grader, each, expected, ("missing-on-some-overlooked", GRADIENTS), why)


@pytest.mark.needs("test_kinds")
def test_hyper_parameters(grader: Grader) -> None:
    """compares the optimizer's hyper-parameters"""
    change = {"do": "option", "rank": 1, "name": "lr", "to": 0.03}
    each = found(compared(grader, "lr", [change]))
    missed = ("hyper-parameters-not-compared", r"param_groups || " + STATE)
    why = "Rank 1 trains with a learning rate of 0.03, the others with 0.01"
    judge(grader, each, [Found("optimizer", "param_groups[0].lr", [1], 0.02)], missed, why)
    by = 1e-12
    count, expected = add(grader, 2, "optimizer", "scale.count", 1)
    changes = [change | {"to": 0.01 + by}, count | {"by": 1}]
    expected = [Found("optimizer", "param_groups[0].lr", [1], by), expected._replace(largest=1.0)]
    why = "In float32 2**24 + 1 is 2**24, and 0.01 + 1e-12 is 0.01; Python's numbers have more digits"
    judge(grader, found(compared(grader, "digits", changes)), expected, ("rounds-bits-away", STATE), why)
    others = [
        ("betas", [0.9, 0.95], "betas=(0.9, 0.95), the others (0.9, 0.999)"),
        ("maximize", True, "maximize=True, the others False"),
        ("foreach", False, "foreach=False, the others None"),
    ]
    each = found(compared(grader, "others", [change | {"name": name, "to": to} for name, to, _ in others]))
    judge_agreement(grader, each)
    for name, _, values in others:
        if [(one.kind, one.ranks) for one in each[0] if name in one.name] != [("optimizer", [1])]:
            said = f"Rank 1 has {values}. Found: {say([one for one in each[0] if name in one.name])}."
            grader.fail(missed[0], said, of=[1], at=missed[1])


@pytest.mark.needs("test_kinds")
def test_options(grader: Grader) -> None:
    """leaves out gradients when told so, and what is within the tolerance"""
    gradient, small, exact = unwanted(grader)
    big = small | {"by": -4.5, "name": "decoder.weight"}
    beside = big | {"rank": 2, "by": TOLERANCE / 2}  # within the tolerance, of a tensor that is listed
    changes = [gradient, small, exact, big, beside]
    each = found(compared(grader, "options", changes, gradients=False, tolerance=TOLERANCE))
    for own in each:
        judge_options(grader, own, "find_divergence", FUNCTION)
    judge(grader, each, [Found("parameter", "decoder.weight", [1, 2], 4.5)])


def unwanted(grader: Grader) -> list[Change]:
    """What gradients=False and tolerance=TOLERANCE leave out: a gradient, less than the tolerance, and just as much."""
    gradient, _ = add(grader, 2, "gradient", "encoder.weight", 12)
    small, _ = add(grader, 1, "parameter", "encoder.weight", 12)
    exact = {"do": "add", "rank": 2, "kind": "buffer", "name": "zeros", "at": 1, "by": TOLERANCE}
    return [gradient | {"by": 4.5}, small | {"by": small["by"] / 2}, exact]


def judge_options(grader: Grader, told: list[Found], who: str, at: str) -> None:
    """Nothing that is `unwanted` was reported."""
    for one in told:
        option, where = f"tolerance={TOLERANCE}", r"tolerance || "
        if one.kind == "gradient":
            option, where = "gradients=False", r"gradients= || \.grad\b || "
        elif one.largest > TOLERANCE:
            continue
        said = f"With {option} {who} reported the {one.kind} {one.name}, which differs by {one.largest:.4g}."
        grader.fail("ignores-options", said, at=where + at)


@pytest.mark.needs("test_parameter")
def test_wrapped(grader: Grader) -> None:
    """names things as the plain model does when it is wrapped in DDP"""
    pairs = [add(grader, 2, "parameter", "encoder.weight", 12), add(grader, 1, "buffer", "precise", 3)]
    run = compared(grader, "wrapped", [change for change, _ in pairs], wrapped=True, stepped=False)
    judge(grader, found(run), [expected for _, expected in pairs])


@pytest.mark.needs("test_agree")
def test_cheap(grader: Grader) -> None:
    """costs at most two small collectives when all ranks agree"""
    run = compared(grader, "agree", [])
    for rank in range(WORLD):
        calls = between(run, rank, "begin", "end")
        total = sum(call.nbytes for call in calls)
        said = (
            f"All ranks agreed, and rank {rank} needed {len(calls)} collectives and {total} bytes to see it; two and {BYTES} "
            f"bytes (64, and 16 for each of {TENSORS} tensors) are enough."
        )
        grader.fail_on([rank] if len(calls) > 2 or total > BYTES else [], "sends-everything", said, at=GATHER)


@pytest.mark.needs("test_kinds")
def test_only_compares(grader: Grader) -> None:
    """changes neither model, gradients, optimizer nor random state"""
    traces = [
        ("changed", "changes-what-it-compares", "the model, its gradients or the optimizer's state had changed on {ranks}. Who looks "
         "for the cause needs to see it as it was.", r"broadcast\( || all_reduce\( || zero_grad || " + FUNCTION),
        ("drew", "touches-random-state", "the random state had changed on {ranks}: dropout now draws other masks than without it.",
         r"manual_seed || rand || " + FUNCTION),
    ]  # fmt: skip
    for case, changes in (("agree", []), ("kinds", [change for change, _ in one_of_each_kind(grader)])):
        run = compared(grader, case, changes)
        for what, id, said, at in traces:
            of = [rank for rank, one in enumerate(run.observed(what)) if one]
            grader.fail_on(of, id, f"After the call {said}", at=at)
        for rank, (before, after) in enumerate(run.observed("entries")):
            said = (
                f"optimizer.state had entries for {before} parameters before the call and {after} after it, on rank {rank}. It is a "
                "defaultdict: optimizer.state[parameter] makes an entry that was not there."
            )
            grader.fail_on([rank] * (before != after), "changes-what-it-compares", said, at=r"\.state\[ || " + STATE)


@pytest.mark.needs("test_kinds")
def test_watch(grader: Grader) -> None:
    """watches, and keeps the first step at which something differed"""
    first, expected = add(grader, 1, "parameter", "encoder.weight", 12)
    later, _ = add(grader, 2, "parameter", "decoder.weight", 12)
    seed = grader.random("model").randrange(1 << 30)
    changes = {"3": first, "5": later}
    each = [{"changes": {n: one for n, one in changes.items() if one["rank"] == rank}} for rank in range(WORLD)]
    run = grader.run("watches", WORLD, each=each, seed=seed, every=EVERY, steps=STEPS, options={})
    seen = run.observed("seen")
    for rank, step in ((rank, step) for rank in range(WORLD) for step in range(1, STEPS + 1)):
        judge_watch(grader, run, rank, step, *(seen[rank][step - 1] or [None, None])[:2])
    last = [read(own[-1][2]) for own in seen]
    if any(len(one) > 1 for one in last):
        said = (
            f"At step {FIRST} one parameter differed; at step {STEPS} the same report names {len(last[0])} differences. What "
            "came later hides what came first."
        )
        grader.fail("not-the-first-step", said, at=WATCH)
    judge(grader, last, [expected])
    options = {"gradients": False, "tolerance": TOLERANCE}
    steps = {str(step): one for step, one in enumerate(unwanted(grader), 1)}
    each = [{"changes": {n: one for n, one in steps.items() if one["rank"] == rank}} for rank in range(WORLD)]
    run = grader.run("watches", WORLD, each=each, seed=seed, every=1, steps=len(steps), options=options)
    for found_by_step in run.observed("seen"):
        for one in (one for one in found_by_step if one is not None):
            judge_options(grader, read(one[2]), "DivergenceWatch", WATCH)


def judge_watch(grader: Grader, run: Run, rank: int, step: int, told: int | None, agreed: int | None) -> None:
    """What a rank did and was told at one step: a difference at `told`, or None, and when all `agreed`."""
    calls = between(run, rank, f"step {step}", f"step {step + 1}" if step < STEPS else "end")
    early, off = step < FIRST, (told or 0) % EVERY
    was = "None" if told is None else f"a difference at step {told}"
    mistakes = [
        (early and step % EVERY and calls, "looks-too-often", f"every={EVERY}, and rank {rank} called {len(calls)} collectives at step {step}.", OFTEN),
        (early and told is not None, "looks-too-often" if off else "false-alarm",
         f"every={EVERY}; at step {step} rank {rank} was told of a difference at step {told}.", OFTEN),
        (not early and told != FIRST, "not-the-first-step",
         f"With every={EVERY} the ranks were seen to differ at step {FIRST} for the first time; at step {step} rank {rank} was told {was}.", WATCH),
        (not early and agreed != FIRST - EVERY, "not-the-first-step",
         f"The last time that all agreed was step {FIRST - EVERY}; rank {rank} was told {agreed}.", r"= Divergence\( || Divergence\(self || " + WATCH),
        (step > FIRST and calls, "looks-too-often",
         f"At step {FIRST} the ranks were seen to differ, and at step {step} rank {rank} called {len(calls)} collectives more.", WATCH),
    ]  # fmt: skip
    for is_so, id, said, at in mistakes:
        grader.fail_on([rank] if is_so else [], id, said, at=at)


@pytest.mark.needs("test_agree")
def test_one_rank(grader: Grader) -> None:
    """one rank alone finds no difference"""
    judge(grader, found(compared(grader, "alone", [], world=1)), [])
