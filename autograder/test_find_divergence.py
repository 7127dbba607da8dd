"""What `find_divergence` and `DivergenceWatch` have to do.

    find_divergence(model, optimizer=None, *, gradients=True, tolerance=0.0) -> list[Difference]
    DivergenceWatch(model, optimizer=None, every=1).step() -> Divergence | None

Three ranks hold equal models, and single numbers are changed on one of them: by so much, at this place, drawn anew for
every seed. What is expected follows from what was changed. What it costs is counted in the recorded collectives.
"""

from __future__ import annotations

import math

import pytest
from judging.find_divergence import (
    CHECKSUM,
    FUNCTION,
    GRADIENTS,
    LARGEST,
    MAJORITY,
    STATE,
    WORLD,
    Change,
    Found,
    add,
    between,
    compared,
    found,
    judge,
    judge_agreement,
    judge_changes,
    one_of_each_kind,
    read,
    say,
    watched,
    without_amount,
)

from lockstep.grading import Cause, Diagnosis, Grader, Run, ending, evidence, names

EVERY, STEPS = 2, 7
TOLERANCE = 0.75
FIRST = 4  # the step at which the watch has to see a difference: made at step 3, and it looks at every second one
TENSORS = 79  # what there is to compare in the largest of the models here, the optimizer's state and options included
BYTES = 64 + 16 * TENSORS

GATHER = r"all_gather || broadcast || all_reduce || " + FUNCTION
WATCH = r"def step"
OFTEN = r"%.*every || self\.every || " + WATCH

CASES = {
    "missing": "Rank 1 had no gradient for one parameter, and rank 0 no optimizer state for another",
    "parameter": "One number differed on one rank",
    "agree": "All ranks held the same",
}


def read_failure(grader: Grader, run: Run, cause: Cause) -> Diagnosis | None:
    """Name what a failed run of this exercise usually means."""
    what = CASES.get(case := run.observed("case")[0])
    if cause.kind == "raised" and cause.error is not None and case == "missing":
        said = f"{what}, and {names(cause.ranks)} raised {cause.error}."
        return grader.diagnosis("missing-on-some-overlooked", said, of=cause.ranks, at=cause.error.frame)
    if cause.kind in ("hang", "mismatch", "crashed") and what:
        said = f"{what}, and the ranks no longer called the same collectives.{ending(cause)}"
        at = cause.frame or GATHER
        return grader.diagnosis("uneven-collectives", said, evidence=evidence(run), of=cause.ranks, at=at)
    return None


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
    three = (1, "encoder.weight", 12), (2, "frozen", 6), (1, "scale", 1)
    pairs = [add(grader, rank, "parameter", name, size) for rank, name, size in three]
    judge_changes(grader, "parameter", pairs, stepped=False)


@pytest.mark.needs("test_parameter")
def test_kinds(grader: Grader) -> None:
    """compares buffers, gradients and the optimizer's state as well"""
    judge_changes(grader, "kinds", one_of_each_kind(grader))


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
        {"do": "cancel by place, too", "rank": 1, "kind": "buffer", "name": "places"},
        {"do": "flip", "rank": 1, "kind": "buffer", "name": "mask", "at": 0},
    ]
    expected = [
        Found("parameter", "encoder.weight", [2], 0.5),
        Found("parameter", "decoder.weight", [2], 0.0),
        Found("buffer", "places", [1], 2.0),
        Found("buffer", "mask", [1], 1.0),
    ]
    # How far apart the two are that have changed places is another question.
    each = without_amount(found(compared(grader, "same sum", changes)), "decoder.weight")
    whys = {
        "encoder.weight": "One element is 0.5 larger, another 0.5 smaller, and the sum has not changed",
        "decoder.weight": "Two elements have changed places, so that sum and norm are the same",
        "places": "Elements 1, 2 and 3 have changed by 1, -2 and 1: neither the sum nor that of place times value is another",
    }
    seen = {one.name for one in each[0]}
    why = next((why for name, why in whys.items() if name not in seen), "There is a difference")
    judge(grader, each, expected, ("order-blind-checksum", CHECKSUM, why) if "mask" in seen else None)


