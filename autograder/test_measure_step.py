"""What `measure_step` has to do.

    exposed_communication(step, ddp_model, repeats=9, clock=time.perf_counter) -> Measurement
    scaling_efficiency(seconds, mode) -> {ranks: efficiency}
    predict_step(parameters, ranks, bandwidth, latency, compute, buckets=1) -> seconds

Nothing here depends on how fast the machine is. The clock is handed in, and only the scripted steps move it, so that the
right answer is known exactly, and so is what each usual mistake would make of the same steps.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable
from typing import NoReturn

import pytest
import torch

from lockstep.grading import Grader
from lockstep.ranks import Run

WORLD, REPEATS = 2, 5
CLEARING, MEETING = 0.5, 0.25  # as in the scenario
KINDS = ("step", "alone")
NOISE = {"step": [1.9, 1.4, 1.0, 2.3, 1.7], "alone": [1.5, 1.0, 2.2, 1.8, 1.3]}
FIRST = {"step": [5.0, 3.0], "alone": [4.0]}  # how much longer the first steps take

MEASURE = r"def exposed_communication"
CLOCK = r"perf_counter\(|monotonic\(|time\.time\( || clock\( || " + MEASURE
LOOP = r"range\(.*repeats || for .* in range || " + MEASURE
RETURN = r"return Measurement || Measurement\( || " + MEASURE
REDUCE = r"all_reduce\( || all_gather || " + RETURN
CLEAR = r"zero_grad || \.grad = || " + MEASURE
SCALING = r"def scaling_efficiency"
PREDICT = r"def predict_step"

Script = list[dict[str, list[float]]]
Times = dict[str, list[float]]
Pairs = list[tuple[int, float]]


# Exposed communication: the runs -------------------------------------------------------------------------------------


def base(grader: Grader) -> list[dict[str, float]]:
    """Seconds of a step of either kind on each rank. The rank that computes longest is not the last to be done."""
    size = grader.random("seconds").uniform(0.9, 1.1)
    return [{"step": 0.25 * size, "alone": 0.20 * size}, {"step": 0.28 * size, "alone": 0.18 * size}]


def scripts(grader: Grader, noise: bool) -> tuple[Script, Script]:
    """The first steps and the later ones, which repeat, for each rank."""
    first = [{kind: [factor * own[kind] for factor in FIRST[kind]] for kind in KINDS} for own in base(grader)]
    later = [
        {kind: [factor * own[kind] for factor in (NOISE[kind] if noise else [1.0])] for kind in KINDS}
        for own in base(grader)
    ]
    return first, later


def quiet(grader: Grader) -> Run:
    """One repeat, on a machine that does nothing else."""
    first, later = scripts(grader, noise=False)
    return grader.run("measures", WORLD, warm=first, times=later, repeats=1)


def noisy(grader: Grader) -> Run:
    """Several repeats, of which only one of each kind is not disturbed."""
    first, later = scripts(grader, noise=True)
    return grader.run("measures", WORLD, warm=first, times=later, repeats=REPEATS)


def measured(grader: Grader, run: Run, repeats: int, noise: bool) -> list[Times]:
    """By rank and kind: the scripted seconds of the last `repeats` steps that were made."""
    first, later = scripts(grader, noise)
    found = []
    for rank, counts in enumerate(run.observed("counts")):
        times = {}
        for kind in KINDS:
            rounds = counts[kind] // len(later[rank][kind]) + 1
            times[kind] = [*first[rank][kind], *later[rank][kind] * rounds][: counts[kind]][-repeats:]
        found.append(times)
    return found


def near(a: float, b: float) -> bool:
    """Equal but for the rounding of float32."""
    return math.isclose(a, b, rel_tol=1e-3, abs_tol=1e-6)


def milliseconds(seconds: float) -> str:
    """`281.3 ms`."""
    return f"{seconds * 1e3:.1f} ms"


def judge_times(grader: Grader, run: Run, repeats: int, noise: bool) -> None:
    """What every rank returned, against the script; fails with what it is instead."""
    own = base(grader)
    wanted = {kind: max(times[kind] for times in own) for kind in KINDS}
    seen = [dict(zip(KINDS, pair, strict=True)) for pair in zip(*(run.observed(kind) for kind in KINDS), strict=True)]
    wrong = [rank for rank in range(WORLD) if not all(near(seen[rank][kind], wanted[kind]) for kind in KINDS)]
    if not wrong:
        return
    rank = wrong[0]
    got = seen[rank]
    what = (
        f"Rank {rank} returned {milliseconds(got['step'])} for a step with synchronisation and {milliseconds(got['alone'])} "
        f"for one without; by the clock it was given, these are {milliseconds(wanted['step'])} and "
        f"{milliseconds(wanted['alone'])}."
    )

    def is_all(values: Callable[[int, str], float]) -> bool:
        return all(near(seen[r][kind], values(r, kind)) for r in range(WORLD) for kind in KINDS)

    if not run.observed("reads")[rank]:
        grader.fail("ignores-clock", f"{what} That clock was never read.", of=wrong, at=CLOCK)
    if near(got["step"], got["alone"]):
        grader.fail(
            "nothing-exposed",
            f"{what} The two are equal, so that the exposed communication is 0 whatever it costs.",
            of=wrong,
            at=r"no_sync || " + RETURN,
        )
    if near(got["step"], wanted["alone"]) and near(got["alone"], wanted["step"]):
        grader.fail("swapped-kinds", f"{what} The two have changed places.", of=wrong, at=RETURN)
    if is_all(lambda r, kind: own[r][kind]):
        grader.fail(
            "rank-local-time",
            f"{what} It is what rank {rank} saw; a step is over when the slowest rank is done.",
            of=wrong,
            at=RETURN,
        )
    if is_all(lambda r, kind: statistics.mean(times[kind] for times in own)):
        grader.fail("averages-ranks", f"{what} It is the mean over the ranks.", of=wrong, at=REDUCE)
    for extra, said in ((CLEARING, "clearing the gradients"), (MEETING, "the barrier"), (CLEARING + MEETING, "both")):
        if any(near(got[kind] - wanted[kind], extra) for kind in KINDS):
            grader.fail(
                "times-too-much", f"{what} {milliseconds(extra)} more: {said} was timed, too.", of=wrong, at=CLOCK
            )
    for kind in KINDS:
        if any(near(got[kind], factor * wanted[kind]) for factor in FIRST[kind]) and not noise:
            which = "with synchronisation" if kind == "step" else "without"
            grader.fail(
                "counts-warm-up",
                f"{what} It is one of the first two steps {which}, which take longer than all that come after them.",
                of=wrong,
                at=LOOP,
            )
    if noise:
        _explain_noise(grader, run, what, seen, wrong, measured(grader, run, repeats, noise))
    grader.fail("wrong-time", what, of=wrong, at=RETURN)


def _explain_noise(
    grader: Grader, run: Run, what: str, seen: list[dict[str, float]], wrong: list[int], times: list[Times]
) -> None:
    rank = wrong[0]
    slowest = {
        kind: [max(both) for both in zip(*(one[kind] for one in times), strict=True)]
        if len({len(one[kind]) for one in times}) == 1
        else times[rank][kind]
        for kind in KINDS
    }
    others: dict[str, Callable[[Iterable[float]], float]] = {
        "mean": statistics.mean,
        "median": statistics.median,
        "largest": max,
        "last": lambda values: list(values)[-1],
        "first": lambda values: next(iter(values)),
    }
    for said, choose in others.items():
        if any(near(seen[rank][kind], choose(slowest[kind])) for kind in KINDS):
            grader.fail(
                "not-the-minimum",
                f"{what} It is the {said} of {REPEATS}; all but one had been disturbed by something else on the machine.",
                of=wrong,
                at=r"mean || median || sum\( || sorted || " + RETURN,
            )


# The checks of exposed_communication ---------------------------------------------------------------------------------


def test_slowest_rank(grader: Grader) -> None:
    """a step is timed alone, after two to warm up, on the slowest rank"""
    judge_times(grader, quiet(grader), 1, noise=False)


@pytest.mark.needs("test_slowest_rank")
def test_repeats(grader: Grader) -> None:
    """repeats says how many steps of each kind are measured"""
    few, many = quiet(grader), noisy(grader)
    for rank in range(WORLD):
        for kind in KINDS:
            made = [run.observed("counts")[rank][kind] for run in (few, many)]
            if made[1] - made[0] != REPEATS - 1:
                which = "with synchronisation" if kind == "step" else "without"
                grader.fail(
                    "ignores-repeats",
                    f"With repeats=1 rank {rank} made {made[0]} steps {which}, with repeats={REPEATS} it made {made[1]}: "
                    f"{made[1] - made[0]} more instead of {REPEATS - 1}.",
                    of=[rank],
                    at=LOOP,
                )


@pytest.mark.needs("test_repeats")
def test_minimum(grader: Grader) -> None:
    """of the repeats the minimum counts"""
    judge_times(grader, noisy(grader), REPEATS, noise=True)


@pytest.mark.needs("test_repeats")
def test_alternates(grader: Grader) -> None:
    """steps with and without synchronisation alternate"""
    for rank, report in enumerate(noisy(grader).ranks):
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
                f"Rank {rank} made {longest} steps of one kind in a row: {said}. A machine that gets slower meanwhile shows "
                "as communication, or as less than none.",
                of=[rank],
                at=LOOP,
            )


@pytest.mark.needs("test_repeats")
def test_together(grader: Grader) -> None:
    """ranks begin every step together"""
    for rank, report in enumerate(noisy(grader).ranks):
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
                f"Rank {rank} began {len(alone)} of {2 * REPEATS} measured steps without meeting the others, so that a rank "
                "that is ahead measures how long it waits.",
                of=[rank],
                at=r"clock\( || " + MEASURE,
            )


@pytest.mark.needs("test_slowest_rank")
def test_clean_steps(grader: Grader) -> None:
    """every step begins without the gradients of the one before"""
    for rank, dirty in enumerate(noisy(grader).observed("dirty")):
        count = sum(dirty[-2 * REPEATS :])
        if count:
            grader.fail(
                "keeps-gradients",
                f"{count} of the {2 * REPEATS} measured steps on rank {rank} began with gradients of those before, and added "
                "to them.",
                of=[rank],
                at=r"no_sync || " + CLEAR,
            )


@pytest.mark.needs("test_slowest_rank")
def test_leaves_no_trace(grader: Grader) -> None:
    """the model is as it was before"""
    run = quiet(grader)
    for rank in range(WORLD):
        if not run.observed("synchronises")[rank]:
            grader.fail(
                "leaves-sync-off",
                f"On rank {rank} the model no longer synchronises: every step after the measurement would train it alone.",
                of=[rank],
                at=r"require_backward_grad_sync || no_sync || " + MEASURE,
            )
        gradients = run.observed("gradients")[rank]
        bias = gradients["layer.bias"]
        what = ""
        if gradients["layer.weight"] is not None:
            what = "layer.weight.grad was None before and is a tensor now"
        elif bias is None:
            what = "layer.bias.grad was 7 before and is None now"
        elif not torch.equal(bias, torch.full((3,), 7.0)):
            what = f"layer.bias.grad was 7 before and is {bias[0].item():g} now"
        if what:
            grader.fail("leaves-gradients", f"On rank {rank} {what}.", of=[rank], at=CLEAR)
        calls = run.observed("buffers")[rank]["calls"].item()
        if calls:
            grader.fail(
                "leaves-buffers",
                f"The model counts its calls in a buffer. It was 0 before and is {calls:g} on rank {rank} now.",
                of=[rank],
                at=r"buffers\( || state_dict || " + MEASURE,
            )


# Scaling efficiency --------------------------------------------------------------------------------------------------

Efficiency = Callable[[dict[int, float], str], dict[int, float]]


def efficiency(seconds: dict[int, float], mode: str) -> dict[int, float]:
    """Samples per second and rank, against the same on the fewest ranks."""
    fewest = min(seconds)
    share = {n: 1.0 if mode == "weak" else fewest / n for n in seconds}
    return {n: share[n] * seconds[fewest] / seconds[n] for n in seconds}


SLIPS: dict[str, tuple[str, Efficiency]] = {
    "It is the speed-up: what all ranks do together, not what is left of each.": (
        "returns-speedup",
        lambda s, mode: {n: efficiency(s, mode)[n] * n / min(s) for n in s},
    ),
    "It is a percentage, 100 times the fraction.": (
        "returns-percent",
        lambda s, mode: {n: 100 * efficiency(s, mode)[n] for n in s},
    ),
    "Both modes are computed as strong scaling. Where each rank has the same batch as before, the ideal time is the same, "
    "not one n-th of it.": ("ignores-mode", lambda s, mode: efficiency(s, "strong")),
    "Both modes are computed as weak scaling. Where the same batch is shared by more ranks, the time has to go down.": (
        "ignores-mode",
        lambda s, mode: efficiency(s, "weak"),
    ),
    "It was divided by 4, whatever the number of ranks.": (
        "fixed-number-of-ranks",
        lambda s, mode: {n: s[min(s)] / s[n] / 4 for n in s},
    ),
    "It was divided by the number of ranks, though the run it is compared with had more than one as well.": (
        "one-rank-as-base",
        lambda s, mode: {n: s[min(s)] / s[n] / (n if mode == "strong" else 1) for n in s},
    ),
}


def drawn_runs(grader: Grader, counts: list[int]) -> dict[str, dict[int, float]]:
    """Seconds by the number of ranks for both modes; none is perfect."""
    chance = grader.random(f"runs {counts}")
    strong = {n: (chance.uniform(1.0, 1.05) + 0.08 * n) / n for n in counts}
    weak = {n: chance.uniform(1.0, 1.05) + 0.08 * n for n in counts}
    return {"strong": strong, "weak": weak}


def judge_efficiency(grader: Grader, runs: dict[str, dict[int, float]]) -> None:
    """Both modes of one set of runs."""
    pairs = [[[n, t] for n, t in seconds.items()] for seconds in runs.values()]
    run = grader.run("scales", 1, runs=pairs, modes=list(runs))
    found = [{int(n): value for n, value in one} for one in run.observed("found")[0]]
    errors = run.observed("errors")[0]
    for (mode, seconds), seen, error in zip(runs.items(), found, errors, strict=True):
        given = ", ".join(f"{n}: {milliseconds(t)}" for n, t in seconds.items())
        if error:
            id = "needs-one-rank" if error.startswith("KeyError") and 1 not in seconds else "wrong-efficiency"
            grader.fail(
                id,
                f"With the seconds {{{given}}} and mode {mode!r} it raised {error}.",
                at=r"base = 1 || seconds\[1\] || " + SCALING,
            )
        wanted = efficiency(seconds, mode)
        if set(seen) == set(wanted) and all(near(seen[n], wanted[n]) for n in wanted):
            continue
        most = max(seconds)
        now = f"{seen[most]:.3g}" if most in seen else "nothing"
        what = (
            f"With the seconds {{{given}}} and mode {mode!r} it returned {now} for {most} ranks; each rank still does "
            f"{wanted[most]:.3g} of the samples per second that one does in the run on the fewest."
        )
        for said, (id, slip) in SLIPS.items():
            if all(
                set(other) == set(seconds_) and all(near(other[n], slip(seconds_, mode_)[n]) for n in other)
                for other, (mode_, seconds_) in zip(found, runs.items(), strict=True)
            ):
                grader.fail(id, f"{what} {said}", at=SCALING)
        grader.fail("wrong-efficiency", what, at=SCALING)


def test_efficiency(grader: Grader) -> None:
    """efficiency is samples per second per rank, whether the batch is shared or grows with the ranks"""
    judge_efficiency(grader, drawn_runs(grader, [1, 2, 3, 8]))


@pytest.mark.needs("test_efficiency")
def test_fewest_ranks(grader: Grader) -> None:
    """the run on the fewest ranks is the base, also when none was on a single one"""
    judge_efficiency(grader, drawn_runs(grader, [8, 2, 6]))


@pytest.mark.needs("test_efficiency")
def test_refuses(grader: Grader) -> None:
    """what has no efficiency raises ValueError"""
    runs: dict[str, tuple[Pairs, str]] = {
        "mode 'linear'": ([(1, 1.0), (2, 1.0)], "linear"),
        "no run": ([], "weak"),
        "a time of 0 seconds": ([(1, 1.0), (2, 0.0)], "strong"),
        "a negative time": ([(1, 1.0), (2, -1.0)], "weak"),
    }
    run = grader.run(
        "scales",
        1,
        runs=[[list(pair) for pair in pairs] for pairs, _ in runs.values()],
        modes=[m for _, m in runs.values()],
    )
    for said, error, found in zip(runs, run.observed("errors")[0], run.observed("found")[0], strict=True):
        if not error.startswith("ValueError"):
            now = f"it raised {error}" if error else f"it returned {dict(map(tuple, found))}"
            grader.fail("accepts-nonsense", f"With {said} {now}; ValueError was expected.", at=r"raise || " + SCALING)


# The cost model ------------------------------------------------------------------------------------------------------

Case = dict[str, float]
Model = Callable[..., float]


def ring(
    parameters: float,
    ranks: float,
    bandwidth: float,
    latency: float,
    compute: float,
    buckets: float = 1,
    *,
    size: float = 4,
    rounds: float = 2,
    share: bool = True,
    delay: str = "round",
    backward: float = 2 / 3,
    hidden: str = "until complete",
) -> float:
    """The model, and by its last arguments what the usual mistakes make of it."""
    number = rounds * (ranks - 1)
    whole = size * parameters / bandwidth / buckets
    seconds = number * whole / ranks if share else rounds * whole
    delays = {"round": number * latency, "once": latency, "none": 0.0, "step": number * latency / buckets}[delay]
    travel = seconds + delays
    if hidden == "nothing":
        return compute + buckets * travel
    if hidden == "everything":
        return max(compute, buckets * travel)
    if hidden == "backward":
        return (1 - backward) * compute + max(backward * compute, buckets * travel)
    if hidden == "from the first":
        start = (1 - backward) * compute + backward * compute / buckets
        return max(compute, start + buckets * travel)
    arrived = 0.0
    for bucket in range(1, int(buckets) + 1):
        arrived = max(arrived, (1 - backward + backward * bucket / buckets) * compute) + travel
    return arrived


def changed(**options: object) -> Model:
    """The model with a mistake."""
    return lambda **case: ring(**case, **options)  # type: ignore[arg-type]


GUESSES: dict[str, tuple[str, Model]] = {
    "That counts a byte for each parameter; a float32 has four.": ("counts-elements", changed(size=1)),
    "That counts bits; the bandwidth is in bytes per second.": ("counts-bits", changed(size=32)),
    "That is N-1 rounds: the sums are there, each on one rank, and have not come back to all of them.": (
        "half-a-ring",
        changed(rounds=1),
    ),
    "That is the whole of the gradients twice; a rank sends N-1 of their N chunks, twice.": (
        "ignores-ring-share",
        changed(share=False),
    ),
    "That sends all gradients in each round; in a ring a round moves one N-th of them.": (
        "whole-tensor-each-round",
        lambda **case: ring(**{**case, "parameters": case["parameters"] * case["ranks"]}),
    ),
    "That leaves out the latency.": ("too-little-latency", changed(delay="none")),
    "That has one latency for each bucket; each of the 2(N-1) rounds has one.": (
        "too-little-latency",
        changed(delay="once"),
    ),
    "That has the latency of a single bucket's rounds for all of them.": ("too-little-latency", changed(delay="step")),
    "That hides all communication behind computing, or all computing behind communication.": (
        "hides-everything",
        changed(hidden="everything"),
    ),
    "That is backward or communication, whichever is longer; the last bucket is complete only when backward is over.": (
        "hides-everything",
        changed(hidden="backward"),
    ),
    "That lets all buckets travel from when the first is complete, and forgets that the last one cannot yet.": (
        "hides-everything",
        changed(hidden="from the first"),
    ),
    "That hides nothing: the first buckets travel while backward goes on.": (
        "hides-nothing",
        changed(hidden="nothing"),
    ),
    "That begins to send while forward still computes; no gradient is known before backward.": (
        "hides-behind-forward",
        changed(backward=1.0),
    ),
    "That divides the computing time by the number of ranks, though it was said to be that of one rank.": (
        "divides-compute",
        lambda **case: ring(**{**case, "compute": case["compute"] / case["ranks"]}),
    ),
}


def judge_prediction(grader: Grader, cases: list[Case]) -> None:
    """All cases; a mistake is named when it gives the submission's own numbers in each of them."""
    found = grader.run("predicts", 1, cases=cases).observed("found")[0]
    wrong = [number for number, case in enumerate(cases) if not near(found[number], ring(**case))]
    if not wrong:
        return
    case = cases[wrong[0]]
    given = ", ".join(f"{name}={value:.4g}" for name, value in case.items())
    what = (
        f"predict_step({given}) is {milliseconds(found[wrong[0]])}; the model gives {milliseconds(ring(**case))}, "
        f"{milliseconds(ring(**case) - case['compute'])} of which are communication that is not hidden."
    )
    for said, (id, model) in GUESSES.items():
        if all(near(seen, model(**one)) for seen, one in zip(found, cases, strict=True)):
            _fail_prediction(grader, id, f"{what} {said}")
    _fail_prediction(grader, "wrong-prediction", what)


