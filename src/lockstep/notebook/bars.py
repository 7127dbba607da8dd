"""Bars of what a cell has measured: `bars({"with": 0.41, "without": 0.31}, unit="s")` shows them in a notebook.

`stacked({"alone": {"parameters": 3.5, "gradients": 3.5}}, unit="MB")` divides each bar into its parts.

The numbers differ in every run, so the picture is marked as measured: comparisons of outputs ignore it
(`chapters/nbval_sanitize.cfg`), and what can be compared is printed beside it.
"""

from __future__ import annotations

import html
from collections.abc import Mapping

WIDTH, ROW, LABEL, VALUE = 720, 26, 230, 90
COLOURS = ("#4c78a8", "#e0a13a", "#5f9e6e", "#b279a2", "#d1605e", "#8c8c8c")


def _svg(title: str, height: int, lines: list[str]) -> str:
    title = html.escape(title)
    return (
        f'<svg data-measured="" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'style="max-width:100%" role="img" aria-label="{title}" font-family="sans-serif" font-size="13">'
        f'<text x="0" y="16" font-weight="600" fill="currentColor">{title}</text>{"".join(lines)}</svg>'
    )


class Bars:
    """A picture of horizontal bars, one for each name, in the order given."""

    def __init__(self, values: Mapping[str, float], unit: str, title: str) -> None:
        self.values, self.unit, self.title = dict(values), unit, title

    def __repr__(self) -> str:
        return f"Bars({', '.join(self.values)})"

    def _repr_html_(self) -> str:
        largest = max(self.values.values(), default=0.0) or 1.0
        height = ROW * (len(self.values) + 1)
        lines = []
        for number, (name, value) in enumerate(self.values.items(), 1):
            top = ROW * number
            length = (WIDTH - LABEL - VALUE) * max(value, 0.0) / largest
            y, shown = f'y="{top + 16}" fill="currentColor"', f"{value:.3g} {html.escape(self.unit)}"
            lines += [
                f'<text x="0" {y}>{html.escape(name)}</text>',
                f'<rect x="{LABEL}" y="{top + 4}" width="{length:.1f}" height="{ROW - 8}" rx="2" fill="#4c78a8"/>',
                f'<text x="{LABEL + length + 8:.1f}" {y}>{shown}</text>',
            ]
        return _svg(self.title, height, lines)


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
        most = max((sum(parts.values()) for parts in self.rows.values()), default=0.0) or 1.0
        height = ROW * (len(self.rows) + 2)
        lines = []
        left = 0.0
        for part, color in zip(self.parts, COLOURS, strict=False):
            lines += [
                f'<rect x="{left:.0f}" y="{ROW + 5}" width="12" height="12" rx="2" fill="{color}"/>',
                f'<text x="{left + 17:.0f}" y="{ROW + 16}" fill="currentColor">{html.escape(part)}</text>',
            ]
            left += 40 + 7.5 * len(part)
        for number, (name, parts) in enumerate(self.rows.items(), 2):
            top, left = ROW * number, float(LABEL)
            lines.append(f'<text x="0" y="{top + 16}" fill="currentColor">{html.escape(name)}</text>')
            for part, color in zip(self.parts, COLOURS, strict=False):
                length = (WIDTH - LABEL - VALUE) * parts.get(part, 0.0) / most
                lines.append(
                    f'<rect x="{left:.1f}" y="{top + 4}" width="{length:.1f}" height="{ROW - 8}" fill="{color}">'
                    f"<title>{html.escape(part)}: {parts.get(part, 0.0):.3g} {html.escape(self.unit)}</title></rect>"
                )
                left += length
            shown = f"{sum(parts.values()):.1f} {html.escape(self.unit)}"
            lines.append(f'<text x="{left + 8:.1f}" y="{top + 16}" fill="currentColor">{shown}</text>')
        return _svg(self.title, height, lines)


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
