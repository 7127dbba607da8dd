"""`grades.csv`: one row a learner, safe to open in a spreadsheet."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..verdict import Report
from . import visible

FORMULA = ("=", "+", "-", "@", "＝", "＋", "－", "＠", "|", "%")


@dataclass(frozen=True)
class Row:
    """One learner's grading; no report where nothing was handed in that could be graded, and `refused` says why."""

    id: str
    shown: str
    report: Report | None
    refused: tuple[str, ...] = ()


def grades_csv(rows: Iterable[Row], exercises: Sequence[str]) -> str:
    """RFC 4180 text, sorted by id: points in all and by exercise (`exercises` are the columns), and how the grading
    ended.

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


def cell(text: str) -> str:
    """A text that no spreadsheet takes for a formula, on one line.

    An apostrophe goes before what begins like a formula, after any blanks (OWASP, "CSV Injection").
    """
    shown = visible(text)
    return f"'{shown}" if shown.lstrip().startswith(FORMULA) else shown


def _cells(row: Row, exercises: Sequence[str]) -> list[str | int]:
    report = row.report
    remarks = " / ".join(row.refused)
    if report is None:
        return [cell(row.id), cell(row.shown), "nothing to grade", 0, "", *("" for _ in exercises), "", cell(remarks)]
    results = {result.name: result for result in report.exercises}
    points: list[str | int] = [results[name].score if name in results else "" for name in exercises]
    score: str | int = sum(result.score for result in report.exercises)
    most = sum(result.max_score for result in report.exercises)
    outcome = "graded"
    if report.faults:
        outcome, score = "fault of the grader", ""
        remarks = " / ".join((*row.refused, *report.faults))
    return [cell(row.id), cell(row.shown), outcome, score, most, *points, report.seed, cell(remarks)]
