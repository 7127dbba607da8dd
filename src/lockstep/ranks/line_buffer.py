"""Whole lines from the pieces in which the output of ranks arrives."""

from __future__ import annotations


class LineBuffer:
    """Keeps the unfinished line of each rank and stream until its end comes."""

    def __init__(self) -> None:
        self._unfinished: dict[tuple[int, str], str] = {}

    def take(self, rank: int, stream: str, chunk: str) -> list[str]:
        """The lines that `chunk` completes."""
        *complete, rest = (self._unfinished.pop((rank, stream), "") + chunk).split("\n")
        if rest:
            self._unfinished[rank, stream] = rest
        return complete

    def rest(self) -> list[tuple[int, str, str]]:
        """(rank, stream, text) of what was never finished; afterwards nothing is kept."""
        left = [(rank, stream, text) for (rank, stream), text in sorted(self._unfinished.items())]
        self._unfinished.clear()
        return left
