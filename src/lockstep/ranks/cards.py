"""Why a run did not end well, as HTML: the same card in a page of its own (`--report`) and wherever else it is shown.

A card has its own style and no script. It takes the colors of the page around it, or has its own, for light and dark.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from html import escape
from pathlib import Path

from . import text
from .report import Cause
from .result import Run
from .words import names

MOST_LINES = 14
SHORT = 32  # characters of a cell that is never broken where there is place beside it
CODE = re.compile(r"`([^`\n]+)`")
JOINTS = re.compile(r"[/_](?=\w)")


def said(body: str) -> str:
    """The HTML with the cards' style."""
    return f'<div class="lockstep-said"><style>{style("cards.css")}</style>{body}</div>'


@cache
def style(name: str) -> str:
    """A style sheet that is beside this file, in one line."""
    return " ".join(Path(__file__).with_name(name).read_text(encoding="utf-8").split())


def breakable(name: str) -> str:
    """HTML of a file's or a check's name, which may go on in the next line after `/` or `_` and is never cut."""
    return JOINTS.sub(r"\g<0><wbr>", escape(name))


def coded(said: str) -> str:
    """HTML of a text, in which `code` is between backticks."""
    return CODE.sub(r"<code>\1</code>", escape(said))


def page(title: str, body: str, style: str = "") -> str:
    """A page of its own; `style` is more of its body's style."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{escape(title)}</title>'
        "<style>:root { color-scheme: light dark } body { font: 16px/1.5 sans-serif; max-width: 960px; margin: 0 auto; "
        f"padding: 12px{style} }} h1 {{ font-size: 1.3rem }}</style></head>"
        f"<body><main><h1>{escape(title)}</h1>{body}</main></body></html>\n"
    )


def card(run: Run, read_on: text.ReadOn = text.NOWHERE, link: Callable[[str], str] = escape) -> str:
    """Headline, ranks, the code around the branch, what to know and to read; `link` makes HTML of where to read on."""
    cause = run.cause
    assert cause is not None
    rows = [replace(row, code="") for row in text.rows(cause.rows)]  # that is in the code below
    parts = [f'<p class="ls-red">{coded(text.headline(run))}</p>', table(rows), _code(cause)]
    if cause.error is not None and cause.error.traceback:
        parts.append(f"<pre>{escape(cause.error.traceback.rstrip())}</pre>")
    elif cause.frame is not None and not cause.rows:
        parts.append(f"<p><code>{escape(text.place(cause.frame))}</code></p>")
    parts += [f"<p>{coded(note)}</p>" for note in cause.notes]
    if cause.topic in read_on:
        parts.append(f"<p>Read: {link(read_on[cause.topic])}</p>")
    return f'<div class="ls-card ls-bad">{"".join(parts)}</div>'


def table(rows: Sequence[text.Row]) -> str:
    """Ranks, as in `text.table`; those that differ are tinted. On a narrow screen a row becomes two lines."""
    if not rows:
        return ""
    shown = [dict(zip(text.COLUMNS, map(escape, row.cells), strict=True)) for row in rows]
    used = [name for name in text.COLUMNS[:-1] if any(cells[name] for cells in shown)]
    head = "".join(f'<th scope="col">{name}</th>' for name in used)
    lines = []
    for row, cells in zip(rows, shown, strict=True):
        cells["at"] += f" <code>{escape(row.code)}</code>" if row.code else ""
        kinds = {"for": ["ls-for"], "waits in": ["ls-in"] if row.waits else []}
        for name in ("waits in", "tensor", "for"):
            kinds.setdefault(name, []).extend(["ls-short"] if 0 < len(cells[name]) <= SHORT else [])
        # with spaces between, at which the lines of a narrow screen break
        line = " ".join(f"<td{_class(kinds.get(name))}>{cells[name]}</td>" for name in used)
        lines.append(f"<tr{' class=ls-odd' if row.differs else ''}>{line}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _class(kinds: Sequence[str] | None) -> str:
    return f' class="{" ".join(kinds)}"' if kinds else ""


def _code(cause: Cause) -> str:
    """The lines where the ranks of a hang stand, with the branch that parted them marked."""
    standing = [row for row in cause.rows if not row.what.startswith("finished")]  # the frame of others is a last call
    frames = [(row, row.frame) for row in standing if row.frame is not None]
    if not frames or len({frame.file for _, frame in frames}) > 1:
        return ""
    file = frames[0][1].file
    at: dict[int, list[int]] = {}
    for row, frame in frames:
        at.setdefault(frame.line, []).append(row.rank)
    odd = {frame.line for row, frame in frames if row.differs}
    known = sorted({*at, *((cause.branch, cause.branch + 1) if cause.branch else ())})  # a branch and what it does
    first, last = max(1, known[0] - 1), known[-1] + 1
    wanted = range(first, last + 1)
    if len(wanted) > MOST_LINES:  # too far apart: only the lines themselves, with a gap between them
        wanted = known  # type: ignore[assignment]
    shown = []
    for number in wanted:
        source = linecache.getline(file, number).rstrip()
        if not source and number in (first, last):
            continue
        here = f"← {names(at[number])}" if number in at else "the ranks part here" if number == cause.branch else ""
        style = "ls-red" if number in odd else "ls-soft"
        shown.append(
            f'<div{" class=ls-branch" if number == cause.branch else ""}><span class="ls-no">{number}</span>'
            f'<span>{escape(source)}</span><span class="{style}">{here}</span></div>'
        )
    return f'<div class="ls-code">{"".join(shown)}</div>'
