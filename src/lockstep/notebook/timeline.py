"""The timeline of your own run: what each rank computed and sent, drawn from the record of a cell.

    %%ranks 2 --timeline --into run        the cell says how far it is: mark("forward"), mark("backward"), mark("end"),
                                           and mark("ready NAME") from a hook when a gradient is ready
    timeline(run)                          draws all steps; `step=-1` the last one
    timeline(run, mine, titles=("torch", "mine")).save_trace("trace.json")      ui.perfetto.dev opens it

The picture shows times, which differ in every run. Its text can be compared: ranks, buckets, and how many of them were
launched before the last gradient was ready, by the order of events and not by the clock.
"""

from __future__ import annotations

import html
import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..ranks.report import Collective, Mark, RankReport
from ..ranks.result import Run

PHASES = ("forward", "backward", "step")
READY = "ready "
END = "end"
WIDTH, LEFT, RIGHT = 860, 70, 16
MICROSECONDS = 1e6


@dataclass(frozen=True)
class Phase:
    """What the code did between two marks. Times in seconds since the run began."""

    name: str
    begin: float
    end: float


@dataclass(frozen=True)
class Bucket:
    """One collective of a step: `ready` is when the gradient came that completed it, if the cell marks gradients.

    `early` says that it was launched while gradients were still missing, by the order of events.
    """

    kind: str
    nbytes: int
    ready: float | None
    launch: float
    end: float
    early: bool

    @property
    def is_all_reduce(self) -> bool:
        """True for what averages gradients."""
        return self.kind.startswith("all_reduce")


@dataclass(frozen=True)
class StepOfRank:
    """One step of one rank."""

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
        """When it began."""
        return self.phases[0].begin

    @property
    def finish(self) -> float:
        """When its last part ended."""
        return max(*(phase.end for phase in self.phases), *(one.end for one in self.collectives), self.begin)


@dataclass(frozen=True)
class Panel:
    """One run's steps: `steps[s][r]`."""

    title: str
    numbers: tuple[int, ...]
    steps: tuple[tuple[StepOfRank, ...], ...]


class Timeline:
    """One panel for each run, all to the same scale. As a cell's value: a picture, and a text without times."""

    def __init__(self, panels: tuple[Panel, ...]) -> None:
        self.panels = panels

    def __repr__(self) -> str:
        return "\n".join(_tell(panel) for panel in self.panels)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return {"image/svg+xml": self.svg(), "text/plain": repr(self)}

    def svg(self) -> str:
        """The picture. `data-measured` tells comparisons of outputs that it differs in every run."""
        return _draw(self.panels)

    def save(self, path: str | Path) -> None:
        """Write the picture to a file."""
        Path(path).write_text(self.svg() + "\n", encoding="utf-8")

    def save_trace(self, path: str | Path) -> None:
        """Write Chrome's trace format (JSON), which ui.perfetto.dev and chrome://tracing open."""
        Path(path).write_text(json.dumps(self.trace(), indent=1) + "\n", encoding="utf-8")

    def trace(self) -> dict[str, Any]:
        """The trace as data: a process for each rank, a thread for its code and for each row of its collectives."""
        return {"traceEvents": _trace_events(self.panels), "displayTimeUnit": "ms"}


def timeline(*runs: Run | None, titles: tuple[str, ...] = (), step: int | None = None) -> Timeline:
    """The timeline of one run, or of several under each other. A run that is None was not made, and is left out.

    Raises ValueError when a run was recorded without `--timeline` or has no marks to tell its steps by.
    """
    names = titles or tuple("" for _ in runs)
    if len(names) != len(runs):
        raise ValueError(f"{len(runs)} runs and {len(names)} titles")
    made = [(one, name) for one, name in zip(runs, names, strict=True) if one is not None]
    if not made:
        raise ValueError("no run to draw: run the cell above that makes it")
    return Timeline(tuple(_panel(one, name, step) for one, name in made))


def _panel(run: Run, title: str, step: int | None) -> Panel:
    of_ranks = [_steps(report) for report in run.ranks]
    if not of_ranks or not all(of_ranks):
        raise ValueError('no step to draw: let every rank call mark("forward"), mark("backward") and mark("end")')
    count = min(map(len, of_ranks))
    numbers = tuple(range(count)) if step is None else (range(count)[step],)
    return Panel(title, numbers, tuple(tuple(steps[number] for steps in of_ranks) for number in numbers))


