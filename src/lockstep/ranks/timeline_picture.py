"""The picture of a timeline: an SVG without scripts and links, as wide as its place.

On a narrow screen there is another picture, with the steps below each other: nothing has to be scrolled.

A bar shows its numbers when it is pointed at and when it has the keyboard's focus: its tip is drawn above it, over what
has been drawn before, so everything is drawn from top to bottom.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from html import escape

from . import cards
from .timeline import AT_ONCE, Bucket, Panel, Phase, StepOfRank, Timeline, tell

STYLE = "timeline.css"
WIDTH, WIDE, NARROW = 720, 1240, 336  # Of a picture, of one that has a page for itself, and of one on a phone
LEFT, RIGHT = 62, 14
CHARACTER = 6.9
LETTERS = (("ijl'", 0.222), ("ft ,.:-", 0.278), ("r", 0.333), ("ckvsxyz", 0.5), ("m", 0.833), ("w", 0.722))
"""How wide letters are, in the font's size; all others are near 0.556."""
TITLE, STRIP, ROW, TICKS, GAP, AXIS, LINE = 24, 20, 22, 9, 12, 26, 20
TITLE_LINE, AXIS_LINE = 17, 14  # Where a panel's title and the axis's numbers stand, below their tops
ABOVE = 60  # How far the highest tip may stand out above the picture
THIN_FROM = 9
HATCH = 5  # Between the lines over what waits
TICK_WIDTH = 42  # What a number of the axis needs at least
QUEUE = 4  # What a queue needs to be seen
GUTTER = 2.2  # Between bars, outlines included, so that bars that follow at once can be counted
LABELS = {"forward": "forward", "backward": "backward", "after backward": "after backward", "step": "optimizer"}
KINDS = {
    "forward": "forward",
    "backward": "backward",
    "step": "optimizer",
}  # How a phase is drawn; all others as "code"
OWN = "own code"
HINT = (
    '<span class="tl-mouse">Point at a bar, or go to it with Tab,</span><span class="tl-touch">Tap a bar</span> '
    "for its bytes and milliseconds."
)
SHORT = 5e-6  # Seconds that nobody sees in a picture of milliseconds
UNITS = [base * 10**power for power in range(-5, 4) for base in (1, 2, 5)]


def picture(timeline: Timeline) -> str:
    """The picture, to be written to a file of its own."""
    return _svg(timeline.panels, legend=True)


def inline(timeline: Timeline, wide: bool = False) -> str:
    """The picture for a page. Where a sanitizer takes styles and SVG out, its text is left.

    `wide` adds one with more room, for a page that is nothing else: it is seen where there is place for it.
    """
    keys = "".join(
        f'<svg data-measured="" width="{wide:.0f}" height="{LINE}">{_key(key, 0, 0)}</svg>'
        for key, wide in _keys(timeline.panels)
    )
    plain = "<br>".join(map(escape, repr(timeline).splitlines()))
    boxes = f'<div class="tl-box" hidden>{_svg(timeline.panels)}</div>'
    apart = tuple(one for panel in timeline.panels for one in panel.apart())
    boxes += f'<div class="tl-narrow" hidden>{_svg(apart, NARROW)}</div>'
    if wide:
        boxes += f'<div class="tl-box tl-wide" hidden>{_svg(timeline.panels, WIDE)}</div>'
    return (
        f'<div class="lockstep-timeline{" tl-page" if wide else ""}"><style>{cards.style(STYLE)}</style><p class="tl-plain">{plain}<br>'
        f'The picture is not shown here.</p><div class="tl-keys" hidden>{keys}</div>'
        f'<p class="tl-hint" hidden>{HINT}</p>{boxes}</div>'
    )


def page(timeline: Timeline, title: str, notes: Iterable[str] = ()) -> str:
    said = "".join(f"<p>{escape(note)}</p>" for note in notes)
    return cards.page(title, said + inline(timeline, wide=True), f"; overflow-wrap: anywhere; max-width: {WIDE + 80}px")


@dataclass
class _Bar:
    """What is drawn of a phase or a collective. `parts` are its rectangles: class, left and right."""

    left: float
    right: float
    parts: list[tuple[str, float, float]]
    said: list[str]
    labels: tuple[str, ...] = ()
    """Of these, the first one that has room."""
    number: str = ""
    """What is left of them where none has, after a bar in whose lane the name stands before its number."""
    group: str = ""
    mark: float = math.inf  # The place of a line before the bar, which a label leaves free
    queued: float = 0.0  # How much of it, from its left, is a line: there it queues


