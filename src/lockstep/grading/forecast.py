"""How long a class still takes: from what a check usually takes, and more and more from those that are graded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .bulk import Grading
from .classroom import Learner
from .intake import Handed

SECONDS_A_CHECK = 1.0
"""Of the reference solutions, alone on two shared cores: 0.3 to 3 from exercise to exercise, 1.1 over all."""
PRIOR = 20  # The checks of this class after which its own seconds count as much as the usual ones


class Forecast:
    """Counts down while learners are graded, `jobs` at once. `checks` are how many checks each learner's work has."""

    def __init__(self, checks: Mapping[str, int], jobs: int) -> None:
        self.checks, self.jobs = checks, jobs
        self.waiting = dict(checks)
        self.seconds, self.counted = PRIOR * SECONDS_A_CHECK, PRIOR

    @classmethod
    def of(cls, grading: Grading, pending: Iterable[Handed], jobs: int) -> Forecast:
        """What is to be expected for these learners; who is graded already in this class counts."""
        numbers = {name: grading.course.count_checks(name) for name in grading.course.names}
        checks = {one.id: sum(numbers[name] for name in grading.exercises(one)) for one in grading.roster}
        waiting = {one.id for one in pending}
        found = cls(checks, jobs)
        found.waiting = {id: number for id, number in checks.items() if id in waiting}
        for learner in filter(None, (grading.known(one) for one in grading.roster if one.id not in waiting)):
            found.count(learner)
        return found

    def count(self, learner: Learner) -> None:
        """This learner is graded, and took so long."""
        number = self.checks.get(learner.id, 0)
        self.waiting.pop(learner.id, None)
        if number and not learner.faulty:
            self.seconds += learner.seconds
            self.counted += number

    @property
    def left(self) -> float:
        """Seconds until all are graded: what is to do shared by all workers, and no shorter than the longest part."""
        parts = self.waiting.values()
        return self.seconds / self.counted * max(sum(parts) / self.jobs, max(parts, default=0))


def about(seconds: float) -> str:
    """`about 40 minutes`, as exact as a forecast is."""
    minutes = seconds / 60
    if minutes < 1:
        return "less than a minute"
    if minutes < 90:
        rounded = round(minutes) if minutes < 10 else 5 * round(minutes / 5)
        return f"about {rounded} minute{'' if rounded == 1 else 's'}"
    hours = f"{minutes / 60:.1f}".removesuffix(".0")
    return f"about {hours} hours"
