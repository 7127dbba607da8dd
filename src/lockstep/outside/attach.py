"""Explains a job that is running: which ranks wait, where and for whom, and what those others do.

Stacks and counters tell that, not who is wrong: ranks that wait in different calls are shown, and none is accused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from ..ranks import text
from ..ranks.places import IN_DDP
from ..ranks.processes import descendants
from ..ranks.report import OWN_CODE, Frame, Waiting
from ..ranks.text import place
from ..ranks.words import at, located, names, one_or_more, wait
from . import watch
from .jobs import Job
from .watch import Seen

CALLERS = 4  # The most of the user's frames that are shown of a rank that others wait for
SAID = {**IN_DDP, "wait": "wait()"}
UNNUMBERED = (
    "Calls cannot be counted from outside: two ranks at one line may be in different rounds of a loop. Started with "
    "`lockstep run`, the job has its calls counted."
)


class Verdict(str, Enum):
    """What is to be said of a job. `HANG` and `WAITING` differ in that a rank may still come, or not."""

    HANG = "HANG"
    WAITING = "WAITING"
    MOVES = "NO HANG"


@dataclass(frozen=True)
class Position:
    """One rank: what it and the processes below it do. `own` is None when it could not be read. `node` is the name of its
    machine, if several were looked at.
    """

    rank: int
    pid: int
    own: Seen | None
    children: tuple[Seen, ...] = ()
    node: str = ""

    @property
    def call(self) -> str:
        return self.own.main.call if self.own else ""

    @property
    def frame(self) -> Frame | None:
        return self.own.place if self.own else None

    @property
    def moves(self) -> bool:
        """True when it, or a process of its own, has done something."""
        return self.own is None or any(one.moves for one in (self.own, *self.children))

    @property
    def waits(self) -> bool:
        """True when it was in one communication call all the time."""
        return bool(self.call) and not self.moves

    @property
    def doing(self) -> str:
        """What it does when it is in no communication call: `sleeps`."""
        if self.own is None:
            return "runs, and its stack cannot be read"
        if any(frame.file.endswith("utils/data/dataloader.py") for frame in self.own.main.frames):
            return "waits for its data loader"
        return self.own.doing


@dataclass(frozen=True)
class Explained:
    """What `attach` says. `still` tells that nothing moved which could end the wait."""

    verdict: Verdict
    headline: str
    still: bool
    job: Job
    positions: tuple[Position, ...]
    late: tuple[Position, ...] = ()
    notes: tuple[str, ...] = ()


def attach(job: Job, seconds: float) -> Explained:
    """Look at the job for this many seconds. Raises NotPermitted and NoSampler."""
    return explain(job, look(job, seconds))


def look(job: Job, seconds: float) -> list[Position]:
    """Where its ranks on this machine are. Raises NotPermitted and NoSampler."""
    below = {rank: descendants(pid) for rank, pid in job.processes.items()}
    seen = watch.look([*job.processes.values(), *(pid for pids in below.values() for pid in pids)], seconds)
    return [
        Position(rank, pid, seen.get(pid), tuple(seen[child] for child in below[rank] if child in seen))
        for rank, pid in job.processes.items()
    ]


def explain(job: Job, positions: Sequence[Position]) -> Explained:
    """What these positions mean."""
    waiting = [one for one in positions if one.waits]
    late = [one for one in positions if not one.waits]
    moving = any(one.moves for one in late)
    notes = _notes(job)
    if not waiting:
        said = (
            "no rank waits in a communication call."
            if moving
            else "no rank moves, and none is in a communication call."
        )
        verdict = Verdict.MOVES if moving else Verdict.WAITING
        return Explained(verdict, said, not moving, job, tuple(positions), () if moving else tuple(late), tuple(notes))
    where = _groups(waiting)
    place_ = f" in {said_of(waiting[0])}{at(waiting[0].frame)}" if len(where) == 1 else " in different calls"
    who = f"{wait(one.rank for one in waiting)}{place_}"
    ended = f"{names(job.missing)} {one_or_more(job.missing, 'has', 'have')} ended" if job.missing else ""
    if late:
        others = "; ".join(f"rank {one.rank} {_does(one)}" for one in late)
        headline = f"{who}. {others[:1].upper() + others[1:]}{'; ' + ended if ended else ''}."
    elif ended:
        headline = f"{who}; {ended}."
    elif len(waiting) == 1:
        headline = f"{who}, and it is alone."
    elif len(where) == 1:
        headline = f"all ranks wait{place_}, and nothing moves."
    else:
        parts = [f"{names(one.rank for one in group)} in {said_of(group[0])}{at(group[0].frame)}" for group in where]
        headline = f"{'; '.join(parts)}: the ranks wait for each other."
    if not late:
        notes.insert(0, UNNUMBERED)
    verdict = Verdict.WAITING if late else Verdict.HANG
    return Explained(verdict, headline, not moving, job, tuple(positions), tuple(late), tuple(notes))


def said_of(position: Position) -> str:
    """The call, as the table of a run says it."""
    return SAID.get(position.call, position.call)


def _groups(waiting: Sequence[Position]) -> list[list[Position]]:
    """Those that wait in the same call at the same line, the most first."""
    found: dict[tuple[str, Frame | None], list[Position]] = {}
    for one in waiting:
        found.setdefault((one.call, one.frame), []).append(one)
    return sorted(found.values(), key=lambda group: (-len(group), group[0].rank))


def _does(position: Position) -> str:
    if position.call:
        return f"moves in {said_of(position)}{at(position.frame)}"
    return f"{position.doing}{at(position.frame)}"


def _notes(job: Job) -> list[str]:
    notes = []
    if job.guessed:
        notes.append(
            "These processes do not say which rank they are: they are numbered in the order of their process ids."
        )
    if job.remote:
        notes.append(f"{names(job.remote).capitalize()} {one_or_more(job.remote, 'runs', 'run')} on other machines: "
                     "--slurm JOB or --hosts NAMES asks these too.")  # fmt: skip
    return notes


# What is shown ---------------------------------------------------------------------------------------------------


def rows(found: Explained) -> tuple[Waiting, ...]:
    """One row for each rank that should be here; an arrow marks those that the others wait for."""
    late = {one.rank for one in found.late}
    told = {one.rank: said_of(one) if one.call else f"{OWN_CODE}: {one.doing}" for one in found.positions}
    shown = [
        Waiting(one.rank, told[one.rank], "", None, one.frame, one.rank in late, one.node) for one in found.positions
    ]
    shown += [Waiting(rank, "nothing: its process has ended", differs=True, waits=False) for rank in found.job.missing]
    marks = any(not row.differs for row in shown)  # an arrow at every rank would point at none
    return tuple(sorted((row if marks else replace(row, differs=False) for row in shown), key=lambda row: row.rank))


def details(found: Explained) -> list[str]:
    """For each rank that others wait for: how its code came there, what its other threads and its processes do."""
    lines: list[str] = []
    for one in found.late:
        if one.own is None or one.frame is None:
            continue
        lines.append(f"rank {one.rank} is at {place(one.frame)}")
        lines += [f"  called from {place(frame)}" for frame in one.own.main.users[1 : 1 + CALLERS]]
        for thread in one.own.threads:
            if not thread.is_main and thread.users:
                lines.append(f"  its thread {thread.name} is at {place(thread.users[0])}")
        for child in one.children:
            if child.place is not None:
                lines.append(f"  its process {child.pid} {child.doing} at {place(child.place)}")
    return lines


def describe(found: Explained, width: int | None = None) -> str:
    """In full: headline, table, details, notes; `width` is as for `text.Evidence.shown`."""
    more = ("\n".join(f"  {line}" for line in details(found)), "\n".join(found.notes))
    return text.explained(f"{found.verdict.value}: {found.headline}", rows(found), more, width)


def to_json(found: Explained) -> dict[str, Any]:
    def seen(one: Seen) -> dict[str, Any]:
        frames = [[frame.file, frame.line, frame.function] for frame in one.main.frames]
        return {"pid": one.pid, "moves": one.moves, "doing": one.doing, "stack": frames}

    return {
        "verdict": found.verdict.value,
        "still": found.still,
        "headline": found.headline,
        "world_size": found.job.world_size,
        "missing": found.job.missing,
        "remote": found.job.remote,
        "late": [one.rank for one in found.late],
        "ranks": [
            {
                "rank": one.rank,
                "pid": one.pid,
                "node": one.node,
                "call": one.call,
                "waits": one.waits,
                "at": located(one.frame),
                "process": seen(one.own) if one.own else None,
                "children": [seen(child) for child in one.children],
            }
            for one in found.positions
        ],
        "notes": list(found.notes),
    }
