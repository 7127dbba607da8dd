"""Two ways to add up a tensor over N ranks: who sends what to whom, step by step. Chapter 1's pictures show it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

NUMBER_BYTES = 4  # float32


class How(str, Enum):
    ADD = "add"  # adds the sender's present numbers to its own
    COPY = "copy"  # puts them in place of its own
    OWN = "own"  # adds what the sender had in the beginning, whatever it has by now


@dataclass(frozen=True)
class Move:
    sender: int
    receiver: int
    chunk: int
    how: How


@dataclass(frozen=True)
class Step:
    """Messages that travel at the same time."""

    phase: str
    moves: tuple[Move, ...]


@dataclass(frozen=True)
class Schedule:
    """A whole all-reduce among `ranks`, of a tensor cut into `chunks`."""

    name: str
    ranks: int
    chunks: int
    steps: tuple[Step, ...]


def ring(ranks: int) -> Schedule:
    """Reduce-scatter, then all-gather: each rank sends one chunk a step to its right neighbor, 2(N−1) times."""
    right = [(rank + 1) % ranks for rank in range(ranks)]
    steps = []
    for step in range(ranks - 1):
        moves = [Move(rank, right[rank], (rank - step) % ranks, How.ADD) for rank in range(ranks)]
        steps.append(Step("reduce-scatter", tuple(moves)))
    for step in range(ranks - 1):
        moves = [Move(rank, right[rank], (rank + 1 - step) % ranks, How.COPY) for rank in range(ranks)]
        steps.append(Step("all-gather", tuple(moves)))
    return Schedule("ring", ranks, ranks, tuple(steps))


def naive(ranks: int) -> Schedule:
    """Everybody sends the whole tensor to everybody, one after the other."""
    steps = [
        Step("every rank to every rank", tuple(Move(rank, (rank + d) % ranks, 0, How.OWN) for rank in range(ranks)))
        for d in range(1, ranks)
    ]
    return Schedule("naive", ranks, 1, tuple(steps))


def bounds(length: int, chunks: int) -> list[int]:
    """Where the chunks begin and, last, where the tensor ends; the first chunks are longer when it does not divide."""
    small, longer = divmod(length, chunks)
    return [index * small + min(index, longer) for index in range(chunks + 1)]


def brought(ranks: int, length: int) -> list[list[int]]:
    """What each rank has in the beginning: digits from 1 to 9, the same in every run."""
    return [[(7 * rank + 4 * index + rank * index) % 9 + 1 for index in range(length)] for rank in range(ranks)]


def states(schedule: Schedule, values: list[list[int]]) -> list[list[list[int]]]:
    """The numbers of every rank before the first step and after each."""
    ends = bounds(len(values[0]), schedule.chunks)
    history = [[list(row) for row in values]]
    for step in schedule.steps:
        before = history[-1]
        after = [list(row) for row in before]
        for move in step.moves:
            source = values if move.how is How.OWN else before
            for index in range(ends[move.chunk], ends[move.chunk + 1]):
                sent = source[move.sender][index]
                after[move.receiver][index] = sent if move.how is How.COPY else after[move.receiver][index] + sent
        history.append(after)
    return history


def bytes_sent(schedule: Schedule, length: int) -> list[int]:
    """What each rank sends in all steps together, for `length` numbers of float32."""
    ends = bounds(length, schedule.chunks)
    sent = [0] * schedule.ranks
    for step in schedule.steps:
        for move in step.moves:
            sent[move.sender] += (ends[move.chunk + 1] - ends[move.chunk]) * NUMBER_BYTES
    return sent
