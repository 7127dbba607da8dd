"""The terminal: how wide it is, and what is colored. rich does the work, and knows NO_COLOR and FORCE_COLOR."""

from __future__ import annotations

import os
import re
import sys
from typing import Literal

from rich.console import Console
from rich.text import Text

from ..ranks.text import ODD, TITLES

WIDTH = 100
NARROWEST = 40
PAINTED = (
    (re.compile(r"(?<![\w/.])[\w./-]+\.(?:py|sbatch|sh):\d+"), "cyan"),
    (re.compile(r"(?:Read: .*|[.]/lockstep [a-z]+ [\w/]+)$", re.MULTILINE), "cyan"),
    (re.compile(r"^ *rank +(?:waits in|is in|call|ended) .*", re.MULTILINE), "dim"),
    (re.compile(rf"^ *(?:ranks? )?\d+(?:[\d, to]*\d| ranks)?{ODD}.*", re.MULTILINE), "yellow"),
    (
        re.compile(rf"^(?:{'|'.join([*TITLES.values(), 'DRIFT', 'SAME WORK'])})\b(?:.|\n(?!\n))*", re.MULTILINE),
        "bold red",
    ),
)
"""What is colored in an explanation; the last that matches counts."""


class _Console(Console):
    """A rich console that raises BrokenPipeError; rich itself would end the process."""

    def on_broken_pipe(self) -> None:
        """Called when the reader of a pipe is gone. Raises BrokenPipeError."""
        raise BrokenPipeError


def console(stderr: bool = False) -> Console:
    """The terminal. Texts have their own line breaks. With NO_COLOR there is nothing bold or dim either.

    In a notebook's kernel it is a pipe: rich would make a separate output there, past `redirect_stdout`, and
    ipykernel sets FORCE_COLOR.
    """
    system: Literal["auto"] | None = None if os.environ.get("NO_COLOR") else "auto"
    there = False if "ipykernel" in sys.modules else None
    return _Console(
        highlight=False, soft_wrap=True, stderr=stderr, color_system=system, force_jupyter=False, force_terminal=there
    )


def room(stderr: bool = False) -> int | None:
    """How wide the terminal is; in a pipe, what COLUMNS asks for if that is less than usual, and else no limit."""
    there = console(stderr)
    if there.is_terminal:
        return max(NARROWEST, there.width)
    asked = os.environ.get("COLUMNS", "")
    return max(NARROWEST, int(asked)) if asked.isdecimal() and int(asked) < WIDTH else None


def width(stderr: bool = False) -> int:
    """The same, or the usual width."""
    return room(stderr) or WIDTH


def show_text(text: str, stderr: bool = False) -> None:
    """An explanation, with its headline, the odd rank and the places colored."""
    console(stderr).print(painted(text))


def painted(text: str) -> Text:
    shown = Text(text)
    for pattern, style in PAINTED:
        shown.highlight_regex(pattern, style)
    return shown
