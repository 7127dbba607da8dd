"""What `measure_step` has to do.

    exposed_communication(step, ddp_model, repeats=9, clock=time.perf_counter) -> Measurement
    scaling_efficiency(seconds, mode) -> {ranks: efficiency}
    predict_step(parameters, ranks, bandwidth, latency, compute, buckets=1) -> seconds

Nothing here depends on how fast the machine is. The clock is handed in, and only the scripted steps move it, so that
the right answer is known exactly, and so is what each usual mistake would make of the same steps.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable

import pytest
from judging.measure_step import (
    CLEARING,
    FIRST,
    KINDS,
    MEETING,
    REPEATS,
    WORLD,
    Case,
    Measured,
    Model,
    Seconds,
    changed,
    drawn_cases,
    drawn_runs,
    efficiency,
    noisy,
    quiet,
    ring,
)  # fmt: skip

from lockstep.grading import Each, Grader, Hypothesis, Tolerance, equal, fitting, wrong_ranks

MEASURE = r"def exposed_communication"
CLOCK = r"perf_counter\(|monotonic\(|time\.time\( || clock\( || " + MEASURE
LOOP = r"range\(.*repeats || for .* in range || " + MEASURE
RETURN = r"return Measurement || Measurement\( || " + MEASURE
REDUCE = r"all_reduce\( || all_gather || " + RETURN
CLEAR = r"zero_grad || \.grad = || " + MEASURE
MEAN = r"mean || median || sum\( || sorted || " + RETURN
SCALING = r"def scaling_efficiency"
PREDICT = r"def predict_step"

CLOSE = Tolerance(1e-3, 1e-6)
EXACT = Tolerance(1e-5, 1e-6)  # of a scripted clock; wider, two mistakes agree by chance in one draw of a hundred
WITH = {"step": "with synchronization", "alone": "without"}


def milliseconds(seconds: float) -> str:
    """`281.3 ms`."""
    return f"{seconds * 1e3:.1f} ms"


# Exposed communication -----------------------------------------------------------------------------------------------


def times_of_mistakes(measured: Measured) -> list[Hypothesis]:
    """What the usual mistakes return."""
    right, own, seen = measured.right, measured.own, measured.seen

    def on_some(change: Callable[[str], float]) -> list[dict[str, float]]:
        """This in place of the right seconds: for both kinds, and for one of them."""
        return [right | {kind: change(kind) for kind in kinds} for kinds in (KINDS, KINDS[:1], KINDS[1:])]

    average = {kind: statistics.mean(times[kind] for times in own) for kind in KINDS}
    fastest = {kind: min(times[kind] for times in own) for kind in KINDS}
    equal_ = "The two are equal, so the exposed communication is always 0."
    too_much = ((CLEARING, "clearing the gradients"), (MEETING, "the barrier"), (CLEARING + MEETING, "both"))
    slow_start = [dict(zip(KINDS, (right["step"] * a, right["alone"] * b), strict=True))
                  for a, b in itertools.product((1.0, *FIRST["step"]), (1.0, *FIRST["alone"]))]  # fmt: skip
    found = [
        Hypothesis("wrong-time", "The clock is at 20,000,000 s, where float32 counts in steps of 2 s: the readings were stored as float32.",
                   Each([{kind: one[kind] // 2 * 2 for kind in KINDS} for one in seen]), CLOCK),
        Hypothesis("nothing-exposed", equal_, Each([dict.fromkeys(KINDS, one["step"]) for one in seen]), r"no_sync || " + RETURN),
        Hypothesis("swapped-kinds", "The two are swapped.", {"step": right["alone"], "alone": right["step"]}, RETURN),
        Hypothesis("rank-local-time", "It is what the rank itself saw; a step is over when the slowest rank is done.", Each(own), RETURN),
        *(Hypothesis("rank-local-time", f"The time {WITH[kind]} is what the rank itself saw; a step is over when the slowest rank is done.",
                     Each([right | {kind: one[kind]} for one in own]), RETURN) for kind in KINDS),
        Hypothesis("averages-ranks", "It is the mean over the ranks.", average, REDUCE),
        Hypothesis("wrong-time", "It is the sum over the ranks.", {kind: WORLD * average[kind] for kind in KINDS}, REDUCE),
        Hypothesis("wrong-time", "It is the fastest rank's; a step is over when the slowest rank is done.", fastest, REDUCE),
        *(Hypothesis("times-too-much", f"{milliseconds(extra)} more: {said} was timed, too.", predicted, CLOCK)
          for extra, said in too_much for predicted in on_some(lambda kind, extra=extra: right[kind] + extra)),
    ]  # fmt: skip
    if measured.repeats == 1:
        says = "It is one of the first two steps of its kind, which take longer than all that come after them."
        return found + [Hypothesis("counts-warm-up", says, predicted, LOOP) for predicted in slow_start]
    slowest = measured.slowest()
    of_all: dict[str, Callable[[list[float]], float]] = {
        "mean": statistics.mean, "median": statistics.median, "largest": max, "last": lambda v: v[-1], "first": lambda v: v[0],
    }  # fmt: skip
    pairs = [dict(zip(KINDS, pair, strict=True)) for pair in zip(*(slowest[kind] for kind in KINDS), strict=True)]
    found += [
        Hypothesis("not-the-minimum", f"Both are of the repeat whose step {WITH[kind]} was the shortest; each kind has its own minimum.",
                   min(pairs, key=lambda pair, kind=kind: pair[kind]), MEAN) for kind in KINDS if pairs
    ]  # fmt: skip
    says = f"It is the {{}} of {REPEATS}; all but one had been disturbed by something else on the machine."
    return found + [
        Hypothesis("not-the-minimum", says.format(said), predicted, MEAN)
        for said, choose in of_all.items()
        for predicted in on_some(lambda kind, choose=choose: choose(slowest[kind]))
    ]


def judge_times(grader: Grader, measured: Measured) -> None:
    """What every rank returned, against the script; fails with what it is instead."""
    right, seen = measured.right, measured.seen
    wrong = wrong_ranks(seen, right, EXACT)
    if not wrong:
        return
    got = seen[wrong[0]]
    what = (
        f"Rank {wrong[0]} returned {milliseconds(got['step'])} for a step with synchronization and {milliseconds(got['alone'])} "
        f"for one without; by the clock it was given, these are {milliseconds(right['step'])} and {milliseconds(right['alone'])}."
    )
    if not measured.run.observed("reads")[wrong[0]]:
        grader.fail("ignores-clock", f"{what} That clock was never read.", of=wrong, at=CLOCK)
    why = fitting(seen, times_of_mistakes(measured), EXACT, wrong) or Hypothesis("wrong-time", "", None, RETURN)
    grader.fail(why.id, f"{what} {why.says}".rstrip(), of=wrong, at=why.at)


def test_slowest_rank(grader: Grader) -> None:
    """a step is timed alone, after two to warm up, on the slowest rank"""
    judge_times(grader, quiet(grader))


@pytest.mark.needs("test_slowest_rank")
def test_repeats(grader: Grader) -> None:
    """repeats says how many steps of each kind are measured"""
    few, many = quiet(grader).run.observed("counts"), noisy(grader).run.observed("counts")
    for rank, kind in itertools.product(range(WORLD), KINDS):
        less, more = few[rank][kind], many[rank][kind]
        said = (
            f"With repeats=1 rank {rank} made {less} steps {WITH[kind]}, with repeats left at {REPEATS} it made {more}: "
            f"{more - less} more instead of {REPEATS - 1}."
        )
        grader.fail_on([rank] if more - less != REPEATS - 1 else [], "ignores-repeats", said, at=LOOP)
        again = quiet(grader).run.observed("counts again")[rank][kind]
        said = f"In a second call for the same model, with repeats=1, rank {rank} made {again} step{'s' * (again != 1)} {WITH[kind]}, where two to warm up and one to measure make 3."
        grader.fail_on([rank] if again < 3 else [], "counts-warm-up", said, at=r"warm || " + LOOP)


@pytest.mark.needs("test_repeats")
def test_minimum(grader: Grader) -> None:
    """returns the minimum over the repeats"""
    judge_times(grader, noisy(grader))


@pytest.mark.needs("test_repeats")
def test_alternates(grader: Grader) -> None:
    """steps with and without synchronization alternate"""
    for rank, report in enumerate(noisy(grader).run.ranks):
        kinds = [mark.name for mark in sorted(report.marks, key=lambda mark: mark.number) if mark.name in KINDS]
        counted = kinds[-2 * REPEATS :]
        run = longest = 1
        for before, after in itertools.pairwise(counted):
            run = run + 1 if before == after else 1
            longest = max(longest, run)
        if longest > 2:
            said = " ".join("with" if kind == "step" else "without" for kind in counted)
            grader.fail(
                "not-alternating",
                f"Rank {rank} made {longest} steps of one kind in a row: {said}. If the machine slows down meanwhile, that "
                "looks like communication, or like negative communication.",
                of=[rank],
                at=LOOP,
            )


@pytest.mark.needs("test_repeats")
def test_together(grader: Grader) -> None:
    """the ranks start every step together"""
    for rank, report in enumerate(noisy(grader).run.ranks):
        marks = sorted(report.marks, key=lambda mark: mark.number)
        begins = [mark.number for mark in marks if mark.name in KINDS]
        ends = [0, *(mark.number for mark in marks if mark.name == "done")]
        alone = [
            number
            for number, (end, begin) in enumerate(zip(ends, begins, strict=False))
            if not any(end < call.number < begin for call in report.collectives)
        ]
        alone = [number for number in alone if number >= len(begins) - 2 * REPEATS]
        if alone:
            grader.fail(
                "begins-alone",
                f"Rank {rank} started {len(alone)} of {2 * REPEATS} measured steps without waiting for the others, so that a rank "
                "that is ahead measures how long it waits.",
                of=[rank],
                at=r"clock\( || " + MEASURE,
            )


@pytest.mark.needs("test_slowest_rank")
def test_clean_steps(grader: Grader) -> None:
    """every step starts without the gradients of the one before"""
    for rank, dirty in enumerate(noisy(grader).run.observed("dirty")):
        count = sum(dirty[-2 * REPEATS :])
        if count:
            grader.fail(
                "keeps-gradients",
                f"{count} of the {2 * REPEATS} measured steps on rank {rank} started with gradients of those before, and added "
                "to them.",
                of=[rank],
                at=r"no_sync || " + CLEAR,
            )
        if dirty[0]:
            said = f"The first warm-up step on rank {rank} started with the gradients that the caller had left, and added to them."
            grader.fail("keeps-gradients", said, of=[rank], at=CLEAR)


@pytest.mark.needs("test_slowest_rank")
def test_leaves_no_trace(grader: Grader) -> None:
    """the model is as it was before"""
    run = quiet(grader).run
    for rank in range(WORLD):
        if not run.observed("synchronizes")[rank]:
            grader.fail(
                "leaves-sync-off",
                f"On rank {rank} the model no longer synchronizes: every step after the measurement would train it alone.",
                of=[rank],
                at=r"require_backward_grad_sync || no_sync || " + MEASURE,
            )
        gradients = run.observed("gradients")[rank]
        what = ""
        if gradients["layer.weight"] is not None:
            what = "layer.weight.grad was None before and is a tensor now"
        for name, of in {"unused": "the gradient of the frozen parameter", "layer.bias": "layer.bias.grad"}.items():
            now = gradients[name]
            if now is None or not bool((now == 7).all()):
                what = f"{of} was 7 before and is {None if now is None else f'{now[0].item():g}'} now"
        if what:
            grader.fail("leaves-gradients", f"On rank {rank} {what}.", of=[rank], at=CLEAR)
        for name, buffer in run.observed("buffers")[rank].items():
            special = {"unsaved": "with persistent=False", "replaced": "that each forward replaces with a new tensor"}
            kind = special.get(name, f"of type {str(buffer.dtype).removeprefix('torch.')}")
            said = f"The model counts its calls in a buffer {kind}. It was 5 before and is {buffer.item():g} on rank {rank} now."
            wrong = [rank] if buffer.item() != 5 else []
            grader.fail_on(wrong, "leaves-buffers", said, at=r"buffers\( || state_dict || " + MEASURE)


# Scaling efficiency --------------------------------------------------------------------------------------------------

SLIPS: list[tuple[str, str, Callable[[Seconds, str], Seconds]]] = [
    ("returns-speedup", "It is the speed-up of all ranks together, not the efficiency of each.",
     lambda s, mode: {n: efficiency(s, mode)[n] * n / min(s) for n in s}),
    ("returns-percent", "It is a percentage, 100 times the fraction.", lambda s, mode: {n: 100 * efficiency(s, mode)[n] for n in s}),
    ("ignores-mode", "Both modes are computed as strong scaling. Where each rank has the same batch as before, the ideal time is the same, "
     "not one n-th of it.", lambda s, mode: efficiency(s, "strong")),
    ("ignores-mode", "Both modes are computed as weak scaling. Where the same batch is shared by more ranks, the time should go down.",
     lambda s, mode: efficiency(s, "weak")),
    ("fixed-number-of-ranks", "It was divided by 4, whatever the number of ranks.", lambda s, mode: {n: s[min(s)] / s[n] / 4 for n in s}),
    ("one-rank-as-base", "It was divided by the number of ranks, although the base run had more than one rank as well.",
     lambda s, mode: {n: s[min(s)] / s[n] / (n if mode == "strong" else 1) for n in s}),
    ("wrong-efficiency", "It is the inverse: the ratio is upside down.", lambda s, mode: {n: 1 / efficiency(s, mode)[n] for n in s}),
    ("wrong-efficiency", "It is compared with the run on the most ranks; the run on the fewest is the base.",
     lambda s, mode: {n: efficiency(s, mode)[n] / efficiency(s, mode)[max(s)] for n in s}),
    ("wrong-efficiency", "It is compared with the first run in the mapping; the run on the fewest ranks is the base.",
     lambda s, mode: {n: efficiency(s, mode)[n] / efficiency(s, mode)[next(iter(s))] for n in s}),
    ("wrong-efficiency", "It is compared with the last run in the mapping; the run on the fewest ranks is the base.",
     lambda s, mode: {n: efficiency(s, mode)[n] / efficiency(s, mode)[[*s][-1]] for n in s}),
]  # fmt: skip


def judge_efficiency(grader: Grader, runs: list[tuple[str, Seconds]]) -> None:
    """All of these runs; a mistake is named when it gives the submission's own numbers in each of them."""
    run = grader.run("scales", 1, runs=[list(map(list, s.items())) for _, s in runs], modes=[mode for mode, _ in runs])
    found = [{int(n): value for n, value in one} for one in run.observed("found")[0]]
    right = [efficiency(seconds, mode) for mode, seconds in runs]
    mistakes = [Hypothesis(id, says, [slip(s, mode) for mode, s in runs], SCALING) for id, says, slip in SLIPS]
    for (mode, seconds), seen, wanted, error in zip(runs, found, right, run.observed("errors")[0], strict=True):
        with_ = f"With the seconds {{{', '.join(f'{n}: {milliseconds(t)}' for n, t in seconds.items())}}} and mode {mode!r} it"
        if error:
            id = "needs-one-rank" if error.startswith("KeyError") and 1 not in seconds else "wrong-efficiency"
            grader.fail(id, f"{with_} raised {error}.", at=r"base = 1 || seconds\[1\] || " + SCALING)
        if equal(seen, wanted, CLOSE):
            continue
        most = max(seconds)
        what = (
            f"{with_} returned {f'{seen[most]:.3g}' if most in seen else 'nothing'} for {most} ranks; each rank still does "
            f"{wanted[most]:.3g} of the samples per second that one does in the run on the fewest."
        )
        why = fitting([found], mistakes, CLOSE) or Hypothesis("wrong-efficiency", "", None)
        grader.fail(why.id, f"{what} {why.says}".rstrip(), at=SCALING)


