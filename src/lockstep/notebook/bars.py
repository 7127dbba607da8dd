"""Bars of what a cell has measured: `bars({"with": 0.41, "without": 0.31}, unit="s")` shows them in a notebook.

The numbers differ in every run, so the picture is marked as measured: comparisons of outputs ignore it
(`chapters/nbval_sanitize.cfg`), and what can be compared is printed beside it.
"""

from __future__ import annotations

import html
from collections.abc import Mapping

WIDTH, ROW, LABEL, VALUE = 720, 26, 230, 90


class Bars:
    """A picture of horizontal bars, one for each name, in the order given."""

    def __init__(self, values: Mapping[str, float], unit: str, title: str) -> None:
        self.values, self.unit, self.title = dict(values), unit, title

    def __repr__(self) -> str:
        return f"Bars({', '.join(self.values)})"

    def _repr_html_(self) -> str:
        largest = max(self.values.values(), default=0.0) or 1.0
        height = ROW * (len(self.values) + 1)
        lines = [f'<text x="0" y="16" font-weight="600" fill="currentColor">{html.escape(self.title)}</text>']
        for number, (name, value) in enumerate(self.values.items(), 1):
            top = ROW * number
            length = (WIDTH - LABEL - VALUE) * max(value, 0.0) / largest
            y, shown = f'y="{top + 16}" fill="currentColor"', f"{value:.3g} {html.escape(self.unit)}"
            lines += [
                f'<text x="0" {y}>{html.escape(name)}</text>',
                f'<rect x="{LABEL}" y="{top + 4}" width="{length:.1f}" height="{ROW - 8}" rx="2" fill="#4c78a8"/>',
                f'<text x="{LABEL + length + 8:.1f}" {y}>{shown}</text>',
            ]
        return (
            f'<svg data-measured="" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
            f'style="max-width:100%" role="img" aria-label="{html.escape(self.title)}" '
            f'font-family="sans-serif" font-size="13">{"".join(lines)}</svg>'
        )


def bars(values: Mapping[str, float], unit: str = "", title: str = "") -> Bars:
    """A picture of these values. Raises ValueError when there are none, or one is negative."""
    if not values:
        raise ValueError("there is nothing to draw")
    if min(values.values()) < 0:
        raise ValueError(f"a bar cannot be negative: {dict(values)}")
    return Bars(values, unit, title)
