"""Why a run did not end well, as HTML: the same card in a page of its own (`--report`) and wherever else it is shown.

A card has its own style and no script. It takes the colors of the page around it, or has its own, for light and dark.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from html import escape
from pathlib import Path

from . import text
from .report import Cause
from .result import Run

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
    assert run.cause is not None
    return card_of(run.cause, text.headline(run), read_on, link)


def card_of(
    cause: Cause, headline: str, read_on: text.ReadOn = text.NOWHERE, link: Callable[[str], str] = escape
) -> str:
    """The same of a cause, under this headline."""
    shown = table(text.rows(cause.rows), code_below=True) + frame(text.code_around(cause))
    parts = [f'<p class="ls-red">{coded(headline)}</p>', shown]
    if cause.error is not None and cause.error.traceback:
        parts.append(f"<pre>{escape(cause.error.traceback.rstrip())}</pre>")
    elif cause.frame is not None and not cause.rows:
        parts.append(f"<p><code>{escape(text.place(cause.frame))}</code></p>")
    parts += [f"<p>{coded(note)}</p>" for note in cause.notes]
    if cause.topic in read_on:
        parts.append(f"<p>Read: {link(read_on[cause.topic])}</p>")
    return f'<div class="ls-card ls-bad">{"".join(parts)}</div>'


def proof(found: text.Evidence) -> str:
    """What stands under a headline. Beside a table the text is sentences, else it may be a traceback."""
    said = found.text.strip("\n")
    told = f"<p>{coded(said)}</p>" if found.rows else f"<pre>{escape(said)}</pre>"
    return table(found.rows, bool(found.code)) + frame(found.code) + (told if said else "")


def table(rows: Sequence[text.Row], code_below: bool = False) -> str:
    """Ranks, as in `text.table`; those that differ are tinted. On a narrow screen a row becomes two lines."""
    if not rows:
        return ""
    shown = [dict(zip(text.COLUMNS, map(escape, row.cells), strict=True)) for row in rows]
    used = [name for name in text.COLUMNS[:-1] if any(cells[name] for cells in shown)]
    named = dict(zip(text.COLUMNS, text.heads(rows), strict=True))
    head = "".join(f'<th scope="col">{named[name]}</th>' for name in used)
    lines = []
    for row, cells in zip(rows, shown, strict=True):
        cells["at"] += f" <code>{escape(row.code)}</code>" if row.code and not code_below else ""
        kinds = {"for": ["ls-for"], "waits in": ["ls-in"] if row.waits and not text.is_in_its_own_code(row) else []}
        for name in ("waits in", "tensor", "for"):
            kinds.setdefault(name, []).extend(["ls-short"] if 0 < len(cells[name]) <= SHORT else [])
        # with spaces between, at which the lines of a narrow screen break
        line = " ".join(f"<td{_class(kinds.get(name))}>{cells[name]}</td>" for name in used)
        lines.append(f"<tr{' class=ls-odd' if row.differs else ''}>{line}</tr>")
    return f"<table class=ls-ranks><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _class(kinds: Sequence[str] | None) -> str:
    return f' class="{" ".join(kinds)}"' if kinds else ""


def _indented(source: str) -> str:
    """A line of code whose indent stays where it wraps. It is of no-break spaces: HTML parsers drop others."""
    code = source.lstrip()
    return f"<i>{'&nbsp;' * (len(source) - len(code))}</i><i>{escape(code)}</i>" if code != source else escape(source)


def frame(lines: Sequence[text.CodeLine]) -> str:
    """The code where the ranks stand, without the indent that all lines have, and with the line marked where they part."""
    indent = min((len(line.source) - len(line.source.lstrip()) for line in lines if line.source.strip()), default=0)
    shown, last = [], 0
    for line in lines:
        if 0 < last < line.number - 1:
            shown.append('<div><span class="ls-no">…</span><span></span><span></span></div>')
        last = line.number
        shown.append(
            f'<div{" class=ls-branch" if line.branch else ""}><span class="ls-no">{line.number}</span>'
            f"<span>{_indented(line.source[indent:])}</span>"
            f'<span class="{"ls-red" if line.differs else "ls-soft"}">{escape(line.note)}</span></div>'
        )
    return f'<div class="ls-code">{"".join(shown)}</div>' if shown else ""
