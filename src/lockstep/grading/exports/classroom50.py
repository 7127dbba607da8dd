"""Results for Classroom 50, which replaced GitHub Classroom in August 2026.

Its contract is public: `schemas/result-v1.schema.json` and `schemas/scores-v1.schema.json` of
github.com/foundation50/classroom50, explained on its wiki's page "Advanced Autograding" (both as of 20 August 2026). It
requires that scores are integers from 0 up and no greater than their `max-score`, that times are UTC to the second with
a Z, and that a submission's tag begins with `submit/`.

`scores` is the gradebook `CLASSROOM/scores.json` (`classroom50/scores/v1`) of a class that was graded on the teacher's
machine. Its entries are overrides, as the web page writes them for a grade that is typed in: collecting scores leaves
them alone, and the tag `submit/manual-…` replaces the links that such a grade does not have.

Points become whole numbers check by check or, where a policy gives an exercise other points, exercise by exercise. With
`rounding.to = 1` in the policy, nothing is left to round here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime, timezone
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

from ..classroom import ClassResult, GradingOutcome, Learner
from ..policy import Grade, Grades
from ..text import visible
from ..verdict import CheckOutcome, ExerciseResult

RESULT = "classroom50/result/v1"
SCORES = "classroom50/scores/v1"
LOGIN = re.compile(r"[A-Za-z0-9](?:-?[A-Za-z0-9]){0,38}")
MOST_MESSAGE = 2_000  # characters


@dataclass(frozen=True)
class Gradebook:
    """`scores.json` as data, and who is not in it, with the reason."""

    data: dict[str, Any]
    left_out: tuple[str, ...]


def scores(graded: ClassResult, classroom: str, assignment: str, now: datetime, grades: Grades) -> Gradebook:
    """The gradebook of a class under one assignment. `now` is used when a download does not say when it was handed in.

    A learner's name in the download has to be a GitHub login, bare or after `CLASSROOM-ASSIGNMENT-` as in the names of
    repositories.
    """
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
            record = _record(learner, grades[learner.id])
            moment = _stamp(learner.handed.handed_in or now)
            tag = f"submit/manual-{moment.replace(':', '-')}"
            links = dict.fromkeys(("submission", "commit", "release", "review"), tag)
            about = {"schema": RESULT, "classroom": classroom, "assignment_type": "individual", "owner": login}
            submission = {**about, **links, "datetime": moment, **record}
            entries[login.lower()] = {"owner": login, "override": True, "submissions": [submission]}
    bucket = {"type": "individual", "entries": [entries[login] for login in sorted(entries)]}
    return Gradebook({"schema": SCORES, "assignments": {assignment: bucket}}, tuple(left_out))


def _record(learner: Learner, grade: Grade) -> dict[str, Any]:
    """The points, check by check where they come from checks."""
    if learner.report is None:
        return {"score": _whole(grade.score or Decimal(0)), "max-score": _whole(grade.most), "tests": []}
    tests = [test for one in learner.report.exercises for test in _tests(one, grade)]
    score = sum(test["score"] for test in tests)
    if grade.score is not None and grade.taken_off:
        score = max(0, _whole(grade.score))
    return {"score": score, "max-score": sum(test["max-score"] for test in tests), "tests": tests}


def _tests(exercise: ExerciseResult, grade: Grade) -> list[dict[str, Any]]:
    own = grade.of(exercise.name)
    if own is None:
        return []  # does not count for this learner
    if own.points != exercise.score or own.most != exercise.max_score:
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