@dataclass
class _Lane:
    """A line of bars that do not overlap."""

    top: float
    height: float
    wide: int
    """The picture's width."""
    lines: list[float]
    """Where steps begin: no label lies over such a line, or is separated by one from its bar."""
    bars: list[_Bar] = field(default_factory=list)

    def draw(self) -> list[str]:
        afters = [*(bar.left for bar in self.bars[1:]), float(self.wide)]
        free, drawn, labels, numbered = float(LEFT), [], [], False
        for bar, after in zip(self.bars, afters, strict=False):  # without bars there is one `after` all the same
            drawn.append(self._draw(bar, after))
            if bar.group == "tl-phase" or self.height < 13:
                continue
            label, right = self._label(bar, free, after, numbered)
            labels += label
            numbered |= bool(label and bar.number)
            free = max(free, right)
        return drawn + labels

    def _label(self, bar: _Bar, free: float, after: float, numbered: bool) -> tuple[list[str], float]:
        """A collective's label, beside the bar or in a part of it, and where bar and label end."""
        x, y = min(bar.left, bar.mark) - 4, self.top + self.height - 4
        after = min([after, *(line for line in self.lines if line > bar.right)])
        free = max([free, *(line for line in self.lines if line <= bar.left)])
        whole, *exposed = bar.parts
        edges = [whole[1], *(edge for part in exposed for edge in part[1:]), whole[2]]
        for label in (*bar.labels, *([bar.number] if bar.number and numbered else [])):
            needed = CHARACTER * len(label) + 8
            if after - bar.right > needed:
                text = f'<text class="tl-soft" x="{bar.right + 4:.1f}" y="{y:g}">{escape(label)}</text>'
                return [text], bar.right + needed
            if x - free > needed:
                text = f'<text class="tl-soft" text-anchor="end" x="{x:.1f}" y="{y:g}">{escape(label)}</text>'
                return [text], bar.right
            for number, (left, right) in enumerate(itertools.pairwise(edges)):
                if right - left > needed:
                    kind = "tl-on" if number % 2 else "tl-in"
                    return [f'<text class="{kind}" x="{left + 4:.1f}" y="{y:g}">{escape(label)}</text>'], bar.right
        return [], bar.right

    def _draw(self, bar: _Bar, after: float) -> str:
        most = bar.right if bar.group == "tl-phase" else max(after - GUTTER, (bar.left + bar.right) / 2)
        shapes = [
            _waits(bar.parts[0][0], max(left, bar.left + 0.5), self.top, min(right, most - 0.5), self.height)
            if kind == "waits"
            else _rect(kind, left, self.top, min(right, most) - left, self.height)
            for kind, left, right in bar.parts
            if left < most
        ]
        if bar.queued:
            middle = self.top + self.height / 2
            line = f"M{bar.left:.1f} {self.top + 2:g}v{self.height - 4:g}M{bar.left:.1f} {middle:g}h{bar.queued:.1f}"
            shapes.append(f'<path class="tl-queue" d="{line}"/>')
        wide = max(bar.right - bar.left, 8.0)
        shapes.append(_rect("hit", (bar.left + bar.right - wide) / 2, self.top, wide, self.height))
        if bar.group == "tl-phase":
            shapes += self._words(bar)
        label = escape(", ".join(bar.said))
        kind = f"tl-bar {bar.group}".strip()
        return f'<g class="{kind}" tabindex="0" role="img" aria-label="{label}">{"".join(shapes)}{self._tip(bar)}</g>'

    def _words(self, bar: _Bar) -> list[str]:
        """A phase's name, where it computes if there is room, else where it waits."""
        (label,), (whole, *waits) = bar.labels, bar.parts
        edges = [whole[1], *(edge for part in waits for edge in part[1:]), whole[2]]
        free = [*zip(edges[::2], edges[1::2], strict=True)] if label != OWN else []
        for kind, spans in (("", free), (' class="tl-soft"', [whole[1:]])):
            for left, right in spans:
                if right - left > CHARACTER * len(label) + 6:
                    return [f'<text{kind} x="{left + 4:.1f}" y="{self.top + 15:g}">{escape(label)}</text>']
        return []

    def _tip(self, bar: _Bar) -> str:
        wide, high = max(map(len, bar.said)) * CHARACTER + 14, 17 * len(bar.said) + 8
        x = min(max(bar.left - 8, 2), self.wide - wide - 2)
        y = max(self.top - high - 3, 2 - ABOVE)
        lines = "".join(
            f'<text x="{x + 7:.1f}" y="{y + 17 * number + 18:g}">{escape(line)}</text>'
            for number, line in enumerate(bar.said)
        )
        box = f'<rect x="{x:.1f}" y="{y:g}" width="{wide:.1f}" height="{high}" rx="4"/>'
        return f'<g class="tl-tip" aria-hidden="true">{box}{lines}</g>'


