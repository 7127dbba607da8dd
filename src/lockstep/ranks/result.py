"""What a run comes back as: the reports of its ranks, and why it ended as it did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from . import draws
from .mismatch import first_mismatch
from .report import Cause, Collective, Outcome, RankReport, Replicas


def latest(workers: Sequence[RankReport]) -> list[RankReport]:
    """The workers of a launcher's last launch: for each rank the one that was started last."""
    return sorted({report.rank: report for report in workers}.values(), key=lambda report: report.rank)


@dataclass
class Run:
    """The result of a run: the reports of its ranks in order, and the cause when it did not end well.

    `workers` are processes that a rank itself started through `torch.multiprocessing` (a launcher's ranks).
    `replicas` is there when they were watched, `signal` is what this process was told to end by.
    `wire[a][b]` is how many bytes the kernel has seen arrive at rank b from rank a; None when it was not asked, or doesn't tell.
    `hosts` are the names of the nodes' machines when each has its own. Then `node` is the number of this one, and any but
    node 0 has only its own ranks here.
    `began` is the start of the run by `time.monotonic()`, from which the times of collectives and marks count.
    """

    world_size: int
    device: str
    ranks: list[RankReport]
    workers: list[RankReport] = field(default_factory=list)
    cause: Cause | None = None
    replicas: Replicas | None = None
    seconds: float = 0.0
    began: float | None = None
    signal: int | None = None
    wire: list[list[int]] | None = None
    secret: str = ""
    left_running: list[str] = field(default_factory=list)
    left_files: list[str] = field(default_factory=list)
    node: int = 0
    hosts: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """True when every rank ended as it should: returned, or, for a script, left with status 0."""
        return self.cause is None

    @property
    def members(self) -> list[RankReport]:
        """The ranks; of a launcher, those that it started, as soon as there are some."""
        return latest(self.workers) or self.ranks

    @property
    def outcomes(self) -> list[Outcome]:
        return [report.outcome for report in self.ranks]

    @property
    def silent_mismatch(self) -> dict[int, Collective]:
        """The first collective in which ranks met with different calls, sizes, types or reductions: {rank: its call}.

        Also when the run ended well: gloo mixes unrelated tensors of equal size without a word.
        Empty when there is none.
        """
        return first_mismatch([*self.ranks, *latest(self.workers)]) or {}

    def observed(self, name: str) -> list[Any]:
        """What each rank observed under this name, in rank order; None for a rank that did not."""
        return [report.observations.get(name) for report in self.ranks]

    @property
    def shown(self) -> list[list[Any]]:
        """What each rank has shown (`ranks.draw`), in order."""
        return [report.shown for report in self.ranks]

    def drawn(self, rank: int, count: int) -> float:
        """What the rank was given for what it showed after `count` other things (`ranks.draw`)."""
        return draws.drawn(self.secret, rank, count)

    @property
    def collectives(self) -> list[list[Collective]]:
        """Each rank's communication calls, in the order in which it made them."""
        return [report.collectives for report in self.ranks]