BITS: list[tuple[str, str, Change, float, str]] = [
    ("parameter", "brief", {"do": "add", "by": 2**-7}, 2**-7, "One bfloat16 is 1.0078125 instead of 1"),
    ("buffer", "ids", {"do": "add", "by": 1}, 1.0, "One integer, about 2**60, is larger by 1"),
    (
        "buffer",
        "codes",
        {"do": "negate"},
        200.0,
        "One int8 is 100 instead of -100, and 200 is more than an int8 can hold",
    ),
    ("buffer", "precise", {"do": "add", "by": 2.0**-40}, 2.0**-40, "One float64 is larger by 2**-40"),
    ("buffer", "mask", {"do": "flip"}, 1.0, "One bool has been flipped"),
    ("buffer", "plane", {"do": "turn"}, 0.5, "The imaginary part of one complex number is larger by 0.5"),
    ("buffer", "zeros", {"do": "negative zero"}, 0.0, "One zero is 0.0 on rank 0 and -0.0 on the others"),
    ("buffer", "odd", {"do": "another NaN"}, 0.0, "One NaN has other bits than that of the other ranks"),
]


@pytest.mark.needs("test_parameter")
def test_bits(grader: Grader) -> None:
    """compares bits: a bfloat16's last bit, an integer above 2**53, -0.0 and 0.0"""
    random = grader.random("bits")
    changes = [
        what | {"kind": kind, "name": name, "rank": 1, "at": random.randrange(3)} for kind, name, what, *_ in BITS
    ]
    changes.append({"kind": "buffer", "name": "zeros", "rank": 2, "do": "negative zero"} | {"at": changes[-2]["at"]})
    each = without_amount(found(compared(grader, "bits", changes)), "odd")  # of two NaNs nobody knows it
    seen = {one.name for one in each[0]}
    why = next((why for _, name, _, _, why in BITS if name not in seen), "There is a difference")
    if ("zeros", [1, 2]) in [(one.name, one.ranks) for one in each[0]]:
        said = "`zeros` holds a 0.0 on rank 0 and a -0.0 there on ranks 1 and 2: by their bits, these two are the majority. The report blames them."
        grader.fail("blames-the-majority", said, of=[1, 2], at=MAJORITY)
    expected = [Found(kind, name, [0 if name == "zeros" else 1], largest) for kind, name, _, largest, _ in BITS]
    judge(grader, each, expected, ("rounds-bits-away", CHECKSUM, why))
    # 300 and 1, whose difference no bfloat16 can hold; 1e300, which no float32 can hold; beside a NaN and an infinity that
    # all ranks have; a NaN alone.
    pairs = [
        ({"do": do, "rank": 1, "kind": kind, "name": name, "at": at, "by": by}, Found(kind, name, [1], by))
        for do, kind, name, at, by in (
            ("add", "parameter", "brief", random.randrange(5), 299.0),
            ("add", "buffer", "precise", random.randrange(3), 1e300),
            ("add", "buffer", "odd", 2, 0.5),
            ("nan", "buffer", "norm.running_var", random.randrange(3), math.inf),
        )
    ]
    judge_changes(grader, "nan", pairs)
    kinds = {"precise": "a different type", "mask": "a different shape"}
    changes = [{"do": f"same bytes, {one}", "rank": 1, "kind": "buffer", "name": name} for name, one in kinds.items()]
    stored = {"encoder.weight": "stored by columns", "zeros": "a view of a longer tensor"}
    changes += [{"do": how, "rank": 1, "name": name} for name, how in stored.items()]
    each = found(compared(grader, "bytes", changes))
    for one in (one for own in each for one in own if one.name in stored):
        said = f"{one.name} has the same numbers on all ranks (on rank 1 it is {stored[one.name]}), and was reported: {one}."
        grader.fail("false-alarm", said, at=CHECKSUM)
    seen = {one.name for one in each[0]}
    overlooked = [f"Rank 1 has the same bytes with {one}" for name, one in kinds.items() if name not in seen]
    why = (overlooked or ["There is no number for that"])[0]
    expected = [Found("buffer", name, [1], math.inf) for name in kinds]
    judge(grader, each, expected, ("type-or-shape-overlooked", CHECKSUM, why))


@pytest.mark.needs("test_kinds")
def test_missing(grader: Grader) -> None:
    """reports a gradient or a state that only some ranks have"""
    changes: list[Change] = [
        {"do": "drop gradient", "rank": 1, "name": "encoder.bias"},
        {"do": "drop state", "rank": 0, "name": "decoder.weight"},
    ]
    state = [f"decoder.weight.{entry}" for entry in ("step", "exp_avg", "exp_avg_sq")]
    expected = [Found("optimizer", name, [0], math.inf) for name in state]
    expected.insert(0, Found("gradient", "encoder.bias", [1], math.inf))
    why = "Only some ranks have it, and there is no number for how far it is from the others"
    judge(grader, found(compared(grader, "missing", changes)), expected, ("missing-on-some-overlooked", GRADIENTS, why))


