"""What the course adds to runs, for those who start or show them: `lockstep.ranks` itself knows of no course."""

from __future__ import annotations

from ..ranks.report import Topic
from ..ranks.text import NOWHERE, ReadOn
from .course import find
from .toml import CourseError

PRELOADED = ("sklearn.datasets", "lockstep.cluster")  # Modules that exercises and chapters want on their ranks
READ_ON: ReadOn = {
    Topic.HANGS: 'chapter 3, "Hangs"',
    Topic.MISMATCHES: 'chapter 3, "Mismatches"',
    Topic.FAILURES: 'chapter 3, "Reading failures"',
}


def read_on() -> ReadOn:
    """Where the course explains how a run ended; nowhere when there is no course around."""
    try:
        find()
    except CourseError:
        return NOWHERE
    return READ_ON