class _Scale:
    def __init__(self, panels: tuple[Panel, ...], wide: int) -> None:
        self.wide = wide
        self.longest = max(end - begin for begin, end in (panel.span for panel in panels))
        self.per_second = (wide - LEFT - RIGHT) / self.longest if self.longest else 1.0

    def place(self, seconds: float) -> float:
        return LEFT + seconds * self.per_second

    def ticks(self) -> list[tuple[float, str]]:
        """Places and numbers below the axis, at most eleven."""
        most = min(10, (self.wide - LEFT) / TICK_WIDTH)
        unit = next((unit for unit in UNITS if self.longest / unit <= most), self.longest or 1.0)
        factor = 1 if self.longest >= 10 else 1000
        return [(self.place(n * unit), f"{n * unit * factor:g}") for n in range(int(self.longest / unit) + 1)]

    @property
    def unit(self) -> str:
        return "s" if self.longest >= 10 else "ms"


def _svg(panels: tuple[Panel, ...], wide: int = WIDTH, legend: bool = False) -> str:
    scale = _Scale(panels, wide)
    parts: list[str] = []
    top = 4.0
    for panel in panels:
        drawn, top = _panel(panel, scale, top)
        parts += drawn
    parts += [f'<text class="tl-soft" text-anchor="middle" x="{x:.1f}" y="{top + AXIS_LINE:g}">{text}</text>'
              for x, text in scale.ticks()]  # fmt: skip
    parts.append(f'<text class="tl-soft" x="8" y="{top + AXIS_LINE:g}">{scale.unit}</text>')
    height = top + AXIS
    keys, above = _legend(panels) if legend else ([], 0.0)
    head = f"<style>{cards.style(STYLE)}</style>" if legend else ""
    label = escape(" ".join(map(tell, panels)))
    return "\n".join([
        f'<svg data-measured="" class="lockstep-timeline" xmlns="http://www.w3.org/2000/svg" viewBox="0 {-above:g} {wide} {height + above:g}" '
        f'role="group" aria-label="{label}">{head}',
        f'<rect class="tl-bg" y="{-above:g}" width="{wide}" height="{height + above:g}"/>', *keys, *parts, "</svg>",
    ])  # fmt: skip


def _panel(panel: Panel, scale: _Scale, top: float) -> tuple[list[str], float]:
    start, parts, count = panel.span[0], [], len(panel.steps[0])
    if panel.title:
        parts.append(f'<text class="tl-bold" x="8" y="{top + TITLE_LINE:g}">{escape(panel.title)}</text>')
        top += TITLE
    first = top
    for number, step in zip(panel.numbers, panel.steps, strict=False):
        x = scale.place(step[0].begin - start)
        parts.append(f'<text class="tl-soft" x="{x:.1f}" y="{top + 14:g}">step {number}</text>')
    top += STRIP if panel.numbers else 4
    rows = [max((lane for step in panel.lanes(index) for lane in step), default=-1) + 1 for index in range(count)]
    for index in range(count):
        drawn, top = _rank(panel, index, rows[index], 17 if max(rows) < THIN_FROM else 10, scale, top)
        parts += drawn
    grid = "".join(f"M{x:.1f} {first + STRIP:g}V{top - GAP / 2:g}" for x, _ in scale.ticks())
    return [f'<path class="tl-grid" d="{grid}"/>', *parts], top


