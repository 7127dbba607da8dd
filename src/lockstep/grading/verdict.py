"""What a grading concludes, as data: every renderer draws from these objects and from nothing else."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import msgspec

from ..ranks.text import CodeLine, Evidence, Row

SCHEMA = 1
NOT_HANDED_IN = "not handed in"  # The reason of a check that was not run because its exercise's file is missing
UNWRITTEN = "not-implemented"  # The id of the diagnosis that a part is still as it was handed out


def nothing_written(todo: str) -> str:
    """The message of that diagnosis."""
    return "Nothing is written here yet." + (f"\nTo do: {todo}." if todo else "")


OF_THE_FILE = {
    "syntax-error": "the file is not valid Python",
    "import-error": "the file cannot be imported",
    "group-on-import": "the file joins a process group when it is imported",
}
"""Diagnoses that are about the file and no check's subject, with the headline of each."""


class CheckOutcome(str, Enum):
    """Three values. What could not run is neither failed nor passed."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_RUN = "not run"


@dataclass(frozen=True)
class Diagnosis:
    """Why a check failed.

    `id` is a key of the catalogue. `message` says what was seen, with the submission's own numbers and ranks; an expert
    needs only its first line. `rows` are a hang's table, `code` the lines where its ranks stand; `evidence` is longer
    text (a traceback), and in older reports the table. `file` and `line` point into the submission; `source` is that
    line.
    """

    id: str
    message: str
    evidence: str = ""
    ranks: tuple[int, ...] = ()
    file: str | None = None
    line: int | None = None
    read: str = ""
    why: str = ""
    source: str = ""
    rows: tuple[Row, ...] = ()
    code: tuple[CodeLine, ...] = ()

    @property
    def proof(self) -> Evidence:
        """The table, the longer text and the code."""
        return Evidence(self.rows, self.evidence, self.code)

    @property
    def place(self) -> str:
        """`exercises/train_ddp.py:64`, as far as it is known."""
        return f"{self.file}:{self.line}" if self.line else self.file or ""


@dataclass(frozen=True)
class CheckResult:
    """One check: its name in the learner's words, how it went, and what the ranks printed meanwhile.

    `reason` says why it was not run. `lacking` is set when the grading machine lacks something: no grade counts it.
    `stage` is what its stage has the learner do, for an exercise that is written in stages.
    """

    name: str
    id: str
    outcome: CheckOutcome
    diagnosis: Diagnosis | None = None
    reason: str = ""
    output: str = ""
    seconds: float = 0.0
    lacking: bool = False
    stage: str = ""

    @property
    def headline(self) -> str:
        """What the lines of a failure are about: the check's name, or what is wrong with the file before any check."""
        return OF_THE_FILE.get(self.diagnosis.id, self.name) if self.diagnosis else self.name


@dataclass(frozen=True)
class ExerciseResult:
    """All checks of one exercise. Each passed check is one point."""

    name: str
    checks: tuple[CheckResult, ...]
    seconds: float = 0.0
    submission: str = ""

    @property
    def passed(self) -> bool:
        """True when there are checks and every one of them passed."""
        return bool(self.checks) and all(check.outcome is CheckOutcome.PASSED for check in self.checks)

    @property
    def score(self) -> int:
        """How many checks passed."""
        return sum(check.outcome is CheckOutcome.PASSED for check in self.checks)

    @property
    def max_score(self) -> int:
        """How many checks there are."""
        return len(self.checks)

    @property
    def wrong(self) -> tuple[str, ...]:
        """Ids of what failed on its own subject, diagnosis and check: the part is written, in a file that works."""
        failed = (check for check in self.checks if check.outcome is CheckOutcome.FAILED)
        ids = ((check.diagnosis.id if check.diagnosis else "", check.id) for check in failed)
        return tuple(id for pair in ids if pair[0] not in {UNWRITTEN, *OF_THE_FILE} for id in pair if id)

    @property
    def summary(self) -> str:
        """`4 of 10 checks passed · 1.2 s`; `not begun` for a stub."""
        failed = [check for check in self.checks if check.outcome is CheckOutcome.FAILED]
        if failed and not self.score and all(one.diagnosis and one.diagnosis.id == UNWRITTEN for one in failed):
            return f"not begun; {self.max_score} checks wait for your code"
        return f"{self.score} of {self.max_score} checks passed · {self.seconds:.1f} s"

    @property
    def stage(self) -> str:
        """The first stage that is not passed: `stage 3 of 7, …`.

        Empty before a check has passed, as for an untouched stub, after the last stage, and if there are none.
        """
        if not any(check.outcome is CheckOutcome.PASSED for check in self.checks):
            return ""
        stages = list(dict.fromkeys(check.stage for check in self.checks if check.stage))
        missing = {check.stage for check in self.checks if check.outcome is not CheckOutcome.PASSED}
        ahead = ((number, name) for number, name in enumerate(stages, 1) if name in missing)
        return next((f"stage {number} of {len(stages)}, {name}" for number, name in ahead), "")

    @property
    def lacking(self) -> int:
        """How many checks this machine could not run, whatever is handed in."""
        return sum(check.lacking for check in self.checks)

    @property
    def diagnoses(self) -> tuple[Diagnosis, ...]:
        """What the failed checks found, in order."""
        return tuple(check.diagnosis for check in self.checks if check.diagnosis is not None)


@dataclass(frozen=True)
class Report:
    """A grading. `faults` are our own: checks that broke instead of concluding. They cost nobody a point.

    `isolation` names the tier in which the submission's ranks ran (`isolation.TIERS`); empty for one's own code.
    """

    seed: int
    exercises: tuple[ExerciseResult, ...]
    device: str = "cpu"
    faults: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    isolation: str = ""

    @property
    def passed(self) -> bool:
        """True when every exercise passed and nothing of ours broke."""
        return bool(self.exercises) and not self.faults and all(exercise.passed for exercise in self.exercises)

    @property
    def exit_code(self) -> int:
        """0 all passed, 1 something failed or could not run, 3 our own fault."""
        if self.faults:
            return 3
        return 0 if self.passed else 1

    def to_json(self) -> dict[str, Any]:
        """Schema 1: names in it stay; new ones may come."""
        plain: dict[str, Any] = json.loads(json.dumps(msgspec.to_builtins(self)))  # with lists for tuples
        for item, exercise in zip(plain["exercises"], self.exercises, strict=True):
            item |= {"passed": exercise.passed, "score": exercise.score, "max_score": exercise.max_score}
        return {"schema": SCHEMA, "passed": self.passed, **plain}


def from_json(raw: Any) -> Report:
    """Read a report back. Raises ValueError for anything that is not a report of schema 1."""
    if not isinstance(raw, dict) or raw.get("schema") != SCHEMA:
        raise ValueError(f"this is not a report of schema {SCHEMA}")
    return msgspec.convert(raw, Report)
