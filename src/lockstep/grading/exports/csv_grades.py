"""`grades.csv`: one row a learner, safe to open in a spreadsheet."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal

from ..policy import Grade
from ..verdict import Report
from . import visible

FORMULA = ("=", "+", "-", "@", "＝", "＋", "－", "＠", "|", "%")


@dataclass(frozen=True)
class Row:
    """One learner's grading; no report when nothing was handed in that could be graded, and `refused` says why.

    With a `grade`, points are those of the policy, and the remarks say what it takes off.
    """

    id: str
    shown: str
    report: Report | None
    refused: tuple[str, ...] = ()
    grade: Grade | None = None


def grades_csv(rows: Iterable[Row], exercises: Sequence[str]) -> str:
    """RFC 4180 text, sorted by id: points in all and by exercise (the columns), and how the grading ended.

    A fault of ours leaves the total empty instead of costing points; an exercise that was not handed in leaves its cell
    empty. Raises ValueError when two rows have one id.
    """
    ordered = sorted(rows, key=lambda row: row.id)
    if len({row.id for row in ordered}) < len(ordered):
        raise ValueError("two rows have the same learner id")
    out = io.StringIO()
    writer = csv.writer(out, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\r\n")
    writer.writerow(["learner", "name", "outcome", "score", "max_score", *map(cell, exercises), "seed", "remarks"])
    for row in ordered:
        writer.writerow(_cells(row, exercises))
    return out.getvalue()


def csv_text(rows: Iterable[Sequence[object]]) -> str:
    """RFC 4180 text. Texts of others go through `cell` first."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\r\n").writerows(rows)
    return out.getvalue()


def cell(text: str) -> str:
    """A text that no spreadsheet takes for a formula, on one line.

    What begins like a formula, even after blanks, gets an apostrophe (OWASP, "CSV Injection").
    """
    shown = visible(text)
    return f"'{shown}" if shown.lstrip().startswith(FORMULA) else shown


Cell = str | int | Decimal


def _cells(row: Row, exercises: Sequence[str]) -> list[Cell]:
    report, grade, points = row.report, row.grade, _points(row, exercises)
    said = grade.said if grade else ()
    score: Cell
    most: Cell
    if report is None:
        outcome = "nothing to grade"
        score, most = (grade.score or 0, grade.most) if grade else (0, "")
        if not score:  # nothing was given by hand either
            points = ["" for _ in exercises]
    else:
        outcome = "graded"
        score = sum(result.score for result in report.exercises)
        most = sum(result.max_score for result in report.exercises)
        if grade is not None and grade.score is not None:
            score, most = grade.score, grade.most
        if report.faults:
            outcome, score, most = "fault of the grader", "", grade.most if grade else most
            said = (*report.faults, *(said[len(grade.lines) :] if grade else ()))
    seed, remarks = report.seed if report else "", cell(" / ".join((*row.refused, *said)))
    return [cell(row.id), cell(row.shown), outcome, score, most, *points, seed, remarks]


def _points(row: Row, exercises: Sequence[str]) -> list[Cell]:
    """Points for each exercise; empty when it was not asked for or does not count."""
    if row.grade is not None:
        own = {one.name: one.points for one in row.grade.exercises}
        return [own.get(name, "") for name in exercises]
    results = {result.name: result.score for result in row.report.exercises} if row.report else {}
    return [results.get(name, "") for name in exercises]
