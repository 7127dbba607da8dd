"""A graded class as data, from which every writer of a class's files draws (`writers.WRITERS`).

What a submission said and what a download called its owner are in here as text: each writer makes that harmless.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from .intake import Handed
from .verdict import NOT_HANDED_IN, UNWRITTEN, CheckOutcome, ExerciseResult, Report


class GradingOutcome(str, Enum):
    """How one learner's grading ended. A fault is ours: no points are counted, and none are lost."""

    GRADED = "graded"
    NOTHING = "nothing to grade"
    FAULT = "fault of the grader"


@dataclass(frozen=True)
class Learner:
    """One learner's grading.

    `report` is None when nothing was handed in that could be graded; `handed.refused` says why. `report.faults` are
    ours and remained after `attempts` tries; exercises do not count then. An exercise that was asked for and is
    `missing` is in the report with all its checks not run, for the reason `NOT_HANDED_IN`. `seconds` is the wall time
    of the last attempt, `isolation` how the submission was kept apart, `digest` a hash of what was handed in, and
    `seed` what this learner's inputs were drawn from.
    """

    handed: Handed
    report: Report | None
    seed: int
    digest: str = ""
    attempts: int = 0
    seconds: float = 0.0
    isolation: str = ""
    missing: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        """Stable, unique in the class, safe as a file name."""
        return self.handed.id

    @property
    def outcome(self) -> GradingOutcome:
        if self.report is None:
            return GradingOutcome.NOTHING
        return GradingOutcome.FAULT if self.report.faults else GradingOutcome.GRADED

    @property
    def faulty(self) -> bool:
        return self.outcome is GradingOutcome.FAULT

    @property
    def exercises(self) -> tuple[ExerciseResult, ...]:
        """What counts: empty after a fault of ours and when nothing could be graded."""
        return self.report.exercises if self.report is not None and not self.report.faults else ()

    @property
    def score(self) -> int | None:
        """Points in all; None after a fault of ours."""
        return None if self.faulty else sum(result.score for result in self.exercises)

    @property
    def max_score(self) -> int:
        return sum(result.max_score for result in self.exercises)

    @property
    def diagnoses(self) -> tuple[str, ...]:
        """The ids of what was found wrong, each once, in order."""
        return tuple(dict.fromkeys(found.id for result in self.exercises for found in result.diagnoses))

    def source(self, exercise: str) -> Path:
        """The file handed in for this exercise, whether it is there or not."""
        return self.handed.folder / f"{exercise}.py"


@dataclass(frozen=True)
class ClassResult:
    """A graded class. `learners` are sorted by id; `exercises` are all that were graded, in the course's order.

    `max_scores` has the points of each of them, `isolation` one line on how submissions were kept apart.
    """

    seed: int
    exercises: tuple[str, ...]
    learners: tuple[Learner, ...]
    versions: dict[str, str] = field(default_factory=dict)
    isolation: str = ""
    device: str = "cpu"
    max_scores: dict[str, int] = field(default_factory=dict)

    @property
    def faults(self) -> tuple[Learner, ...]:
        return tuple(learner for learner in self.learners if learner.faulty)

    @property
    def frequent(self) -> tuple[tuple[str, int], ...]:
        """Each mistake's diagnosis and how many learners received it, the most frequent first. That a part is still
        empty is no mistake.
        """
        count = Counter(id for learner in self.learners for id in learner.diagnoses if id != UNWRITTEN)
        return tuple(sorted(count.items(), key=lambda item: (-item[1], item[0])))

    @property
    def exit_code(self) -> int:
        """0 when every grading was completed, 1 when one had a fault of ours."""
        return 1 if self.faults else 0


def seed_of(class_seed: int, learner: str, digest: str) -> int:
    """The seed of one learner's inputs, from 0 to 2³¹ − 1, whoever else is in the class.

    It stands in the learner's report. What is handed in next (`digest_of`) gets another, which only who knows the
    class's seed can compute.
    """
    return int.from_bytes(hashlib.sha256(f"{class_seed}/{learner}/{digest}".encode()).digest()[:4], "big") >> 1


def draw_class_seed() -> int:
    """A class's seed that nobody can find by trying: with 31 bits, a learner's own seed would give it away."""
    return secrets.randbits(63)


def digest_of(handed: Handed) -> str:
    """A hash of the names and bytes that this learner handed in."""
    found = hashlib.sha256()
    for file in handed.files:
        data = (handed.folder / file).read_bytes()
        found.update(f"{file} {len(data)}\n".encode())
        found.update(data)
    return found.hexdigest()


def was_handed_in(result: ExerciseResult) -> bool:
    """False for an exercise that was asked for and is missing."""
    return not all(c.outcome is CheckOutcome.NOT_RUN and c.reason == NOT_HANDED_IN for c in result.checks)
