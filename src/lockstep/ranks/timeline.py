"""The timeline of a run: what each rank computed and sent, step by step, from what was recorded of it.

A step's parts are told by marks: those that the code made (`mark("forward")`, `mark("backward")`, `mark("end")`, and
`mark("ready NAME")` from a hook when a gradient is ready), else those of `steps`. `timeline_picture` draws it.

A collective's time is **exposed** while the rank's code stands still for it: in a wait, in the backward of DDP after the
last gradient, in DDP's constructor or before its forward. The rest is **hidden**: the rank computes meanwhile. A part of
a step **waits** while one of its collectives is exposed.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .messages import OWN_MARK
from .report import Collective, Mark, RankReport
from .result import Run
from .words import wait

PHASES = ("forward", "backward", "after backward", "step")
READY = "ready "
END = "end"
MICROSECONDS = 1e6
BLOCKING = ("DDP()", "forward")  # Parts of DDP that wait for what they send where no wait of Python's is seen
AT_ONCE = 2  # Collectives of a group: gloo has that many threads, NCCL one stream, and both keep the order
FOR_ALL = ("all_", "reduce_scatter", "barrier", "monitored_barrier")  # No rank is through before all have called it
FASTEST = "fastest"
STEPS_FOR_A_VERDICT = 3
SLOW, EVEN = 0.2, 0.1  # Shares of a step: who waits longer for one rank, and who waits less than that for any
AGREE_SECONDS = 0.001
NOISE_SECONDS = 0.003  # The system alone may keep a process waiting for so long
Span = tuple[float, float]


@dataclass(frozen=True)
class Phase:
    """What the code did between two marks. Times in seconds since the run began. `waits` are the parts of its time in which
    the code stood still for communication.
    """

    name: str
    begin: float
    end: float
    waits: tuple[Span, ...] = ()

    @property
    def waits_seconds(self) -> float:
        """For how long the code stood still."""
        return sum(end - begin for begin, end in self.waits)


@dataclass(frozen=True)
class Bucket:
    """One collective. `of_ddp` says that it is a bucket of DDP's: `ready` is when the gradient came that filled it, if the
    code marks gradients. From `launch` to `runs` it has queued behind others of its group.

    `early` says that it was launched while gradients were still missing, by the order of events. `exposed` are the parts of
    its time in which the code stood still. `done` is false for one that had not ended when the run did.
    """

    kind: str
    nbytes: int
    ready: float | None
    launch: float
    runs: float
    end: float
    early: bool
    exposed: tuple[Span, ...] = ()
    done: bool = True
    of_ddp: bool = False

    @property
    def is_all_reduce(self) -> bool:
        """True for what averages gradients."""
        return self.kind.startswith("all_reduce")

    @property
    def exposed_seconds(self) -> float:
        """For how long the code stood still while it lasted."""
        return sum(end - begin for begin, end in self.exposed)

    @property
    def hidden_seconds(self) -> float:
        """For how long the code went on while it lasted."""
        return max(0.0, self.end - self.launch - self.exposed_seconds)


@dataclass(frozen=True)
class StepOfRank:
    rank: int
    phases: tuple[Phase, ...]
    gradients: tuple[tuple[str, float], ...]
    collectives: tuple[Bucket, ...]

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The all-reduces alone."""
        return tuple(one for one in self.collectives if one.is_all_reduce)

    @property
    def begin(self) -> float:
        return min(one[0] for one in self._spans())

    @property
    def finish(self) -> float:
        return max(one[1] for one in self._spans())

    def _spans(self) -> list[Span]:
        return [*((one.begin, one.end) for one in self.phases), *((one.launch, one.end) for one in self.collectives)]


