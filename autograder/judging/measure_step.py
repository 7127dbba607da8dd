"""What `measure_step` must return: the scripted clock's seconds, efficiencies, and the cost model with its mistakes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lockstep.grading import Grader, Run

WORLD, REPEATS = 3, 9  # repeats: the default
CLEARING, MEETING = 0.5, 0.25  # as in the scenario
KINDS = ("step", "alone")
NOISE = {
    "step": [1.9, 1.4, 1.0, 2.3, 1.7, 2.1, 1.6, 2.7, 1.8],
    "alone": [1.3, 1.5, 2.2, 1.6, 1.8, 1.0, 2.4, 1.7, 1.4],
}  # the two minima are not of the same repeat
FIRST = {"step": [5.0, 3.0], "alone": [4.0, 2.5]}  # how much longer the first steps take

Times = dict[str, list[float]]
Seconds = dict[int, float]
Case = dict[str, float]
Model = Callable[..., float]


# Exposed communication -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """A run of `exposed_communication` whose steps took scripted times: `first` ones, then `later` ones in turn."""

    run: Run
    own: list[dict[str, float]]
    first: list[Times]
    later: list[Times]
    repeats: int

    @property
    def seen(self) -> list[dict[str, float]]:
        """What each rank returned."""
        columns = (self.run.observed(kind) for kind in KINDS)
        return [dict(zip(KINDS, pair, strict=True)) for pair in zip(*columns, strict=True)]

    @property
    def right(self) -> dict[str, float]:
        """The seconds of a step that nothing disturbs, on the slowest rank."""
        return {kind: max(times[kind] for times in self.own) for kind in KINDS}

    def slowest(self) -> Times:
        """By kind: the seconds on the slowest rank of the last `repeats` steps that were made."""
        found: dict[str, list[list[float]]] = {kind: [] for kind in KINDS}
        for rank, counts in enumerate(self.run.observed("counts")):
            for kind in KINDS:
                rounds = counts[kind] // len(self.later[rank][kind]) + 1
                made = [*self.first[rank][kind], *self.later[rank][kind] * rounds][: counts[kind]]
                found[kind].append(made[-self.repeats :])
        return {kind: [max(of_ranks) for of_ranks in zip(*times, strict=False)] for kind, times in found.items()}


def measure(grader: Grader, repeats: int, noise: Times) -> Measured:
    """Let it measure steps of which each takes `noise` times the seconds of a quiet one."""
    size = grader.random("seconds").uniform(0.9, 1.1)
    # The rank that computes longest is not the last to be done.
    quiet = [{"step": 0.25, "alone": 0.20}, {"step": 0.28, "alone": 0.18}, {"step": 0.26, "alone": 0.16}]
    own = [{kind: seconds * size for kind, seconds in times.items()} for times in quiet]
    first, later = (
        [{k: [f * times[k] for f in factors[k]] for k in KINDS} for times in own] for factors in (FIRST, noise)
    )
    asked = {} if repeats == REPEATS else {"repeats": repeats}
    run = grader.run("measures", WORLD, warm=first, times=later, options=asked)
    return Measured(run, own, first, later, repeats)


def quiet(grader: Grader) -> Measured:
    """One repeat, on a machine that does nothing else."""
    return measure(grader, 1, {kind: [1.0] for kind in KINDS})


def noisy(grader: Grader) -> Measured:
    """As many repeats as the default says, of which only one of each kind is not disturbed."""
    return measure(grader, REPEATS, NOISE)


# Scaling efficiency --------------------------------------------------------------------------------------------------


def efficiency(seconds: Seconds, mode: str) -> Seconds:
    """Samples per second and rank, against the same on the fewest ranks."""
    fewest = min(seconds)
    share = {n: 1.0 if mode == "weak" else fewest / n for n in seconds}
    return {n: share[n] * seconds[fewest] / seconds[n] for n in seconds}


def drawn_runs(grader: Grader, counts: list[int]) -> list[tuple[str, Seconds]]:
    """Seconds by the number of ranks for both modes; none is perfect."""
    chance = grader.random(f"runs {counts}")
    strong = {n: (chance.uniform(1.0, 1.05) + 0.08 * n) / n for n in counts}
    weak = {n: chance.uniform(1.0, 1.05) + 0.08 * n for n in counts}
    return [("strong", strong), ("weak", weak)]


# The cost model ------------------------------------------------------------------------------------------------------


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
    delays = {"round": number, "once": 1, "phase": 2, "none": 0, "step": number / buckets}
    travel = seconds + delays[delay] * latency
    if hidden == "nothing":
        return compute + buckets * travel
    if hidden == "everything":
        return max(compute, buckets * travel)
    if hidden == "backward":
        return (1 - backward) * compute + max(backward * compute, buckets * travel)
    if hidden == "from the first":
        start = (1 - backward) * compute + backward * compute / buckets
        return max(compute, start + buckets * travel)
    if hidden == "no queue":
        return compute + travel
    arrived = 0.0
    for bucket in range(1, int(buckets) + 1):
        early = hidden == "one early" or (hidden == "one early, but for the last" and bucket < buckets)
        arrived = max(arrived, (1 - backward + backward * (bucket - early) / buckets) * compute) + travel
    return arrived


def changed(**options: object) -> Model:
    """The model with a mistake."""
    return lambda **case: ring(**case, **options)  # type: ignore[arg-type]


def drawn_cases(grader: Grader, buckets: list[int]) -> list[Case]:
    """Cases in which bandwidth, latency or computing takes longest, on several numbers of ranks.

    Those on 3 ranks have so few parameters that neither buckets nor ring chunks divide them evenly.
    """
    chance = grader.random(f"cases {buckets}")
    cases: list[Case] = []
    for ranks in (2, 3, 8):
        for communication, rounds in ((2.0, 0.1), (0.3, 0.1), (0.5, 1.2)):
            compute = chance.uniform(0.05, 0.4)
            parameters = chance.choice((7, 11, 13)) if ranks == 3 else chance.randrange(1, 40) * 100_000
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
