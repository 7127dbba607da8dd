"""Grades and feedback as Moodle and Canvas import them, and a table of all checks.

Read from their sources: Moodle's `mod/assign/feedback/offline/importgradeslib.php` wants the columns Identifier, Grade
and Last modified (grade), as its own worksheet in English has them, and `mod/assign/feedback/file/importziplib.php`
files whose names begin with `Fullname_NUMBER_assignsubmission_file_`. Canvas's `lib/gradebook_importer.rb` wants
Student, ID, Section and one column for each assignment, and a row with the points possible.

A learner whose grading broke on our side is in no gradebook. Who is excused from a part gets the same share of the
whole.
"""

from __future__ import annotations

import csv
import html
import io
import re
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction

from ..classroom import ClassResult, Learner
from ..policy import Grade, Grades, Rounding
from . import visible
from .csv_grades import cell

MOODLE = ("Identifier", "Full name", "Grade", "Maximum Grade", "Last modified (grade)", "Feedback comments")
CANVAS = ("Student", "ID", "Section")
REPORT = "report.html"
EARLIEST = (1980, 1, 1, 0, 0, 0)


def moodle_csv(graded: ClassResult, grades: Grades, rounding: Rounding) -> str:
    """A grading worksheet for those who were handed in through Moodle; only its header when nobody was."""
    most = _most(grades)
    rows: list[Sequence[object]] = [MOODLE]
    for one, number in _of(graded, "moodle"):
        points = _points(grades[one.id], most, rounding)
        if points is not None:
            said = html.escape("; ".join(grades[one.id].lines))
            rows.append((f"Participant {number}", cell(one.handed.shown), points, most, "-", cell(said)))
    return _csv(rows)


def canvas_csv(graded: ClassResult, grades: Grades, rounding: Rounding, assignment: str) -> str:
    """A gradebook with one assignment for those who were handed in through Canvas."""
    most = _most(grades)
    rows: list[Sequence[object]] = [(*CANVAS, cell(assignment)), ("    Points Possible", "", "", most)]
    for one, number in _of(graded, "canvas"):
        points = _points(grades[one.id], most, rounding)
        if points is not None:
            rows.append((cell(one.handed.shown), int(number), "", points))
    return _csv(rows)


def moodle_feedback(graded: ClassResult, pages: Mapping[str, bytes]) -> bytes:
    """The zip with each learner's page, `pages[id]`, as a feedback file. The same pages give the same bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for one, number in _of(graded, "moodle"):
            if not one.faulty and one.id in pages:
                name = re.sub(r"[^\w .-]|_", " ", visible(one.handed.shown))[:60].strip(" .~") or "Participant"
                info = zipfile.ZipInfo(f"{name}_{number}_assignsubmission_file_{REPORT}", EARLIEST)
                info.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(info, pages[one.id])
    return buffer.getvalue()


def checks_csv(graded: ClassResult) -> str:
    """A row for each learner, a column for each check: how it ended; empty where it was not graded."""
    columns = dict.fromkeys(
        (name, check.id)
        for name in graded.exercises
        for one in graded.learners
        for result in one.exercises
        if result.name == name
        for check in result.checks
    )
    rows: list[Sequence[object]] = [("learner", *(cell(f"{name}: {check}") for name, check in columns))]
    for one in graded.learners:
        ends = {(result.name, check.id): check.outcome.value for result in one.exercises for check in result.checks}
        rows.append((cell(one.id), *(ends.get(column, "") for column in columns)))
    return _csv(rows)


def _of(graded: ClassResult, system: str) -> list[tuple[Learner, str]]:
    """Those who have a number there, and the number. Two who claim the same one are both left out."""
    found = [(one, number) for one in graded.learners for kind, _, number in [one.handed.account.partition(" ")]
             if kind == system and number.isdigit()]  # fmt: skip
    numbers = [number for _, number in found]
    return [(one, number) for one, number in found if numbers.count(number) == 1]


def _most(grades: Grades) -> Decimal:
    return max((grade.most for grade in grades.by_learner.values()), default=Decimal(0))


def _points(grade: Grade, most: Decimal, rounding: Rounding) -> Decimal | None:
    if grade.score is None or grade.most == most:
        return grade.score
    return rounding(Fraction(grade.score) * Fraction(most) / Fraction(grade.most)) if grade.most else None


def _csv(rows: Iterable[Sequence[object]]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\r\n").writerows(rows)
    return out.getvalue()
