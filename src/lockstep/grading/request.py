"""What a grading is asked to do: one object, from the command line to the process that grades."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from .verdict import CheckResult

OnCheck = Callable[[str, CheckResult], None]
"""Called with an exercise and one of its checks as soon as that has concluded."""


def _learner_folder() -> Path | None:
    named = os.environ.get("LOCKSTEP_SUBMISSION")
    return Path(named).resolve() if named else None


@dataclass(frozen=True)
class GradeRequest:
    """Which exercises of which submission are graded, and how.

    `submission` is a file or folder that was handed in. None stands for the learner's own files: in `learner_folder`
    (LOCKSTEP_SUBMISSION, where that is set) or in `exercises/`. Reports name paths relative to `directory`.

    `seed` decides what inputs are drawn; None draws one. `isolation` names the tier in which the ranks run
    (`isolation.TIERS`), None being for your own code. `checks` restricts it to checks whose ids contain this, and those
    that they need; with `alone` without these, which are taken as passed. With `until_failure` nothing is run after the
    first check that fails. `missing` exercises were not handed in: their checks are collected, and told as not run.
    """

    exercises: tuple[str, ...]
    submission: Path | None = None
    seed: int | None = None
    device: str = "cpu"
    isolation: str | None = None
    checks: str = ""
    alone: bool = False
    until_failure: bool = False
    missing: tuple[str, ...] = ()
    learner_folder: Path | None = field(default_factory=_learner_folder)
    directory: Path = field(default_factory=Path.cwd)