def _rank(panel: Panel, index: int, rows: int, row: float, scale: _Scale, top: float) -> tuple[list[str], float]:
    """A rank, and its collectives in `rows` rows below it that are `row` high."""
    start, steps = panel.span[0], [step[index] for step in panel.steps]

    def x(at: float) -> float:
        return scale.place(at - start)

    parts = [f'<text class="tl-soft" x="8" y="{top + 15:g}">rank {steps[0].rank}</text>']
    ticked = TICKS if any(one.gradients for one in steps) else 3
    placed = panel.lanes(index)
    begins = [x(one.begin) for one in steps] if panel.numbers else []
    code = _Lane(top, ROW, scale.wide, begins)
    lanes = [_Lane(top + ROW + ticked + number * row, row - 3, scale.wide, begins) for number in range(rows)]
    below = top + ROW + ticked + rows * row
    for number, one, its_lanes in itertools.zip_longest(panel.numbers, steps, placed):
        where = f"rank {one.rank}" + (f", step {number}" if number is not None else "")
        code.bars += [_phase(phase, where, x) for phase in one.phases]
        if number is not None:
            parts.append(f'<path class="tl-step" d="M{x(one.begin):.1f} {top - 4:g}V{below:g}"/>')
        for name, at in one.gradients:
            said = f"<title>gradient of {escape(name)} ready</title>"
            parts.append(f'<path class="tl-tick" d="M{x(at):.1f} {top + ROW + 1:g}v{TICKS - 3}">{said}</path>')
        for item, lane, name in _named(one, its_lanes):
            if item.ready is not None:
                parts.append(
                    f'<path class="tl-ready" d="M{x(item.ready):.1f} {top + ROW:g}V{lanes[lane].top + row - 3:g}"/>'
                )
            lanes[lane].bars.append(_collective(item, name, where, x))
    code.bars += [
        _own(begin, end, steps[0].rank, x)
        for begin, end in panel.own(index)
        if x(end) - x(begin) > CHARACTER * len(OWN) + 10
    ]
    code.bars.sort(key=lambda bar: bar.left)
    parts.append(f'<path class="tl-grid" d="M8 {below + GAP / 2:g}H{scale.wide - RIGHT}"/>')
    return [*parts, *(line for lane in (code, *lanes) for line in lane.draw())], below + GAP


def _named(one: StepOfRank, lanes: tuple[int, ...]) -> Iterable[tuple[Bucket, int, str]]:
    """A step's collectives, each with its line and its name: DDP's buckets are counted."""
    number = 0
    for item, lane in zip(one.collectives, lanes, strict=True):
        number += item.of_ddp
        yield item, lane, f"bucket {number}" if item.of_ddp and one.phases else item.kind


def _phase(phase: Phase, where: str, x: Callable[[float], float]) -> _Bar:
    kind, left, right = KINDS.get(phase.name, "code"), x(phase.begin), x(phase.end)
    seconds = phase.end - phase.begin
    said = [f"{LABELS[phase.name]}, {where}", _ms(seconds)]
    if phase.waits:
        said.append(f"computes {_ms(seconds - phase.waits_seconds)}, waits {_ms(phase.waits_seconds)}")
    parts = [(kind, left, right), *(("waits", x(begin), x(end)) for begin, end in phase.waits)]
    return _Bar(left, right, parts, said, (LABELS[phase.name],), group="tl-phase")


def _own(begin: float, end: float, rank: int, x: Callable[[float], float]) -> _Bar:
    """What a rank does between two steps."""
    left, right = x(begin) + 2, x(end) - 2
    return _Bar(
        left, right, [("own", left, right)], [f"{OWN}, rank {rank}", _ms(end - begin)], (OWN,), group="tl-phase"
    )


def _collective(item: Bucket, name: str, where: str, x: Callable[[float], float]) -> _Bar:
    left, right = x(item.launch), x(item.end)
    runs = x(item.runs) if x(item.runs) - left > QUEUE else left
    exposed = [(max(x(begin), runs), x(end)) for begin, end in item.exposed if x(end) > runs]
    mark = WIDTH if item.ready is None else x(item.ready)
    right = max(right, left + 1.5)
    seconds = item.end - item.launch
    if not item.done:
        told = "it did not end"
    elif not item.exposed:
        told = "hidden: the rank computed"
    elif item.hidden_seconds < SHORT:
        told = "exposed: the rank waited"
    else:
        told = f"exposed {_ms(item.exposed_seconds)}, hidden {_ms(item.hidden_seconds)}"
    head = f"{name} ({item.kind})" if name != item.kind else name
    parts = [("hidden", runs, right), *(("exposed", a, max(b, a + 0.8)) for a, b in exposed)]
    labels = (name,) if item.done else (f"{name}, did not end", name)
    number = name.split()[-1] if name != item.kind else ""
    said = [f"{head}, {where}", f"{_size(item.nbytes)}, {_ms(seconds)}", told]
    if runs > left:
        said[2:2] = [f"queued for {_ms(item.runs - item.launch)} of them"]
    group = "" if item.is_all_reduce else "tl-other"
    return _Bar(left, right, parts, said, labels, number, group, mark, runs - left)


