"""Which check is hard: how each one ended over a class, and what was found where it failed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..classroom import ClassResult, was_handed_in
from ..verdict import CheckOutcome
from .csv_grades import cell, csv_text


@dataclass
class Item:
    """One check over all who handed in its exercise. `diagnoses` counts what was found where it failed."""

    exercise: str
    id: str
    name: str
    ends: Counter[CheckOutcome] = field(default_factory=Counter)
    diagnoses: Counter[str] = field(default_factory=Counter)

    @property
    def handed_in(self) -> int:
        return self.ends.total()

    @property
    def frequent(self) -> tuple[tuple[str, int], ...]:
        """The diagnoses, the most frequent first."""
        return tuple(sorted(self.diagnoses.items(), key=lambda one: (-one[1], one[0])))


def items(graded: ClassResult) -> list[Item]:
    """Every check of the class, in the course's order."""
    found: dict[tuple[str, str], Item] = {}
    for name in graded.exercises:
        for result in (one for learner in graded.learners for one in learner.exercises if one.name == name):
            for check in result.checks:
                item = found.setdefault((name, check.id), Item(name, check.id, check.name))
                if was_handed_in(result):
                    item.ends[check.outcome] += 1
                    item.diagnoses.update([check.diagnosis.id] if check.diagnosis else [])
    return list(found.values())


def items_csv(graded: ClassResult) -> str:
    """A row for each check: how many handed in, passed and failed, how many it was not run for, and the diagnoses."""
    rows: list[Sequence[object]] = [
        ("exercise", "check", "title", "handed_in", "passed", "failed", "not_run", "diagnoses")
    ]
    for one in items(graded):
        said = "; ".join(f"{id} {count}" for id, count in one.frequent)
        ends = (one.ends[end] for end in (CheckOutcome.PASSED, CheckOutcome.FAILED, CheckOutcome.NOT_RUN))
        rows.append((cell(one.exercise), cell(one.id), cell(one.name), one.handed_in, *ends, cell(said)))
    return csv_text(rows)


def checks_csv(graded: ClassResult) -> str:
    """A row for each learner, a column for each check: how it ended; empty where it was not graded."""
    columns = [(one.exercise, one.id) for one in items(graded)]
    rows: list[Sequence[object]] = [("learner", *(cell(f"{name}: {check}") for name, check in columns))]
    for one in graded.learners:
        ends = {(result.name, check.id): check.outcome.value for result in one.exercises for check in result.checks}
        rows.append((cell(one.id), *(ends.get(column, "") for column in columns)))
    return csv_text(rows)
