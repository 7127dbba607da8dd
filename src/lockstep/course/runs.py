"""What the course adds to runs, for those who start or show them: `lockstep.ranks` itself knows of no course."""

from __future__ import annotations

from collections.abc import Iterable

from .. import ranks
from ..ranks.report import Topic
from ..ranks.text import NOWHERE, ReadOn
from .course import find
from .toml import CourseError

SLOW = "sklearn.datasets"  # takes as long to import as torch
PRELOADED = (SLOW, "lockstep.cluster")  # Modules that exercises and chapters want on their ranks
DIGITS = ("launch_distributed", "train_ddp", "train")  # The exercises whose ranks want the slow one
READ_ON: ReadOn = {
    Topic.HANGS: 'chapter 3, "Hangs"',
    Topic.MISMATCHES: 'chapter 3, "Mismatches"',
    Topic.FAILURES: 'chapter 3, "Reading failures"',
}


def warm(exercises: Iterable[str]) -> None:
    """As `ranks.warm`, for the ranks of these exercises."""
    ranks.warm(preloaded(exercises))


def preloaded(exercises: Iterable[str]) -> tuple[str, ...]:
    """The modules that the ranks of these exercises want."""
    return PRELOADED if {*DIGITS} & {*exercises} else PRELOADED[1:]


def read_on() -> ReadOn:
    """Where the course explains how a run ended; nowhere when there is no course around."""
    try:
        find()
    except CourseError:
        return NOWHERE
    return READ_ON
