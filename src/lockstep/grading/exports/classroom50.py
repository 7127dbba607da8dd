"""Results for Classroom 50, which replaced GitHub Classroom in August 2026.

Its contract is public: `schemas/result-v1.schema.json` and `schemas/scores-v1.schema.json` of
github.com/foundation50/classroom50, explained on its wiki's page "Advanced Autograding" (both as of 20 August 2026). It
requires that scores are integers from 0 up and no greater than their `max-score`, that times are UTC to the second with
a Z, and that a submission's tag begins with `submit/`.

- `result` is the `result.json` that an `autograder.py` leaves in the working folder (`classroom50/result/v1`); `main`
  makes it inside Classroom 50's own runner.
- `scores` is the gradebook `CLASSROOM/scores.json` (`classroom50/scores/v1`) of a class that was graded on the
  teacher's machine. Its entries are overrides, as the web page writes them for a grade that is typed in: collecting
  scores leaves them alone, and the tag `submit/manual-…` replaces the links that such a grade does not have.

Points become whole numbers check by check or, where a policy gives an exercise other points, exercise by exercise. With
`rounding.to = 1` in the policy, nothing is left to round here.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import Any

from ...course import find
from ..classroom import ClassResult, GradingOutcome, Learner
from ..policy import Grade, Grades
from ..policy_file import SLUG
from ..verdict import CheckOutcome, ExerciseResult, Report
from . import visible
from .gradescope import export, graded_apart

RESULT = "classroom50/result/v1"
SCORES = "classroom50/scores/v1"
LOGIN = re.compile(r"[A-Za-z0-9](?:-?[A-Za-z0-9]){0,38}")
MOST_MESSAGE = 2_000  # characters


@dataclass(frozen=True)
class Handin:
    """A hand-in in Classroom 50. `commit`, `release` and `review` are links; `moment` is when it was handed in."""

    classroom: str
    assignment: str
    owner: str
    submission: str
    commit: str
    release: str
    review: str
    moment: datetime
    kind: str = "individual"

    @classmethod
    def of_environment(cls, environment: Mapping[str, str], now: datetime) -> Handin:
        """From what the runner sets for an `autograder.py`. Raises ValueError naming what is missing."""
        names = ("CLASSROOM", "ASSIGNMENT", "SUBMISSION_TAG", "COMMIT_URL", "RELEASE_URL")
        owner = environment.get("OWNER") or environment.get("USERNAME") or ""
        missing = [name for name in names if not environment.get(name)] + ([] if owner else ["OWNER"])
        if missing:
            raise ValueError(f"{', '.join(missing)} is not set: this runs as an autograder of Classroom 50")
        classroom, assignment, tag, commit, release = (environment[name] for name in names)
        review = environment.get("REVIEW_URL") or commit
        kind = environment.get("ASSIGNMENT_TYPE") or "individual"
        return cls(classroom, assignment, owner, tag, commit, release, review, now, kind)


@dataclass(frozen=True)
class Gradebook:
    """`scores.json` as data, and who is not in it, with the reason."""

    data: dict[str, Any]
    left_out: tuple[str, ...]


def result(report: Report, handin: Handin, grade: Grade | None = None) -> dict[str, Any]:
    """`result.json` as data. Raises ValueError for a report with faults of ours: those must not cost points."""
    if report.faults:
        raise ValueError(f"a check broke, so this grading does not count: {report.faults[0]}")
    tests = [test for one in report.exercises for test in _tests(one, grade)]
    most = sum(test["max-score"] for test in tests)
    score = sum(test["score"] for test in tests)
    if grade is not None and grade.score is not None and grade.taken_off:
        score = max(0, _whole(grade.score))
    return _record(handin, score, most, tests)


def scores(graded: ClassResult, classroom: str, assignment: str, now: datetime, grades: Grades) -> Gradebook:
    """The gradebook of a class under one assignment. `now` is used when a download does not say when it was handed in.

    A learner's name in the download has to be a GitHub login, bare or after `CLASSROOM-ASSIGNMENT-` as in the names of
    repositories. Raises ValueError for a classroom or an assignment that is no short name.
    """
    for name in (classroom, assignment):
        if not SLUG.fullmatch(name):
            rule = "lower case letters, digits and dashes, two or more"
            raise ValueError(f"{name!r} is no short name of Classroom 50: {rule}")
    entries: dict[str, dict[str, Any]] = {}
    left_out = []
    for learner in graded.learners:
        login = learner.handed.shown.removeprefix(f"{classroom}-{assignment}-")
        if learner.outcome is GradingOutcome.FAULT:
            left_out.append(f"{learner.id}: a fault of the grader")
        elif not LOGIN.fullmatch(login):
            left_out.append(f"{learner.id}: {visible(learner.handed.shown[:80])!r} is no GitHub login")
        elif login.lower() in entries:
            left_out.append(f"{learner.id}: {login} is there twice")
        else:
            moment = learner.handed.handed_in or now
            tag = f"submit/manual-{_stamp(moment).replace(':', '-')}"
            handin = Handin(classroom, assignment, login, tag, tag, tag, tag, moment)
            entries[login.lower()] = _entry(learner, handin, grades[learner.id])
    bucket = {"type": "individual", "entries": [entries[login] for login in sorted(entries)]}
    return Gradebook({"schema": SCORES, "assignments": {assignment: bucket}}, tuple(left_out))


def _entry(learner: Learner, handin: Handin, grade: Grade) -> dict[str, Any]:
    if learner.report is not None:
        record = result(learner.report, handin, grade)
    else:
        record = _record(handin, _whole(grade.score or Decimal(0)), _whole(grade.most), [])
    del record["assignment"]  # the key of the bucket says it
    return {"owner": handin.owner, "override": True, "submissions": [record]}


def _record(handin: Handin, score: int, most: int, tests: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "schema": RESULT,
        "classroom": handin.classroom,
        "assignment": handin.assignment,
        "assignment_type": handin.kind,
        "owner": handin.owner,
        "submission": handin.submission,
        "commit": handin.commit,
        "release": handin.release,
        "review": handin.review,
        "datetime": _stamp(handin.moment),
        "score": score,
        "max-score": most,
        "tests": tests,
    }


def _tests(exercise: ExerciseResult, grade: Grade | None) -> list[dict[str, Any]]:
    own = grade.of(exercise.name) if grade else None
    if grade is not None and own is None:
        return []  # does not count for this learner
    if own is not None and (own.points != exercise.score or own.most != exercise.max_score):
        most = _whole(own.most)
        return [_test(visible(exercise.name), exercise.passed, min(_whole(own.points), most), most, own.line)]
    return [
        _test(
            visible(f"{exercise.name}: {check.name}"),
            check.outcome is CheckOutcome.PASSED,
            int(check.outcome is CheckOutcome.PASSED),
            1,
            check.diagnosis.message if check.diagnosis else check.reason,
        )
        for check in exercise.checks
    ]


def _test(name: str, passed: bool, score: int, most: int, message: str) -> dict[str, Any]:
    """Classroom 50 keeps fields beyond the first four unchanged."""
    test = {"test-name": name, "passed": passed, "score": score, "max-score": most}
    return test | ({"message": visible(message[:MOST_MESSAGE], keep="\n\t")} if message else {})


def _whole(points: Decimal) -> int:
    return int(points.to_integral_value(ROUND_HALF_UP))


def _stamp(moment: datetime) -> str:
    return f"{moment.astimezone(timezone.utc):%Y-%m-%dT%H:%M:%SZ}"


def main(arguments: list[str] | None = None) -> int:
    """Grade a checkout inside Classroom 50's runner: 0 with `result.json` written, 3 without it, which the runner
    reports as an error and not as a score."""

    def make(submission: Path) -> dict[str, Any]:
        handin = Handin.of_environment(os.environ, datetime.now(timezone.utc))
        return result(graded_apart(find(), submission), handin)

    return export("classroom50", arguments, make)


if __name__ == "__main__":
    sys.exit(main())