@dataclass(frozen=True)
class Panel:
    """One run's steps: `steps[s][r]`. `of` is how many there were in all; without a step, `steps[0]` has the collectives.

    `since[r]` is when that rank was through with the step before the first of these, if there was one.
    """

    title: str
    numbers: tuple[int, ...]
    steps: tuple[tuple[StepOfRank, ...], ...]
    of: int = 0
    since: tuple[float, ...] = ()
    chosen: str = ""
    """By what its one step was chosen, if not by its number."""

    @property
    def span(self) -> Span:
        """From the first step's begin to the last one's end, over all ranks."""
        steps = [one for step in self.steps for one in step if one.phases or one.collectives]
        return min(one.begin for one in steps), max(one.finish for one in steps)

    def apart(self) -> tuple[Panel, ...]:
        """A panel for each step; of all steps, the first has the title."""
        if not self.numbers:
            return (self,)
        before = [self.since, *(tuple(one.finish for one in step) for step in self.steps)]
        return tuple(
            Panel("" if place else self.title, (number,), (step,), self.of, since, self.chosen)
            for place, (number, step, since) in enumerate(zip(self.numbers, self.steps, before, strict=False))
        )

    def own(self, index: int) -> list[Span]:
        """When that rank was between two steps and waited for nothing: it loaded data, or did whatever else its code does."""
        steps = [step[index] for step in self.steps if step[index].phases]
        ends = [*self.since[index : index + 1], *(one.phases[-1].end for one in steps)]
        begins = [one.phases[0].begin for one in steps][0 if self.since else 1 :]
        waits = sorted(span for one in steps for item in one.collectives for span in item.exposed)
        free: list[Span] = []
        for at, until in zip(ends, begins, strict=False):
            at = max(at, self.span[0])
            for begin, end in _within(waits, at, until):
                free.append((at, begin))
                at = end
            free.append((at, until))
        return [(begin, end) for begin, end in free if end > begin]

    def lanes(self, index: int) -> list[tuple[int, ...]]:
        """For each step of that rank and each of its collectives, the first line in which it overlaps none before it.

        The end of a step's last collective may be noticed after the next step's first one has begun.
        """
        free: list[float] = []

        def lane(one: Bucket) -> int:
            found = next((number for number, end in enumerate(free) if end <= one.launch), len(free))
            free[found : found + 1] = [one.end]
            return found

        return [tuple(lane(one) for one in step[index].collectives) for step in self.steps]


class Timeline:
    """One panel for each run, all to the same scale."""

    def __init__(self, panels: tuple[Panel, ...]) -> None:
        self.panels = panels

    def __repr__(self) -> str:
        return "\n".join(tell(panel) for panel in self.panels)

    def save_trace(self, path: str | Path) -> None:
        """Write Chrome's trace format (JSON), which ui.perfetto.dev and chrome://tracing open."""
        Path(path).write_text(json.dumps(self.trace(), indent=1) + "\n", encoding="utf-8")

    def trace(self) -> dict[str, Any]:
        """The trace as data: a process for each rank, a thread for its code and for each line of its collectives."""
        return {"traceEvents": _trace_events(self.panels), "displayTimeUnit": "ms"}


def panel_of(run: Run, title: str = "", step: int | str | None = None) -> Panel:
    """The steps of a run, or one of them; FASTEST is the one that takes the least time from the first rank to the last.

    Raises ValueError when it has no marks to tell its steps by, or no ends of its collectives.
    """
    of_ranks = [_steps(replace(_with_ends(report), ended=0.0)) for report in run.ranks]  # what has no end is not drawn
    if not of_ranks or not all(of_ranks):
        raise ValueError('no step to draw: let every rank call mark("forward"), mark("backward") and mark("end")')
    count = min(map(len, of_ranks))
    every = [tuple(steps[number] for steps in of_ranks) for number in range(count)]
    if step == FASTEST:
        spans = [Panel("", (number,), (one,)).span for number, one in enumerate(every)]
        step = min(range(count), key=lambda number: spans[number][1] - spans[number][0])
        return Panel(title, (step,), (every[step],), count, chosen=FASTEST)
    numbers = tuple(range(count)) if step is None else (range(count)[int(step)],)
    return Panel(title, numbers, tuple(every[number] for number in numbers), count)


def whole(run: Run, most: int | None = None) -> Panel:
    """The last `most` steps of any run, or all; its collectives where no step was seen. A run that failed has a timeline too.

    Raises ValueError when nothing was recorded.
    """
    reports = [_closed(_with_ends(report)) for report in run.ranks]
    of_ranks = [_steps(report, between=True) for report in reports]
    count = min(map(len, of_ranks), default=0)
    if count:
        numbers = range(count)[-most:] if most else range(count)
        since = tuple(one[numbers[0] - 1].finish for one in of_ranks) if numbers[0] else ()
        steps = tuple(tuple(one[number] for one in of_ranks) for number in numbers)
        return Panel("", tuple(numbers), steps, count, since)
    if not any(report.collectives for report in reports):
        raise ValueError("the ranks took no training step and called no collective")
    return Panel("", (), (tuple(_step(report, [], report.collectives) for report in reports),))


