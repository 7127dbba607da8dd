"""Bars of what a cell has measured: `bars({"with": 0.41, "without": 0.31}, unit="s")` shows them in a notebook.

`stacked({"alone": {"parameters": 3.5, "gradients": 3.5}}, unit="MB")` divides each bar into its parts.

The numbers differ in every run, so the picture is marked as measured: comparisons of outputs ignore it
(`chapters/nbval_sanitize.cfg`), and what can be compared is printed beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from ..ranks.cards import said

COLOURS = ("#4c78a8", "#e0a13a", "#5f9e6e", "#b279a2", "#d1605e", "#8c8c8c")


def _card(title: str, rows: list[str], keys: str = "") -> str:
    """`data-measured` tells comparisons of outputs that the picture differs in every run."""
    head = f'<p class="ls-name">{escape(title)}</p>' if title else ""
    return said(f'<div class="ls-card ls-bars" data-measured="">{head}{keys}<ul>{"".join(rows)}</ul></div>')


def _row(name: str, parts: Mapping[str, float], share: float, shown: str, unit: str) -> str:
    """`share` of the place for a bar, in percent, is what 1 takes."""
    inside = "".join(
        f'<i style="width: {value * share:.2f}%; background-color: {color}" '
        f'title="{escape(f"{part}{value:.3g} {unit}")}"></i>'
        for (part, value), color in zip(parts.items(), COLOURS, strict=False)
    )
    return f"<li><span>{escape(name)}</span><span>{inside}</span><span>{shown} {escape(unit)}</span></li>"


class Bars:
    """A picture of horizontal bars, one for each name, in the order given."""

    def __init__(self, values: Mapping[str, float], unit: str, title: str) -> None:
        self.values, self.unit, self.title = dict(values), unit, title

    def __repr__(self) -> str:
        return f"Bars({', '.join(self.values)})"

    def _repr_html_(self) -> str:
        share = 100 / (max(self.values.values()) or 1.0)
        rows = [_row(name, {"": value}, share, f"{value:.3g}", self.unit) for name, value in self.values.items()]
        return _card(self.title, rows)


def bars(values: Mapping[str, float], unit: str = "", title: str = "") -> Bars:
    """A picture of these values. Raises ValueError when there are none, or one is negative."""
    if not values:
        raise ValueError("there is nothing to draw")
    if min(values.values()) < 0:
        raise ValueError(f"a bar cannot be negative: {dict(values)}")
    return Bars(values, unit, title)


class Stacked:
    """A picture of horizontal bars, each of which consists of parts; as a text, the table of the same numbers."""

    def __init__(self, rows: Mapping[str, Mapping[str, float]], unit: str, title: str) -> None:
        self.rows = {name: dict(parts) for name, parts in rows.items()}
        self.parts = list(dict.fromkeys(part for parts in self.rows.values() for part in parts))
        self.unit, self.title = unit, title

    def __repr__(self) -> str:
        widths = [max(len(part), 6) for part in self.parts]
        lines = [
            f"{self.title:26}" + "".join(f"  {part:>{width}}" for part, width in zip(self.parts, widths, strict=True))
        ]
        for name, parts in self.rows.items():
            cells = [f"  {parts.get(part, 0.0):{width}.1f}" for part, width in zip(self.parts, widths, strict=True)]
            lines.append(f"{name:26}{''.join(cells)}  {self.unit}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        share = 100 / (max(sum(parts.values()) for parts in self.rows.values()) or 1.0)
        rows = []
        for name, parts in self.rows.items():
            every = {f"{part}: ": parts.get(part, 0.0) for part in self.parts}
            rows.append(_row(name, every, share, f"{sum(parts.values()):.1f}", self.unit))
        keys = "".join(
            f'<span><i style="background-color: {color}"></i>{escape(part)}</span> '
            for part, color in zip(self.parts, COLOURS, strict=False)
        )
        return _card(self.title, rows, f'<p class="ls-keys">{keys}</p>')


def stacked(rows: Mapping[str, Mapping[str, float]], unit: str = "", title: str = "") -> Stacked:
    """A picture of these rows and their parts. Raises ValueError when there is nothing to draw, or too many parts."""
    picture = Stacked(rows, unit, title)
    if not picture.parts:
        raise ValueError("there is nothing to draw")
    if len(picture.parts) > len(COLOURS):
        raise ValueError(f"{len(picture.parts)} parts, and only {len(COLOURS)} colors")
    if any(value < 0 for parts in picture.rows.values() for value in parts.values()):
        raise ValueError(f"a bar cannot be negative: {picture.rows}")
    return picture
