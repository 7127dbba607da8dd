"""Bars of what a cell has measured: `bars({"with": 0.41, "without": 0.31}, unit="s")` shows them in a notebook.

`stacked({"alone": {"parameters": 3.5, "gradients": 3.5}}, unit="MB")` divides each bar into its parts, and
`compared({"a step": (81.0, 80.6)}, unit="ms")` puts a tick at what was predicted over the bar of what was measured.

The numbers differ in every run, so the picture is marked as measured: comparisons of outputs ignore it
(`chapters/nbval_sanitize.cfg`), and what can be compared is printed beside it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from html import escape

from .cards import Card

COLOURS = ("#4c78a8", "#5f9e6e", "#e0a13a", "#b279a2", "#d1605e", "#8c8c8c")


def _picture(title: str, drawn: str, plain: str) -> Card:
    """`data-measured` tells comparisons of outputs that the picture differs in every run."""
    head = f'<p class="ls-name">{escape(title)}</p>' if title else ""
    return Card(f'<div class="ls-card ls-bars" data-measured="">{head}{drawn}</div>', plain)


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
    """`share` of the place for a bar, in percent, is what 1 takes. Several parts have their numbers before
    the sum: a narrow part has no room for one.
    """
    inside, numbers = "", []
    for (part, value), color in zip(parts.items(), COLOURS, strict=False):
        number = f"{value:,.{decimals}f}"
        title = f"{part}: {number} {unit}" if part else f"{number} {unit}"
        if value or not part:
            numbers.append(number)
            inside += f'<i style="width: {value * share:.2f}%; background-color: {color}" title="{escape(title)}"></i>'
    told = f'<span class="ls-parts">{" + ".join(numbers)} = </span>' if len(numbers) > 1 else ""
    shown = f"{told}{sum(parts.values()):,.{decimals}f} {escape(unit)}"
    return f"<li><span>{escape(name)}</span><span>{inside}</span><span>{shown}</span></li>"


def bars(values: Mapping[str, float], unit: str = "", title: str = "") -> Card:
    """A bar for each name, in the order given. Raises ValueError when there are none, or one is negative."""
    _check(values, values.values())
    share, decimals = 100 / (max(values.values()) or 1.0), _decimals(values.values())
    rows = [_row(name, {"": value}, share, decimals, unit) for name, value in values.items()]
    return _picture(title, _list(rows), f"Bars({', '.join(values)})")


def stacked(rows: Mapping[str, Mapping[str, float]], unit: str = "", title: str = "", timed: bool = False) -> Card:
    """A bar for each row, which consists of parts; as a text, the table of the same numbers.

    Times differ in every run, so a picture that is `timed` has only names as its text. Raises ValueError as `bars`
    does, and for too many parts.
    """
    names = list(dict.fromkeys(part for parts in rows.values() for part in parts))
    _check(names, (value for parts in rows.values() for value in parts.values()))
    if len(names) > len(COLOURS):
        raise ValueError(f"{len(names)} parts, and only {len(COLOURS)} colors")
    whole = {name: {part: parts.get(part, 0.0) for part in names} for name, parts in rows.items()}
    sums = [sum(parts.values()) for parts in whole.values()]
    share, decimals = 100 / (max(sums) or 1.0), _decimals(sums)
    drawn = [_row(name, parts, share, decimals, unit) for name, parts in whole.items()]
    wide = {part: max(len(part), 6) for part in names}
    table = [f"{title:26}" + "".join(f"  {part:>{wide[part]}}" for part in names)]
    for name, parts in whole.items():
        table.append(f"{name:26}{''.join(f'  {parts[part]:{wide[part]}.1f}' for part in names)}  {unit}")
    return _picture(title, legend(names) + _list(drawn), f"Stacked({', '.join(rows)})" if timed else "\n".join(table))


def compared(rows: Mapping[str, tuple[float, float]], unit: str = "", title: str = "") -> Card:
    """A bar for each name, measured, with a tick where it was predicted, and by how much it is longer. Raises
    ValueError as `bars` does.
    """
    numbers = [number for pair in rows.values() for number in pair]
    _check(rows, numbers)
    share, decimals = 100 / (max(numbers) or 1.0), _decimals(numbers)
    drawn = []
    for name, (measured, predicted) in rows.items():
        bar = (
            f'<i style="width: {measured * share:.2f}%; background-color: {COLOURS[0]}"></i>'
            f'<u style="left: {predicted * share:.2f}%"></u>'
        )
        cells = {
            "measured": f"{measured:,.{decimals}f} {escape(unit)}",
            "predicted": f"{predicted:,.{decimals}f} {escape(unit)}",
            "error": f"{measured / predicted - 1:+.0%}" if predicted else "–",
        }
        told = "".join(f'<td data-name="{key}">{value}</td>' for key, value in cells.items())
        drawn.append(f'<tr><th scope="row">{escape(name)}</th><td class="ls-bar"><div>{bar}</div></td>{told}</tr>')
    head = (
        f'<td></td><td></td><th scope="col"><i style="background-color: {COLOURS[0]}"></i>measured</th>'
        '<th scope="col"><u></u>predicted</th><th scope="col">error</th>'
    )
    table = f"<thead><tr>{head}</tr></thead><tbody>{''.join(drawn)}</tbody>"
    return _picture(title, f'<table class="ls-numbers ls-pairs">{table}</table>', f"Compared({', '.join(rows)})")


def _check(drawn: Collection[str], values: Iterable[float]) -> None:
    if not drawn:
        raise ValueError("there is nothing to draw")
    if any(value < 0 for value in values):
        raise ValueError(f"a bar cannot be negative: {', '.join(drawn)}")