@pytest.mark.needs("test_kinds")
def test_hyper_parameters(grader: Grader) -> None:
    """compares the optimizer's hyper-parameters"""
    at, almost = r"param_groups || " + STATE, 0.999 + 1e-12
    options = [
        ("lr", {1: 0.03}, 0.02, "Rank 1 has lr=0.03, the others 0.01"),
        (
            "betas",
            {1: [0.9, 0.95], 2: [0.9, almost]},
            0.049,
            f"On ranks 0, 1 and 2, betas is (0.9, 0.999), (0.9, 0.95) and (0.9, {almost})",
        ),
        ("maximize", {1: True}, 1.0, "Rank 1 has maximize=True, the others False"),
        ("foreach", {1: False}, math.inf, "Rank 1 has foreach=False, the others None"),
    ]
    changes: list[Change] = [
        {"do": "option", "rank": rank, "name": name, "to": to} for name, of, *_ in options for rank, to in of.items()
    ]
    each = found(compared(grader, "options differ", changes))
    judge_agreement(grader, each)
    for name, values, by, why in options:
        told, of = [one for one in each[0] if name in one.name], list(values)
        right = [one for one in told if (one.kind, one.ranks) == ("optimizer", of)]
        rounded = name == "betas" and [one.ranks for one in told] == [[1]]
        blamed = [one.kind for one in told] == ["optimizer"]
        lost = "rounds-bits-away" if rounded else "wrong-ranks" if blamed else "hyper-parameters-not-compared"
        grader.fail_on(of if right != told or len(told) != 1 else (), lost, f"{why}. Found: {say(told)}.", at=at)
        off = not math.isclose(right[0].largest, by, rel_tol=1e-3)
        amount = f"{why}: `largest` should be {by:g}. Found: {say(right)}."
        grader.fail_on(of if off else (), "wrong-amount", amount, at=LARGEST)
    count, counted = add(grader, 2, "optimizer", "scale.count", 1)
    pairs = [
        (changes[0] | {"to": 0.01 + 1e-12}, Found("optimizer", "param_groups[0].lr", [1], 1e-12)),
        (count | {"by": 1}, counted._replace(largest=1.0)),
    ]
    why = "In float32 2**24 + 1 is 2**24, and 0.01 + 1e-12 is 0.01; Python's numbers have more digits"
    judge_changes(grader, "digits", pairs, ("rounds-bits-away", STATE, why))


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
    named = ("parameter", "module.weight", 3), ("parameter", "encoder.weight", 12), ("buffer", "precise", 3)
    pairs = [add(grader, 2, *one) for one in named]
    changes: list[Change] = [{"do": "submodule", "rank": rank} for rank in range(WORLD)]
    changes += [change for change, _ in pairs]
    for wrapped in (True, False):
        run = compared(grader, f"wrapped: {wrapped}", changes, wrapped=wrapped, stepped=False)
        judge(grader, found(run), [expected for _, expected in pairs])


@pytest.mark.needs("test_agree")
def test_cheap(grader: Grader) -> None:
    """costs at most two small collectives when all ranks agree"""
    run = compared(grader, "agree", [])
    for rank in range(WORLD):
        calls = between(run, rank, "begin", "end")
        total = sum(call.nbytes for call in calls)
        said = f"All ranks agreed, and rank {rank} needed {len(calls)} collectives and {total} bytes to see it; two and {BYTES} bytes (64, and 16 for each of {TENSORS} tensors and numbers) are enough."
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
            said = f"optimizer.state had entries for {before} parameters before the call and {after} after it, on rank {rank}. "
            said += "It is a defaultdict: optimizer.state[parameter] makes an entry that was not there."
            grader.fail_on([rank] * (before != after), "changes-what-it-compares", said, at=r"\.state\[ || " + STATE)


@pytest.mark.needs("test_kinds")
def test_watch(grader: Grader) -> None:
    """watches, and keeps the first step at which something differed"""
    first, expected = add(grader, 1, "parameter", "encoder.weight", 12)
    later, _ = add(grader, 2, "parameter", "decoder.weight", 12)
    run = watched(grader, {"3": first, "5": later}, EVERY, STEPS)
    seen = run.observed("seen")
    for rank, step in ((rank, step) for rank in range(WORLD) for step in range(1, STEPS + 1)):
        judge_watch(grader, run, rank, step, *(seen[rank][step - 1] or [None, None])[:2])
    last = [read(own[-1][2]) for own in seen]
    if any(len(one) > 1 for one in last):
        said = f"At step {FIRST} one parameter differed; at step {STEPS} the same report names {len(last[0])} differences. What came later hides what came first."
        grader.fail("not-the-first-step", said, at=WATCH)
    judge(grader, last, [expected])
    steps = {str(step): one for step, one in enumerate(unwanted(grader), 1)}
    run = watched(grader, steps, 1, len(steps), gradients=False, tolerance=TOLERANCE)
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