def test_efficiency(grader: Grader) -> None:
    """efficiency is samples per second per rank, whether the batch is shared or grows with the ranks"""
    judge_efficiency(grader, drawn_runs(grader, [1, 2, 3, 8]))


@pytest.mark.needs("test_efficiency")
def test_fewest_ranks(grader: Grader) -> None:
    """the run on the fewest ranks is the baseline, even without a run on one rank"""
    judge_efficiency(grader, [*drawn_runs(grader, [6, 2, 8, 3]), *drawn_runs(grader, [4])])


REFUSED: dict[str, tuple[list[list[float]], str]] = {
    "mode 'linear'": ([[1, 1.0], [2, 1.0]], "linear"),
    "mode '' and a single run": ([[1, 1.0]], ""),
    "no run": ([], "weak"),
    "a time of 0 seconds": ([[1, 1.0], [2, 0.0]], "strong"),
    "0 seconds on the fewest ranks": ([[1, 0.0], [2, 1.0]], "strong"),
    "a negative time": ([[1, 1.0], [2, -1.0]], "weak"),
    "times of -1 s and -2 s": ([[1, -1.0], [2, -2.0]], "strong"),
}


@pytest.mark.needs("test_efficiency")
def test_refuses(grader: Grader) -> None:
    """input that has no efficiency raises ValueError"""
    run = grader.run(
        "scales", 1, runs=[runs for runs, _ in REFUSED.values()], modes=[mode for _, mode in REFUSED.values()]
    )
    for said, error, found in zip(REFUSED, run.observed("errors")[0], run.observed("found")[0], strict=True):
        if not error.startswith("ValueError"):
            now = f"it raised {error}" if error else f"it returned {dict(map(tuple, found))}"
            grader.fail("accepts-nonsense", f"With {said} {now}; expected ValueError.", at=r"raise || " + SCALING)