def _keys(panels: tuple[Panel, ...]) -> list[tuple[tuple[str, str, str], float]]:
    """One entry for each kind of bar and line that is in the picture (class, words, group), and how wide it is.

    The line at which a step begins has its words beside it.
    """
    steps = [one for panel in panels for step in panel.steps for one in step]
    phases = {phase.name for one in steps for phase in one.phases}
    items = [item for one in steps for item in one.collectives]
    sums, others = [one for one in items if one.is_all_reduce], [one for one in items if not one.is_all_reduce]
    keys = [(KINDS.get(name, "code"), words, "") for name, words in LABELS.items() if name in phases]
    if waiting := {phase.name for one in steps for phase in one.phases if phase.waits}:
        shown = "backward" if "backward" in waiting else min(waiting)
        words = f"{shown} waits" if waiting == {"backward"} else "the rank waits"
        keys.append((f"waits {KINDS.get(shown, 'code')}", words, ""))
    kinds = {one.kind for one in others}
    other = kinds.pop() if len(kinds) == 1 else "other collective"
    for some, words, group in ((sums, "all-reduce", ""), (others, other, "tl-other")):
        if any(one.hidden_seconds > SHORT for one in some):
            keys.append(("hidden", f"{words}, hidden: the rank computes", group))
        if any(one.exposed for one in some):
            keys.append(("exposed", f"{words}, exposed: the rank only waits", group))
    if any(item.runs - item.launch > SHORT for item in items):
        keys.append(("queue", f"queued, while {AT_ONCE} others run", "" if sums else "tl-other"))
    keys += [("tick", "a gradient is ready", "")] if any(one.gradients for one in steps) else []
    keys += [("ready", "its bucket is full", "")] if any(item.ready is not None for item in items) else []
    return [(key, 24 + 1.05 * _wide(key[1]) + 16) for key in keys]


def _wide(words: str) -> float:
    """How wide words are in a legend, in a font like Arial; most others differ by little."""
    ems = (next((wide for letters, wide in LETTERS if letter in letters), 0.556) for letter in words)
    return 13 * sum(ems)


def _key(key: tuple[str, str, str], x: float, y: float) -> str:
    kind, words, group = key
    if kind == "queue":
        shape = f'<path class="tl-queue" d="M{x + 1:g} {y + 5:g}v10m0-5h17"/>'
    elif kind in ("tick", "ready"):
        shape = f'<path class="tl-{kind}" d="M{x + 9:g} {y + 3:g}V{y + 17:g}"/>'
    elif kind.startswith("waits "):
        shape = _waits(kind.split()[1], x + 1, y + 4, x + 19, 12, framed=True)
    else:
        shape = _rect(kind, x + 1, y + 4, 18, 12)
    text = f'<text x="{x + 24:g}" y="{y + 15:g}">{escape(words)}</text>'
    return f'<g class="{group}">{shape}{text}</g>' if group else shape + text


def _legend(panels: tuple[Panel, ...]) -> tuple[list[str], float]:
    """What the picture needs above it when it stands alone, and how high that is."""
    lines: list[list[tuple[tuple[str, str, str], float]]] = [[]]
    for key, wide in _keys(panels):
        if lines[-1] and 8 + sum(one for _, one in lines[-1]) + wide > WIDTH:
            lines.append([])
        lines[-1].append((key, wide))
    high = max(ABOVE, LINE * len(lines) + 8)
    parts = []
    for number, line in enumerate(lines):
        x = 8.0
        for key, wide in line:
            parts.append(_key(key, x, 6 - high + LINE * number))
            x += wide
    return parts, high


def _rect(kind: str, x: float, y: float, width: float, height: float) -> str:
    return f'<rect class="tl-{kind}" x="{x:.1f}" y="{y:g}" width="{max(width, 0.5):.1f}" height="{height:g}"/>'


def _waits(kind: str, left: float, top: float, right: float, height: float, framed: bool = False) -> str:
    """A part that waits, hatched in the colors of its bar: lines that rise to the right, cut at its edges."""
    lines = [f"M{left:.1f} {top:g}H{right:.1f}V{top + height:g}H{left:.1f}Z"] if framed else []
    at = math.ceil((left - height) / HATCH) * HATCH  # the same for all parts of a bar
    while at < right:
        a, b = max(at, left), min(at + height, right)
        if b > a:
            lines.append(f"M{a:.1f} {top + height - a + at:.1f}L{b:.1f} {top + height - b + at:.1f}")
        at += HATCH
    ground = _rect("waits", left, top + 0.5, right - left, height - 1)
    return f'{ground}<path class="tl-hatch tl-{kind}" d="{"".join(lines)}"/>'


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.2f} ms"


def _size(nbytes: int) -> str:
    if nbytes >= 1 << 20:
        return f"{nbytes / (1 << 20):.1f} MiB"
    return f"{nbytes / 1024:.1f} KiB" if nbytes >= 1 << 10 else f"{nbytes} bytes"
