"""How reports speak of ranks, places and sizes."""

from __future__ import annotations

from collections.abc import Iterable, Sized
from itertools import groupby

from .report import Frame

MANY = 8
"""With more ranks than this, consecutive ones are named by the first and the last."""


def names(ranks: Iterable[int]) -> str:
    """`rank 2`, `ranks 0 and 1`, `ranks 0, 1 and 3`; of more than `MANY`, `ranks 0 to 6 and 8 to 119`."""
    listed = spans(ranks, " to ")
    if not listed:
        return "no rank"
    if len(listed) == 1:
        return f"rank{'s' if ' ' in listed[0] else ''} {listed[0]}"
    return f"ranks {', '.join(listed[:-1])} and {listed[-1]}"


def spans(ranks: Iterable[int], to: str = "–") -> list[str]:
    """`0`, `1`, `3`; of more than `MANY`, three or more consecutive ones in one: `0–6`, `8–119`."""
    ranks = sorted(ranks)
    if len(ranks) <= MANY:
        return [str(rank) for rank in ranks]
    listed: list[str] = []
    for _, consecutive in groupby(enumerate(ranks), lambda numbered: numbered[1] - numbered[0]):
        span = [str(rank) for _, rank in consecutive]
        listed += span if len(span) < 3 else [f"{span[0]}{to}{span[-1]}"]
    return listed


def one_or_more(ranks: Sized, one: str, more: str) -> str:
    """The verb that fits the number of ranks: `waits`, `wait`."""
    return one if len(ranks) == 1 else more


def wait(ranks: Iterable[int]) -> str:
    """`rank 2 waits`, `ranks 0 and 1 wait`."""
    ranks = list(ranks)
    return f"{names(ranks)} {one_or_more(ranks, 'waits', 'wait')}"


def at(frame: Frame | None) -> str:
    """` at train.py:7`, or nothing."""
    return f" at {frame.short}" if frame else ""


def line(frame: Frame | None) -> str:
    """` at train.py:7 (time.sleep(100))`, as far as it is known."""
    code = frame.text.partition("  #")[0].removesuffix(":") if frame else ""
    return at(frame) + (f" ({code})" if code else "")


def located(frame: Frame | None) -> list[str | int] | None:
    """File and line, for JSON."""
    return [frame.file, frame.line] if frame else None


def size(count: int) -> str:
    """`1.5 GiB`, `300 MiB`."""
    return f"{count / (1 << 30):.1f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.0f} MiB"


def duration(seconds: float) -> str:
    """`30 minutes`, `1 minute`, `90 seconds`."""
    number, unit = (seconds / 60, "minute") if seconds and seconds % 60 == 0 else (seconds, "second")
    return f"{number:g} {unit}{'' if number == 1 else 's'}"


def first_line(text: str) -> str:
    """The first line that says something."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")