# The cost model ------------------------------------------------------------------------------------------------------

GUESSES: list[tuple[str, str, Model]] = [
    ("counts-elements", "That counts a byte for each parameter; a float32 has four.", changed(size=1)),
    ("counts-bits", "That counts bits; the bandwidth is in bytes per second.", changed(size=32)),
    ("half-a-ring", "That is N-1 rounds: each sum is complete on one rank, but has not been sent back to the others.", changed(rounds=1)),
    ("ignores-ring-share", "That is the whole of the gradients twice; a rank sends N-1 of their N chunks, twice.", changed(share=False)),
    ("whole-tensor-each-round", "That sends all gradients in each round; in a ring a round moves one N-th of them.", lambda **case: ring(**{**case, "parameters": case["parameters"] * case["ranks"]})),
    ("too-little-latency", "That leaves out the latency.", changed(delay="none")),
    ("too-little-latency", "That has one latency for each bucket; each of the 2(N-1) rounds has one.", changed(delay="once")),
    ("too-little-latency", "That has one latency for each of the two phases; each of the 2(N-1) rounds has one.", changed(delay="phase")),
    ("too-little-latency", "That has the latency of a single bucket's rounds for all of them.", changed(delay="step")),
    ("hides-everything", "That hides all communication behind computing, or all computing behind communication.", changed(hidden="everything")),
    ("hides-everything", "That is backward or communication, whichever is longer; the last bucket is complete only when backward is over.", changed(hidden="backward")),
    ("hides-everything", "That lets all buckets travel from when the first is complete, although the later ones are not complete yet.", changed(hidden="from the first")),
    ("hides-everything", "That lets each bucket leave when it is complete, even if the bucket before it has not arrived.", changed(hidden="no queue")),
    *(("hides-everything", "That lets the i-th bucket leave when (i-1)/B of backward is done; it is complete at i/B.", changed(hidden=hidden))
      for hidden in ("one early", "one early, but for the last")),
    ("hides-nothing", "That hides nothing: the first buckets travel while backward continues.", changed(hidden="nothing")),
    ("hides-behind-forward", "That starts to send during forward; gradients exist only from backward on.", changed(backward=1.0)),
    ("wrong-prediction", "That rounds a bucket down to whole elements, so the rest is never sent.",
     lambda **case: ring(**{**case, "parameters": case["parameters"] // case.get("buckets", 1) * case.get("buckets", 1)})),
    ("divides-compute", "That divides the computing time by the number of ranks, although it is the time of one rank.", lambda **case: ring(**{**case, "compute": case["compute"] / case["ranks"]})),
]  # fmt: skip


def judge_prediction(grader: Grader, cases: list[Case]) -> None:
    """All cases; a mistake is named when it gives the submission's own numbers in each of them."""
    found = grader.run("predicts", 1, cases=cases).observed("found")[0]
    right = [ring(**case) for case in cases]
    wrong = wrong_ranks(found, Each(right), CLOSE)
    if not wrong:
        return
    case, wanted = cases[wrong[0]], right[wrong[0]]
    what = (
        f"predict_step({', '.join(f'{name}={value:.4g}' for name, value in case.items())}) is {milliseconds(found[wrong[0]])}; "
        f"the model gives {milliseconds(wanted)}, {milliseconds(wanted - case['compute'])} of which are communication that is "
        "not hidden."
    )
    mistakes = [Hypothesis(id, says, Each([model(**one) for one in cases])) for id, says, model in GUESSES]
    why = fitting(found, mistakes, CLOSE) or Hypothesis("wrong-prediction", "", None)
    grader.fail(why.id, f"{what} {why.says}".rstrip(), at=PREDICT)


def test_one_bucket(grader: Grader) -> None:
    """a step with one bucket is predicted: computing, then a ring all-reduce"""
    judge_prediction(grader, drawn_cases(grader, [1]))


@pytest.mark.needs("test_one_bucket")
def test_buckets(grader: Grader) -> None:
    """several buckets travel during backward, but the last does not"""
    judge_prediction(grader, drawn_cases(grader, [2, 4, 5]))


@pytest.mark.needs("test_one_bucket")
def test_one_rank(grader: Grader) -> None:
    """one rank alone sends nothing"""
    case: Case = {"parameters": 10**6, "ranks": 1, "bandwidth": 1e8, "latency": 1e-3, "compute": 0.1}
    for seen in grader.run("predicts", 1, cases=[case, case | {"buckets": 4}]).observed("found")[0]:
        if not equal(seen, 0.1, CLOSE):
            said = f"On one rank a step of 100 ms is predicted to take {milliseconds(seen)}; there is no other rank to send to."
            grader.fail("one-rank-communicates", said, at=PREDICT)
