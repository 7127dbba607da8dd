"""How reports speak of ranks, places and sizes."""

from collections.abc import Iterable, Sized

from .report import Frame


def names(ranks: Iterable[int]) -> str:
    """`rank 2`, `ranks 0 and 1`, `ranks 0, 1 and 3`."""
    listed = [str(rank) for rank in sorted(ranks)]
    if len(listed) < 2:
        return f"rank {listed[0]}" if listed else "no rank"
    return f"ranks {', '.join(listed[:-1])} and {listed[-1]}"


def one_or_more(ranks: Sized, one: str, more: str) -> str:
    """The verb that fits the number of ranks: `waits`, `wait`."""
    return one if len(ranks) == 1 else more


def at(frame: Frame | None) -> str:
    """` at train.py:7`, or nothing."""
    return f" at {frame.short}" if frame else ""


def line(frame: Frame | None) -> str:
    """` at train.py:7 (time.sleep(100))`, as far as it is known."""
    return at(frame) + (f" ({frame.text})" if frame and frame.text else "")


def located(frame: Frame | None) -> list[str | int] | None:
    """File and line, for JSON."""
    return [frame.file, frame.line] if frame else None


def size(count: int) -> str:
    """`1.5 GiB`, `300 MiB`."""
    return f"{count / (1 << 30):.1f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.0f} MiB"


def first_line(text: str) -> str:
    """The first line that says something."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")
