"""How reports speak of ranks, places and sizes."""

from __future__ import annotations

from collections.abc import Iterable, Sized

from .report import Frame

MOST_LISTED = 8
"""Ranks that are named one by one; of more, neighbors are named by their ends."""


def names(ranks: Iterable[int]) -> str:
    """`rank 2`, `ranks 0 and 1`, `ranks 0, 1 and 3`; of many, `ranks 0 to 48, 50 and 52 to 119`."""
    known = sorted(ranks)
    if len(known) < 2:
        return f"rank {known[0]}" if known else "no rank"
    listed = [str(rank) for rank in known] if len(known) <= MOST_LISTED else runs(known)
    return f"ranks {' and '.join(filter(None, (', '.join(listed[:-1]), listed[-1])))}"


def runs(ranks: list[int]) -> list[str]:
    """`0 to 48`, `50`, `52`, `53`: three neighbors or more in one."""
    neighbors: list[list[int]] = []
    for rank in ranks:
        if neighbors and rank == neighbors[-1][-1] + 1:
            neighbors[-1].append(rank)
        else:
            neighbors.append([rank])
    said: list[str] = []
    for run in neighbors:
        said += [f"{run[0]} to {run[-1]}"] if len(run) > 2 else [str(rank) for rank in run]
    return said


def one_or_more(ranks: Sized, one: str, more: str) -> str:
    """The verb that fits the number of ranks: `waits`, `wait`."""
    return one if len(ranks) == 1 else more


def at(frame: Frame | None) -> str:
    """` at train.py:7`, or nothing."""
    return f" at {frame.short}" if frame else ""


def line(frame: Frame | None) -> str:
    """` at train.py:7 (time.sleep(100))`, as far as it is known."""
    return at(frame) + (f" ({frame.text})" if frame and frame.text else "")


def size(count: int) -> str:
    """`1.5 GiB`, `300 MiB`."""
    return f"{count / (1 << 30):.1f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.0f} MiB"


def first_line(text: str) -> str:
    """The first line that says something."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")