def _fail_prediction(grader: Grader, id: str, message: str) -> NoReturn:
    grader.fail(id, message, at=PREDICT)


def drawn_cases(grader: Grader, buckets: list[int]) -> list[Case]:
    """Cases in which bandwidth, latency or computing takes longest, on several numbers of ranks."""
    chance = grader.random(f"cases {buckets}")
    cases: list[Case] = []
    for ranks in (2, 3, 8):
        for communication, rounds in ((2.0, 0.1), (0.3, 0.1), (0.5, 1.2)):
            compute = chance.uniform(0.05, 0.4)
            parameters = chance.randrange(1, 40) * 100_000
            case: Case = {
                "parameters": parameters,
                "ranks": ranks,
                "bandwidth": 8 * parameters * (ranks - 1) / ranks / (communication * compute),
                "latency": rounds * compute / (2 * (ranks - 1)) / max(buckets),
                "compute": compute,
            }
            if buckets != [1]:
                case["buckets"] = chance.choice(buckets)
            cases.append(case)
    return cases


def test_one_bucket(grader: Grader) -> None:
    """a step with one bucket is predicted: computing, then a ring all-reduce"""
    judge_prediction(grader, drawn_cases(grader, [1]))


@pytest.mark.needs("test_one_bucket")
def test_buckets(grader: Grader) -> None:
    """several buckets travel while backward goes on, but the last"""
    judge_prediction(grader, drawn_cases(grader, [2, 4, 5]))


@pytest.mark.needs("test_one_bucket")
def test_one_rank(grader: Grader) -> None:
    """one rank alone sends nothing"""
    case: Case = {"parameters": 10**6, "ranks": 1, "bandwidth": 1e8, "latency": 1e-3, "compute": 0.1}
    (seen,) = grader.run("predicts", 1, cases=[case]).observed("found")[0]
    if not near(seen, case["compute"]):
        _fail_prediction(
            grader,
            "one-rank-communicates",
            f"On one rank a step of 100 ms is predicted to take {milliseconds(seen)}; there is nobody to send anything to.",
        )