def _with_ends(report: RankReport) -> RankReport:
    """Who has waited for a call knows that it has ended, however late torch's thread is to say so, or if it never does."""
    known = {wait.number: wait.end for wait in report.waits}
    told = [
        replace(
            call, end=known.get(call.number) if call.end is None else min(call.end, known.get(call.number, call.end))
        )
        for call in report.collectives
    ]
    return replace(report, collectives=told)


def _closed(report: RankReport) -> RankReport:
    """With one set of marks, and an end for a step that the run's end has cut off, or whose optimizer was never asked."""
    own = any(_is_phase(mark) for mark in report.marks)
    marks = [Mark(one.rank, one.number, one.name.removeprefix(OWN_MARK), one.at) for one in report.marks
             if not (own and one.name.startswith(OWN_MARK))]  # fmt: skip
    if not own and not any(mark.name in (END, "step") for mark in marks):
        marks = [Mark(one.rank, one.number, END if one.name == "after backward" else one.name, one.at) for one in marks]
    turns = [mark for mark in marks if _is_phase(mark)]
    last = max([0.0, *(one.start for one in report.collectives), *(one.end or 0.0 for one in report.collectives),
                *(one.end for one in report.waits), *(one.at for one in marks)])  # fmt: skip
    if any(one.end is None for one in report.collectives):
        last = max(last, report.ended)
    if turns and turns[-1].name != END:
        number = 1 + max([marks[-1].number, *(one.number for one in report.collectives)])
        marks.append(Mark(report.rank, number, END, last))
    return RankReport(report.rank, marks=marks, waits=report.waits, ended=last, collectives=report.collectives)


def _is_phase(mark: Mark) -> bool:
    return mark.name in (*PHASES, END)


def _steps(report: RankReport, between: bool = False) -> list[StepOfRank]:
    """A rank's events from the first mark of a step to its mark "end".

    What is between steps belongs to none, or, with `between`, to the step before it.
    """
    after: list[Collective] = []
    pieces: list[tuple[list[Mark], list[Collective]]] = []
    inside = False
    events: list[Mark | Collective] = [*report.marks, *report.collectives]
    for event in sorted(events, key=lambda event: event.number):  # stable: a mark comes before a collective
        if not inside and isinstance(event, Mark) and event.name in PHASES:
            if pieces and between:
                pieces[-1][1].extend(after)
            pieces.append(([], []))
            inside, after = True, []
        if inside and isinstance(event, Mark):
            pieces[-1][0].append(event)
        elif isinstance(event, Collective):
            (pieces[-1][1] if inside else after).append(event)
        inside = inside and not (isinstance(event, Mark) and event.name == END)
    return [_step(report, *piece) for piece in pieces]


def _step(report: RankReport, marks: list[Mark], calls: list[Collective]) -> StepOfRank:
    gradients = [mark for mark in marks if mark.name.startswith(READY)]
    turns = [mark for mark in marks if _is_phase(mark)]
    if turns and turns[-1].name != END:
        raise ValueError(f'rank {report.rank}: a step has mark("{turns[-1].name}") and no mark("end") after it')
    phases = [Phase(one.name, one.at, after.at) for one, after in itertools.pairwise(turns)]
    if any(call.end is None for call in calls) and not report.ended:
        raise ValueError("this run has no ends of its collectives: record it with --timeline")
    idle = _idle(report, phases, gradients, calls)
    last = gradients[-1].number if gradients else 0
    wrapped = any(call.inside == "DDP()" for call in report.collectives)
    free: dict[str, list[float]] = {}
    collectives = []
    for call in calls:
        before = [mark.at for mark in gradients if mark.number < call.number]
        of_ddp = wrapped and call.inside == "backward" and call.kind.startswith("all_reduce")
        ready = before[-1] if before and of_ddp else None
        # Backward returns when DDP has waited for all its buckets.
        returned = [
            one.end for one in phases if of_ddp and one.name == "backward" and one.begin <= call.start <= one.end
        ]
        done = call.end is not None
        end = report.ended if call.end is None else max(call.start, min([call.end, *returned]))
        runs = call.start
        if done and not call.is_point_to_point and call.kind != "monitored_barrier":
            places = free.setdefault(call.group, [0.0] * AT_ONCE)
            runs = min(max(runs, places[0]), end)
            places[:] = sorted([*places[1:], end])
        early = call.number < last
        exposed = tuple(_within(idle, call.start, end))
        collectives.append(Bucket(call.kind, call.nbytes, ready, call.start, runs, end, early, exposed, done, of_ddp))
    stood = [span for one in collectives for span in one.exposed]
    phases = [replace(one, waits=tuple(_within(stood, one.begin, one.end))) for one in phases]
    named = tuple((mark.name.removeprefix(READY), mark.at) for mark in gradients)
    return StepOfRank(report.rank, tuple(phases), named, tuple(collectives))