def _steps(report: RankReport) -> list[StepOfRank]:
    """A rank's events from each mark "forward" to its mark "end". What is between steps belongs to none."""
    pieces: list[list[Mark | Collective]] = []
    inside = False
    events: list[Mark | Collective] = [*report.marks, *report.collectives]
    for event in sorted(events, key=lambda event: event.number):
        if isinstance(event, Mark) and event.name == PHASES[0]:
            pieces.append([])
            inside = True
        if inside:
            pieces[-1].append(event)
        inside = inside and not (isinstance(event, Mark) and event.name == END)
    return [_step(report.rank, piece) for piece in pieces]


def _step(rank: int, events: list[Mark | Collective]) -> StepOfRank:
    marks = [event for event in events if isinstance(event, Mark)]
    gradients = [mark for mark in marks if mark.name.startswith(READY)]
    turns = [mark for mark in marks if mark.name in (*PHASES, END)]
    if turns[-1].name != END:
        raise ValueError(f'rank {rank}: a step has mark("{turns[-1].name}") and no mark("end") after it')
    phases = [Phase(one.name, one.at, after.at) for one, after in itertools.pairwise(turns) if one.name != END]
    last = gradients[-1].number if gradients else 0
    collectives = []
    for event in events:
        if isinstance(event, Mark):
            continue
        if event.end is None:
            raise ValueError("this run has no ends of its collectives: record it with %%ranks --timeline")
        before = [mark.at for mark in gradients if mark.number < event.number]
        ready = before[-1] if before and event.kind.startswith("all_reduce") else None
        early = event.number < last
        collectives.append(Bucket(event.kind, event.nbytes, ready, event.start, event.end, early))
    named = tuple((mark.name.removeprefix(READY), mark.at) for mark in gradients)
    return StepOfRank(rank, tuple(phases), named, tuple(collectives))


def _tell(panel: Panel) -> str:
    lines = []
    for number, step in zip(panel.numbers, panel.steps, strict=True):
        kinds = {(len(one.buckets), sum(bucket.early for bucket in one.buckets)) for one in step}
        counted = ", or ".join(
            f"{many} bucket{'s' * (many != 1)}, {early} launched before the last gradient was ready"
            for many, early in sorted(kinds)
        )
        lines.append(f"step {number}: {counted}")
    title = f"{panel.title}, " if panel.title else ""
    gap = " " if len(lines) == 1 else "\n  "
    return f"Timeline({title}{len(panel.steps[0])} ranks;{gap}" + f";{gap}".join(lines) + ")"


# The picture ---------------------------------------------------------------------------------------------------------

_STYLE = """<style>
text { font: 12px sans-serif; fill: #1b1f24 } .q { fill: #57606a } .b { font-weight: 600 } .bg { fill: #fff }
.line { stroke: #d0d7de } .forward { fill: #a9cdf2 } .backward { fill: #f2c894 } .step { fill: #cfd6dc }
.all_reduce { fill: #3f9d5d } .other { fill: #9a8fd0 } .tick { stroke: #b3480c; stroke-width: 1.2 }
.ready { stroke: #3f9d5d; stroke-width: 1.2; stroke-dasharray: 2 2 }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .q { fill: #9da7b1 } .bg { fill: #111417 } .line { stroke: #3d444d } .forward { fill: #24507d }
.backward { fill: #7a4d14 } .step { fill: #444c56 } .all_reduce { fill: #4fb870 } .other { fill: #8275c4 }
.tick { stroke: #ffb27a } .ready { stroke: #4fb870 } }
</style>"""
_TITLE, _PHASE, _TICKS, _GAP, _AXIS, _KEY = 24, 18, 9, 12, 22, 26


