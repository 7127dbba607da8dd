"""Start N processes as ranks, watch them, explain what went wrong.

    from lockstep import ranks
    run = ranks.run(ranks.Script("train.py"), world_size=4)
    print(run.cause.headline if run.cause else "all ranks returned")

This floor knows nothing of what is built on it. It needs torch, msgspec and the standard library.
"""

from __future__ import annotations

from typing import Any

from .client import RanksError, run, served_by, start_method, stop, warm
from .job import Function, Job, Meeting, Program, Script, Source, Target
from .network import Network, NotRun
from .report import Cause, Collective, Error, Frame, Kind, Mark, Outcome, RankReport, Stack, Waiting
from .result import Run

__all__ = [
    "Cause", "Collective", "Error", "Frame", "Function", "Job", "Kind", "Mark", "Meeting", "Network", "NotRun", "Outcome", "Program",
    "RankReport", "RanksError", "Run", "Script", "Source", "Stack", "Target", "Waiting", "draw", "mark", "observe", "run", "served_by", "start_method",
    "stop", "warm",
]  # fmt: skip


def observe(name: str, value: Any) -> None:
    """On a rank: report a number, a text, a tensor, or lists and dictionaries of these, under this name.

    Whoever started the run finds it in `run.ranks[r].observations[name]`. Raises TypeError for anything else, and
    RuntimeError in a process that Lockstep did not start.
    """
    from .recorder import current

    current().observe(name, value)


def draw(shown: Any) -> float:
    """On a rank: show what it has now (as `observe` takes it), and get a number that this rank alone is given, and only now.

    The number comes from outside of the ranks, and what was shown stays shown, in order: `run.ranks[r].shown`. So what a
    rank shows after others have drawn, and what depends on their numbers, has come to it from them in between. Whoever
    started the run knows the numbers by `Run.drawn`.
    """
    from .recorder import current

    return current().draw(shown)


def mark(name: str) -> None:
    """On a rank: note a point in time, in order with this rank's collectives. See `report.Mark`."""
    from .recorder import current

    current().mark(name)