def _idle(report: RankReport, phases: list[Phase], gradients: list[Mark], calls: list[Collective]) -> list[Span]:
    """When the code stood still for communication."""
    spans = [(one.begin, one.end) for one in report.waits]
    for call in calls:
        end = report.ended if call.end is None else call.end
        if call.inside in BLOCKING or call.kind == "monitored_barrier" or (call.end is None and call is calls[-1]):
            spans.append((call.start, end))
    for phase in phases:
        if phase.name != "backward":
            continue
        launched = [
            one.start for one in calls if one.inside.endswith("backward") and phase.begin <= one.start <= phase.end
        ]
        ready = [mark.at for mark in gradients if phase.begin <= mark.at <= phase.end]
        if launched:  # DDP launches the last bucket when the last gradient is ready, and computes until then
            last = max(ready or launched)
            spans.append((min((at for at in launched if at >= last), default=last), phase.end))
    return spans


def _within(spans: Iterable[Span], begin: float, end: float) -> list[Span]:
    """The parts of spans that lie between, joined where they touch."""
    parts: list[Span] = []
    for one in sorted((max(a, begin), min(b, end)) for a, b in spans):
        if one[0] >= one[1]:
            continue
        if parts and one[0] <= parts[-1][1]:
            parts[-1] = (parts[-1][0], max(parts[-1][1], one[1]))
        else:
            parts.append(one)
    return parts


def tell(panel: Panel) -> str:
    """What can be compared, without times: ranks, all-reduces, and how many were launched before the last gradient was ready."""
    lines = []
    for number, step in zip(panel.numbers, panel.steps, strict=False):
        kinds = {(len(one.buckets), sum(bucket.early for bucket in one.buckets)) for one in step}
        counted = ", or ".join(
            f"{many} all-reduce{'s' * (many != 1)}, {early} launched before the last gradient was ready"
            for many, early in sorted(kinds)
        )
        lines.append(f"{f'{panel.chosen} step' if panel.chosen else f'step {number}'}: {counted}")
    title = f"{panel.title}, " if panel.title else ""
    gap = " " if len(lines) == 1 else "\n  "
    return f"Timeline({title}{len(panel.steps[0])} ranks;{gap}" + f";{gap}".join(lines or ["no steps"]) + ")"


# The verdict ---------------------------------------------------------------------------------------------------------


def verdict(panel: Panel) -> str:
    """Which rank the others wait for in each step, or that none is slow; "" where the steps do not agree, or are too few."""
    count = len(panel.steps[0])
    if len(panel.numbers) < STEPS_FOR_A_VERDICT or count < 2:
        return ""
    waits = [_waits_for_the_last(step) for step in panel.steps]
    periods = [b.begin - a.begin for one, two in itertools.pairwise(panel.steps) for a, b in zip(one, two, strict=True)]
    whole = statistics.median(periods)
    if None in waits or whole <= 0:
        return ""
    typical = {  # for each pair of ranks, how long the first waits for the second
        (rank, last): statistics.median(one.get((rank, last), 0.0) for one in waits if one is not None)
        for last in range(count)
        for rank in range(count)
        if rank != last
    }
    noticed = {pair: seconds for pair, seconds in typical.items() if seconds > EVEN * whole}
    if noticed and max(noticed.values()) > max(SLOW * whole, NOISE_SECONDS) and len({last for _, last in noticed}) == 1:
        ids = [one.rank for one in panel.steps[0]]
        slow = next(last for _, last in noticed)
        least, most = (f"{limit(noticed.values()) * 1000:.0f}" for limit in (min, max))
        waiting = wait(ids[rank] for rank, _ in noticed)
        return (
            f"Rank {ids[slow]} is the slowest: in a typical step of about {whole * 1000:.0f} ms, "
            f"{waiting} for it for {most if least == most else f'{least} to {most}'} ms."
        )
    items = [item for step in panel.steps for one in step for item in one.collectives if item.done]
    spent = sum(item.end - item.launch for item in items)
    if noticed or not spent:
        return ""
    hidden = sum(item.hidden_seconds for item in items) / spent
    return f"All ranks are about as fast. {hidden:.0%} of the communication is hidden behind computation."