def _draw(panels: tuple[Panel, ...]) -> str:
    spans = [_span(panel) for panel in panels]
    longest = max(end - begin for begin, end in spans)
    scale = (WIDTH - LEFT - RIGHT) / longest if longest else 1.0
    parts, top = [], 6
    for panel, (begin, _) in zip(panels, spans, strict=True):
        drawn, top = _draw_panel(panel, begin, scale, top)
        parts += drawn
    parts += _axis(longest, scale, top)
    parts += _key(top + _AXIS)
    height = top + _AXIS + _KEY
    label = html.escape(" ".join(_tell(panel) for panel in panels))
    return "\n".join([
        f'<svg data-measured="" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" role="img" aria-label="{label}">',
        _STYLE, f'<rect class="bg" width="{WIDTH}" height="{height}"/>', *parts, "</svg>",
    ])  # fmt: skip


def _span(panel: Panel) -> tuple[float, float]:
    steps = [one for step in panel.steps for one in step]
    return min(one.begin for one in steps), max(one.finish for one in steps)


def _draw_panel(panel: Panel, begin: float, scale: float, top: int) -> tuple[list[str], int]:
    parts = []
    if panel.title:
        parts.append(f'<text class="b" x="{LEFT}" y="{top + 15}">{html.escape(panel.title)}</text>')
        top += _TITLE
    for index in range(len(panel.steps[0])):
        of_rank = [step[index] for step in panel.steps]
        rows = max(len(one.collectives) for one in of_rank)
        row = 14 if rows <= 4 else 9
        parts.append(f'<text class="q" x="8" y="{top + 13}">rank {of_rank[0].rank}</text>')
        for one in of_rank:
            parts += _draw_step(one, begin, scale, top, row)
        top += _PHASE + _TICKS + rows * row + _GAP
        parts.append(f'<path class="line" d="M8 {top - _GAP // 2}H{WIDTH - RIGHT}"/>')
    return parts, top


def _draw_step(one: StepOfRank, begin: float, scale: float, top: int, row: int) -> list[str]:
    def x(at: float) -> float:
        return LEFT + (at - begin) * scale

    parts = []
    for phase in one.phases:
        wide = (phase.end - phase.begin) * scale
        parts.append(
            _rect(phase.name, x(phase.begin), top, wide, _PHASE, f"{phase.name}: {_ms(phase.begin, phase.end)}")
        )
        if wide > 8 * len(phase.name):
            parts.append(f'<text x="{x(phase.begin) + 4:.1f}" y="{top + 13}">{phase.name}</text>')
    for name, at in one.gradients:
        parts.append(f'<path class="tick" d="M{x(at):.1f} {top + _PHASE}v{_TICKS - 2}">'
                     f"<title>gradient of {html.escape(name)} ready</title></path>")  # fmt: skip
    number = 0
    for index, item in enumerate(one.collectives):
        y = top + _PHASE + _TICKS + index * row
        number += item.is_all_reduce
        words = f"bucket {number}" if item.is_all_reduce else item.kind
        said = f"{words}: {_size(item.nbytes)}, {_ms(item.launch, item.end)}"
        if item.ready is not None:
            parts.append(f'<path class="ready" d="M{x(item.ready):.1f} {top + _PHASE}V{y + row - 2}"/>')
        wide = max(1.5, (item.end - item.launch) * scale)
        parts.append(_rect("all_reduce" if item.is_all_reduce else "other", x(item.launch), y, wide, row - 2, said))
        if row >= 14 and item.is_all_reduce:
            free = x(item.launch) - x(one.begin)  # before its launch nothing of this step is in a bucket's row
            parts.append(_label(f"{words}, {_size(item.nbytes)}", x(item.launch), x(item.launch) + wide, y + 10, free))
    return parts


def _label(words: str, left: float, right: float, y: float, free: float) -> str:
    needed = 6.3 * len(words)
    if free < needed and right + needed < WIDTH:
        return f'<text class="q" x="{right + 4:.1f}" y="{y:g}">{words}</text>'
    return f'<text class="q" text-anchor="end" x="{left - 4:.1f}" y="{y:g}">{words}</text>'


def _rect(kind: str, x: float, y: float, width: float, height: float, said: str) -> str:
    size = f'x="{x:.1f}" y="{y:g}" width="{max(width, 0.5):.1f}" height="{height:g}"'
    return f'<rect class="{kind}" {size}><title>{said}</title></rect>'


