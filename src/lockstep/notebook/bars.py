"""Bars of what a cell has measured: `bars({"with": 0.41, "without": 0.31}, unit="s")` shows them in a notebook.

`stacked({"alone": {"parameters": 3.5, "gradients": 3.5}}, unit="MB")` divides each bar into its parts, and
`compared({"a step": (81.0, 80.6)}, unit="ms")` puts a tick at what was predicted over the bar of what was measured.

The numbers differ in every run, so the picture is marked as measured: comparisons of outputs ignore it
(`chapters/nbval_sanitize.cfg`), and what can be compared is printed beside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from html import escape

from ..ranks.cards import said

COLOURS = ("#4c78a8", "#5f9e6e", "#e0a13a", "#b279a2", "#d1605e", "#8c8c8c")
LIGHT = COLOURS[0]  # Numbers are white on this one, black on the others


def _titled(title: str, picture: str) -> str:
    """`data-measured` tells comparisons of outputs that the picture differs in every run."""
    head = f'<p class="ls-name">{escape(title)}</p>' if title else ""
    return said(f'<div class="ls-card ls-bars" data-measured="">{head}{picture}</div>')


def legend(parts: Iterable[str], title: str = "") -> str:
    """Which color is which part."""
    keys = "".join(
        f'<span><i style="background-color: {color}"></i>{escape(part)}</span> '
        for part, color in zip(parts, COLOURS, strict=False)
    )
    head = f"<span>{escape(title)}</span> " if title else ""
    return f'<p class="ls-keys">{head}{keys}</p>'


def _list(rows: list[str]) -> str:
    return f"<ul>{''.join(rows)}</ul>"


def _decimals(values: Iterable[float]) -> int:
    """How many all numbers of a picture have: the largest is shown with three digits."""
    most = max(values, default=0.0)
    return max(0, 2 - math.floor(math.log10(most))) if most > 0 else 0


def _row(name: str, parts: Mapping[str, float], share: float, decimals: int, unit: str) -> str:
    """`share` of the place for a bar, in percent, is what 1 takes. Several parts have their numbers in them; on a phone
    these are beside the sum.
    """
    inside, numbers = "", []
    for (part, value), color in zip(parts.items(), COLOURS, strict=False):
        number = f"{value:,.{decimals}f}"
        said = f"<b{' class=ls-on' if color == LIGHT else ''}>{number}</b>" if part else ""
        title = f"{part}: {number} {unit}" if part else f"{number} {unit}"
        if value or not part:
            numbers.append(number)
            inside += (
                f'<i style="width: {value * share:.2f}%; background-color: {color}" title="{escape(title)}">{said}</i>'
            )
    told = f'<span class="ls-parts">{" + ".join(numbers)} = </span>' if len(numbers) > 1 else ""
    shown = f"{told}{sum(parts.values()):,.{decimals}f} {escape(unit)}"
    return f"<li><span>{escape(name)}</span><span>{inside}</span><span>{shown}</span></li>"


class Bars:
    """A picture of horizontal bars, one for each name, in the order given."""

    def __init__(self, values: Mapping[str, float], unit: str, title: str) -> None:
        self.values, self.unit, self.title = dict(values), unit, title

    def __repr__(self) -> str:
        return f"Bars({', '.join(self.values)})"

    def _repr_html_(self) -> str:
        share = 100 / (max(self.values.values()) or 1.0)
        decimals = _decimals(self.values.values())
        rows = [_row(name, {"": value}, share, decimals, self.unit) for name, value in self.values.items()]
        return _titled(self.title, _list(rows))


def bars(values: Mapping[str, float], unit: str = "", title: str = "") -> Bars:
    """A picture of these values. Raises ValueError when there are none, or one is negative."""
    if not values:
        raise ValueError("there is nothing to draw")
    if min(values.values()) < 0:
        raise ValueError(f"a bar cannot be negative: {dict(values)}")
    return Bars(values, unit, title)


class Stacked:
    """A picture of horizontal bars, each of which consists of parts; as a text, the table of the same numbers.

    Times differ in every run, so a picture that is `timed` has only names as its text.
    """

    def __init__(self, rows: Mapping[str, Mapping[str, float]], unit: str, title: str, timed: bool) -> None:
        self.rows = {name: dict(parts) for name, parts in rows.items()}
        self.parts = list(dict.fromkeys(part for parts in self.rows.values() for part in parts))
        self.unit, self.title, self.timed = unit, title, timed

    def __repr__(self) -> str:
        if self.timed:
            return f"Stacked({', '.join(self.rows)})"
        widths = [max(len(part), 6) for part in self.parts]
        lines = [
            f"{self.title:26}" + "".join(f"  {part:>{width}}" for part, width in zip(self.parts, widths, strict=True))
        ]
        for name, parts in self.rows.items():
            cells = [f"  {parts.get(part, 0.0):{width}.1f}" for part, width in zip(self.parts, widths, strict=True)]
            lines.append(f"{name:26}{''.join(cells)}  {self.unit}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        sums = [sum(parts.values()) for parts in self.rows.values()]
        share, decimals = 100 / (max(sums) or 1.0), _decimals(sums)
        rows = []
        for name, parts in self.rows.items():
            every = {part: parts.get(part, 0.0) for part in self.parts}
            rows.append(_row(name, every, share, decimals, self.unit))
        return _titled(self.title, legend(self.parts) + _list(rows))


def stacked(rows: Mapping[str, Mapping[str, float]], unit: str = "", title: str = "", timed: bool = False) -> Stacked:
    """A picture of these rows and their parts. Raises ValueError when there is nothing to draw, or too many parts."""
    picture = Stacked(rows, unit, title, timed)
    if not picture.parts:
        raise ValueError("there is nothing to draw")
    if len(picture.parts) > len(COLOURS):
        raise ValueError(f"{len(picture.parts)} parts, and only {len(COLOURS)} colors")
    if any(value < 0 for parts in picture.rows.values() for value in parts.values()):
        raise ValueError(f"a bar cannot be negative: {picture.rows}")
    return picture


class Compared:
    """A picture of a bar for each name, measured, with a tick where it was predicted, and by how much it is longer."""

    def __init__(self, rows: Mapping[str, tuple[float, float]], unit: str, title: str) -> None:
        self.rows, self.unit, self.title = dict(rows), unit, title

    def __repr__(self) -> str:
        return f"Compared({', '.join(self.rows)})"

    def _repr_html_(self) -> str:
        numbers = [number for pair in self.rows.values() for number in pair]
        share, decimals = 100 / (max(numbers) or 1.0), _decimals(numbers)
        rows = []
        for name, (measured, predicted) in self.rows.items():
            bar = (
                f'<i style="width: {measured * share:.2f}%; background-color: {COLOURS[0]}"></i>'
                f'<u style="left: {predicted * share:.2f}%"></u>'
            )
            cells = {
                "measured": f"{measured:,.{decimals}f} {escape(self.unit)}",
                "predicted": f"{predicted:,.{decimals}f} {escape(self.unit)}",
                "error": f"{measured / predicted - 1:+.0%}" if predicted else "–",
            }
            told = "".join(f'<td data-name="{key}">{value}</td>' for key, value in cells.items())
            rows.append(f'<tr><th scope="row">{escape(name)}</th><td class="ls-bar"><div>{bar}</div></td>{told}</tr>')
        head = (
            f'<td></td><td></td><th scope="col"><i style="background-color: {COLOURS[0]}"></i>measured</th>'
            '<th scope="col"><u></u>predicted</th><th scope="col">error</th>'
        )
        table = f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody>"
        return _titled(self.title, f'<table class="ls-numbers ls-pairs">{table}</table>')


def compared(rows: Mapping[str, tuple[float, float]], unit: str = "", title: str = "") -> Compared:
    """A picture of what was measured and, for each, what was predicted. Raises ValueError as `bars` does."""
    if not rows:
        raise ValueError("there is nothing to draw")
    if any(number < 0 for pair in rows.values() for number in pair):
        raise ValueError(f"a bar cannot be negative: {dict(rows)}")
    return Compared(rows, unit, title)
