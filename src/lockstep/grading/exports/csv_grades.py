"""`grades.csv`: one row a learner, safe to open in a spreadsheet."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Literal

from ..classroom import ClassResult, Learner
from ..policy import Grade, Grades
from ..text import visible

FORMULA = ("=", "+", "-", "@", "＝", "＋", "－", "＠", "|", "%")


def grades_csv(graded: ClassResult, grades: Grades) -> str:
    """A row for each learner: points in all and by exercise, how the grading ended, and the remarks.

    A fault of ours leaves the total empty instead of costing points; an exercise that was not handed in leaves its cell
    empty.
    """
    head = ("learner", "name", "outcome", "score", "max_score", *map(cell, graded.exercises), "seed", "remarks")
    rows = (_row(one, grades[one.id], graded.exercises) for one in graded.learners)
    return csv_text([head, *rows], csv.QUOTE_NONNUMERIC)


def csv_text(rows: Iterable[Sequence[object]], quoting: Literal[0, 2] = csv.QUOTE_MINIMAL) -> str:
    """RFC 4180 text. Texts of others go through `cell` first."""
    out = io.StringIO()
    csv.writer(out, quoting=quoting, lineterminator="\r\n").writerows(rows)
    return out.getvalue()


def cell(text: str) -> str:
    """A text that no spreadsheet takes for a formula, on one line.

    What begins like a formula, even after blanks, gets an apostrophe (OWASP, "CSV Injection").
    """
    shown = visible(text)
    return f"'{shown}" if shown.lstrip().startswith(FORMULA) else shown


def _row(one: Learner, grade: Grade, exercises: Sequence[str]) -> list[object]:
    report, score, said = one.report, grade.score, grade.said
    points = {own.name: own.points for own in grade.exercises}
    if report is None and not score:  # nothing was given by hand either
        points = {}
    if report is not None and report.faults:
        said = (*report.faults, *said[len(grade.lines) :])
    missing = (f"not handed in: {', '.join(one.missing)}",) if one.missing else ()
    remarks = cell(" / ".join((*one.handed.refused, *missing, *one.handed.notes, *said)))
    return [
        cell(one.id),
        cell(one.handed.shown),
        one.outcome.value,
        "" if score is None else score,
        grade.most,
        *(points.get(name, "") for name in exercises),
        report.seed if report else "",
        remarks,
    ]