def _waits_for_the_last(step: tuple[StepOfRank, ...]) -> dict[tuple[int, int], float] | None:
    """How long each rank stood still for the one that called a collective last; None where that can't be told.

    It can't when the ranks made different calls, or when one's call ended before another's began: then a collective does
    not need all ranks, or their clocks differ.
    """
    waits: dict[tuple[int, int], float] = {}
    if len({tuple(item.kind for item in one.collectives) for one in step}) > 1:
        return None
    for items in zip(*(one.collectives for one in step), strict=True):
        if not items[0].kind.startswith(FOR_ALL):
            continue
        last = max(range(len(items)), key=lambda rank: items[rank].launch)
        arrived = items[last].launch
        if any(not item.done or item.end < arrived - AGREE_SECONDS for item in items):
            return None
        for rank, item in enumerate(items):
            if rank != last:
                seconds = sum(b - a for a, b in _within(item.exposed, item.launch, arrived))
                waits[rank, last] = waits.get((rank, last), 0.0) + seconds
    return waits


# The trace -----------------------------------------------------------------------------------------------------------


def _trace_events(panels: tuple[Panel, ...]) -> list[dict[str, Any]]:
    """Chrome's "Trace Event Format": X has a duration, i is an instant, M names; times in microseconds."""
    events: list[dict[str, Any]] = []
    for place, panel in enumerate(panels):
        start = panel.span[0]
        for index, rank in enumerate(one.rank for one in panel.steps[0]):
            pid = 1000 * place + rank
            events.append(_event("M", "process_name", pid, 0, 0.0, args={"name": f"{panel.title} rank {rank}".strip()}))
            events.append(_event("M", "thread_name", pid, 0, 0.0, args={"name": "code"}))
            lanes = panel.lanes(index)
            for lane in range(max((lane for step in lanes for lane in step), default=-1) + 1):
                events.append(_event("M", "thread_name", pid, lane + 1, 0.0, args={"name": f"collective {lane + 1}"}))
            for number, step, places in itertools.zip_longest(panel.numbers, panel.steps, lanes):
                events += _trace_step(step[index], places, number, pid, start)
    return events


def _trace_step(
    one: StepOfRank, lanes: tuple[int, ...], number: int | None, pid: int, start: float
) -> list[dict[str, Any]]:
    events = []
    if number is not None:
        events.append(_event("i", f"step {number}", pid, 0, one.begin - start, s="p"))
    for phase in one.phases:
        events.append(_event("X", phase.name, pid, 0, phase.begin - start, dur=phase.end - phase.begin))
    for name, at in one.gradients:
        events.append(_event("i", f"ready {name}", pid, 0, at - start, s="t"))
    for item, lane in zip(one.collectives, lanes, strict=True):
        args = {"nbytes": item.nbytes, "launched_before_last_gradient": item.early, "done": item.done,
                "exposed_us": round(item.exposed_seconds * MICROSECONDS, 3),
                "hidden_us": round(item.hidden_seconds * MICROSECONDS, 3),
                "queued_us": round((item.runs - item.launch) * MICROSECONDS, 3)}  # fmt: skip
        at, seconds = item.launch - start, item.end - item.launch
        events.append(_event("X", item.kind, pid, lane + 1, at, dur=seconds, args=args))
        if item.ready is not None:
            events.append(_event("i", "bucket ready", pid, lane + 1, item.ready - start, s="t"))
    return events


def _event(ph: str, name: str, pid: int, tid: int, at: float, dur: float | None = None, **more: Any) -> dict[str, Any]:
    event = {"ph": ph, "name": name, "pid": pid, "tid": tid, "ts": round(at * MICROSECONDS, 3), **more}
    if dur is not None:
        event["dur"] = round(max(dur, 0.0) * MICROSECONDS, 3)
    return event