def _axis(longest: float, scale: float, top: int) -> list[str]:
    unit = next((unit for unit in _UNITS if longest / unit <= 10), longest or 1.0)
    parts = []
    for count in range(int(longest / unit) + 1):
        x = LEFT + count * unit * scale
        parts.append(f'<path class="line" d="M{x:.1f} {top - 2}v5"/>')
        parts.append(f'<text class="q" text-anchor="middle" x="{x:.1f}" y="{top + 16}">{count * unit * 1000:g}</text>')
    return [*parts, f'<text class="q" x="8" y="{top + 16}">ms</text>']


_UNITS = [base * 10**power for power in range(-5, 3) for base in (1, 2, 5)]


def _key(top: int) -> list[str]:
    parts, x = [], LEFT
    for kind, words in (("forward", "forward"), ("backward", "backward"), ("all_reduce", "a bucket's all-reduce"),
                        ("other", "another collective")):  # fmt: skip
        parts.append(f'<rect class="{kind}" x="{x}" y="{top + 6}" width="12" height="12"/>')
        parts.append(f'<text class="q" x="{x + 17}" y="{top + 16}">{words}</text>')
        x += 34 + 6 * len(words)
    for kind, d, words in (("tick", f"M{x} {top + 8}v9", "a gradient is ready"),
                           ("ready", f"M{x + 136} {top + 6}v13", "… and its bucket is full")):  # fmt: skip
        parts.append(f'<path class="{kind}" d="{d}"/>')
        parts.append(f'<text class="q" x="{x + 6}" y="{top + 16}">{words}</text>')
        x += 136
    return parts


def _ms(begin: float, end: float) -> str:
    return f"{(end - begin) * 1000:.2f} ms"


def _size(nbytes: int) -> str:
    if nbytes >= 1 << 20:
        return f"{nbytes / (1 << 20):.1f} MiB"
    return f"{nbytes / 1024:.1f} KiB" if nbytes >= 1 << 10 else f"{nbytes} bytes"


# The trace -----------------------------------------------------------------------------------------------------------


def _trace_events(panels: tuple[Panel, ...]) -> list[dict[str, Any]]:
    """Chrome's "Trace Event Format": X has a duration, i is an instant, M names; times in microseconds."""
    events: list[dict[str, Any]] = []
    for place, panel in enumerate(panels):
        start = _span(panel)[0]
        for index in range(len(panel.steps[0])):
            pid = 1000 * place + panel.steps[0][index].rank
            name = f"{panel.title} rank {panel.steps[0][index].rank}".strip()
            events.append(_event("M", "process_name", pid, 0, 0.0, args={"name": name}))
            events.append(_event("M", "thread_name", pid, 0, 0.0, args={"name": "code"}))
            rows = max(len(step[index].collectives) for step in panel.steps)
            for row in range(rows):
                events.append(_event("M", "thread_name", pid, row + 1, 0.0, args={"name": f"collective {row + 1}"}))
            for step in panel.steps:
                events += _trace_step(step[index], pid, start)
    return events


def _trace_step(one: StepOfRank, pid: int, start: float) -> list[dict[str, Any]]:
    events = []
    for phase in one.phases:
        events.append(_event("X", phase.name, pid, 0, phase.begin - start, dur=phase.end - phase.begin))
    for name, at in one.gradients:
        events.append(_event("i", f"ready {name}", pid, 0, at - start, s="t"))
    for row, item in enumerate(one.collectives):
        args = {"nbytes": item.nbytes, "launched_before_last_gradient": item.early}
        events.append(_event("X", item.kind, pid, row + 1, item.launch - start, dur=item.end - item.launch, args=args))
        if item.ready is not None:
            events.append(_event("i", "bucket ready", pid, row + 1, item.ready - start, s="t"))
    return events


def _event(ph: str, name: str, pid: int, tid: int, at: float, dur: float | None = None, **more: Any) -> dict[str, Any]:
    event = {"ph": ph, "name": name, "pid": pid, "tid": tid, "ts": round(at * MICROSECONDS, 3), **more}
    if dur is not None:
        event["dur"] = round(max(dur, 0.0) * MICROSECONDS, 3)
    return event
