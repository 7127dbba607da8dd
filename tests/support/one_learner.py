"""A class of one learner, for what is written of whole classes."""

from __future__ import annotations

from pathlib import Path

from lockstep.grading.classroom import ClassResult, Learner
from lockstep.grading.intake import Handed
from lockstep.grading.verdict import Report


def class_of(report: Report | None, shown: str = "Ada", refused: tuple[str, ...] = ()) -> ClassResult:
    """The class whose only learner, `ada`, has this report."""
    names = tuple(result.name for result in report.exercises) if report else ()
    learner = Learner(Handed("ada", shown, Path("/nowhere"), (), refused=refused), report, 7)
    return ClassResult(7, names, (learner,))
