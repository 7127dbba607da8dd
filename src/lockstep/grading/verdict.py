"""What a grading concludes, as data: every renderer draws from these objects and from nothing else."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

SCHEMA = 1


class CheckOutcome(str, Enum):
    """Three values. What could not run is neither failed nor passed."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_RUN = "not run"


@dataclass(frozen=True)
class Diagnosis:
    """Why a check failed.

    `id` is a key of the catalogue. `message` says what was seen, with the submission's own numbers and ranks; its first
    line is enough for the one who knows. `evidence` is longer text (a hang's table, a traceback). `file` and `line` point
    into the submission.
    """

    id: str
    message: str
    evidence: str = ""
    ranks: tuple[int, ...] = ()
    file: str = ""
    line: int | None = None
    read: str = ""
    why: str = ""
    source: str = ""


@dataclass(frozen=True)
class CheckResult:
    """One check: its name in the learner's words, how it went, and what the ranks printed meanwhile.

    `lacking` tells of one that was not run because the grading machine lacks something: a grade does not count it.
    """

    name: str
    id: str
    outcome: CheckOutcome
    diagnosis: Diagnosis | None = None
    reason: str = ""
    output: str = ""
    seconds: float = 0.0
    lacking: bool = False


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
        return {
            "schema": SCHEMA,
            "seed": self.seed,
            "device": self.device,
            "passed": self.passed,
            "exercises": [_exercise_json(exercise) for exercise in self.exercises],
            "faults": list(self.faults),
            "versions": self.versions,
            "isolation": self.isolation,
        }


def _exercise_json(exercise: ExerciseResult) -> dict[str, Any]:
    return {
        "name": exercise.name,
        "passed": exercise.passed,
        "score": exercise.score,
        "max_score": exercise.max_score,
        "seconds": round(exercise.seconds, 3),
        "submission": exercise.submission,
        "checks": [check_json(check) for check in exercise.checks],
    }


def check_json(check: CheckResult) -> dict[str, Any]:
    """One check as plain data."""
    return {
        "name": check.name,
        "id": check.id,
        "outcome": check.outcome.value,
        "diagnosis": _diagnosis_json(check.diagnosis),
        "reason": check.reason,
        "lacking": check.lacking,
        "output": check.output,
        "seconds": round(check.seconds, 3),
    }


def check_from_json(raw: dict[str, Any]) -> CheckResult:
    """The inverse of `check_json`."""
    known = raw["diagnosis"]
    diagnosis = Diagnosis(**{**known, "ranks": tuple(known["ranks"]), "file": known["file"] or ""}) if known else None
    return CheckResult(
        raw["name"],
        raw.get("id", ""),
        CheckOutcome(raw["outcome"]),
        diagnosis,
        raw.get("reason", ""),
        raw["output"],
        raw.get("seconds", 0.0),
        raw.get("lacking", False),
    )


def _diagnosis_json(diagnosis: Diagnosis | None) -> dict[str, Any] | None:
    if diagnosis is None:
        return None
    return asdict(diagnosis) | {"ranks": list(diagnosis.ranks), "file": diagnosis.file or None}


def from_json(raw: dict[str, Any]) -> Report:
    """Read a report back; raises KeyError or ValueError when it is none of schema 1."""
    if raw.get("schema") != SCHEMA:
        raise ValueError(f"this report has schema {raw.get('schema')}, not {SCHEMA}")
    exercises = []
    for item in raw["exercises"]:
        checks = tuple(check_from_json(check) for check in item["checks"])
        exercises.append(ExerciseResult(item["name"], checks, item["seconds"], item.get("submission", "")))
    return Report(
        raw["seed"],
        tuple(exercises),
        raw.get("device", "cpu"),
        tuple(raw.get("faults", ())),
        raw.get("versions", {}),
        raw.get("isolation", ""),
    )
