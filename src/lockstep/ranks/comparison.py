"""Compares the replicas of a run as the ranks report them: keeps what is still open, and the first step that differs.

The supervisor feeds it. It forgets every step at which all ranks agreed, so a long run takes no more memory than a
short one.
"""

from __future__ import annotations

from .messages import Compared, NotFinite, Replica

OPEN_STEPS = 1000

Words = dict[int, Replica]  # What each rank said of one step


def titles(names: list[str], word: Replica) -> list[str]:
    """What to call the parameters of one rank's word: its modules' `names` where they are known to fit."""
    count = len(word.parameters)
    if word.optimizer or len(names) != count:
        return [f"parameter {number} of optimizer {word.optimizer}" for number in range(count)]
    return names


class Comparison:
    """Of one run. `first` is what the ranks said of the first step at which a parameter differed, `before` of the one
    before."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.names: dict[int, list[str]] = {}
        self.open: dict[tuple[int, int], Words] = {}
        self.compared = 0
        self.same_work = 0
        self.statistics: list[str] = []
        self.first: Words | None = None
        self.steps: dict[int, int] = {}
        self.not_finite: dict[int, NotFinite] = {}

    def take(self, rank: int, message: Replica | NotFinite) -> None:
        """One rank's word on one step of one optimizer, or, once, that its numbers are no numbers any more."""
        if isinstance(message, NotFinite):
            self.not_finite.setdefault(rank, message)
            return
        optimizer, step = message.optimizer, message.step
        if step == 0 and optimizer == 0:
            self.names[rank] = message.names
        self.steps[rank] = self.steps.get(rank, 0) + (step > 0)
        if self.first is not None:
            return
        words = self.open.setdefault((optimizer, step), {})
        words[rank] = message
        if len(words) == self.world_size:
            del self.open[optimizer, step]
            self._compare(words, step)
        elif len(self.open) > OPEN_STEPS:
            del self.open[min(self.open)]

    def _compare(self, words: Words, step: int) -> None:
        self.compared += step > 0
        ranks = sorted(words)
        if any(self._by_name(words, rank) != self._by_name(words, ranks[0]) for rank in ranks):
            self.first = words
            self.open.clear()
            return
        brought = [words[rank].brought for rank in ranks]
        self.same_work += bool(brought[0]) and all(
            one == brought[0] and all(print_ for print_, _ in one) for one in brought
        )
        if not self.statistics:
            buffers = [words[rank].buffers for rank in ranks]
            self.statistics = [name for name in buffers[0] if any(one.get(name) != buffers[0][name] for one in buffers)]

    def _by_name(self, words: Words, rank: int) -> dict[str, int]:
        return dict(zip(titles(self.names.get(rank, []), words[rank]), words[rank].parameters, strict=True))

    def found(self) -> Compared | None:
        """What the client needs; None when no optimizer was seen."""
        if not self.steps and not self.not_finite:
            return None
        ranks = range(self.world_size)
        return Compared(
            self.compared, self.same_work, self.statistics, [self.steps.get(rank, 0) for rank in ranks],
            [self.names.get(rank, []) for rank in ranks],
            [self.first[rank] for rank in sorted(self.first)] if self.first is not None else [],
            sorted(self.not_finite.items(), key=lambda item: item[0]),
        )  # fmt: skip
