"""Grades and feedback as Moodle and Canvas import them.

Read from their sources: Moodle's `mod/assign/feedback/offline/importgradeslib.php` wants the columns Identifier, Grade
and Last modified (grade), as its own worksheet in English has them, and `mod/assign/feedback/file/importziplib.php`
files whose names begin with `Fullname_NUMBER_assignsubmission_file_`. Canvas's `lib/gradebook_importer.rb` wants
Student, ID, Section and one column for each assignment, and a row with the points possible; for files,
`generate_comments_from_files` of its assignments wants names with `_USER_ATTACHMENT_`, of what was handed in.

A learner whose grading broke on our side is in no gradebook. Who is excused from a part gets the same share of the
whole; who is excused from everything is `EX` for Canvas, and not in Moodle's worksheet, which has no word for it.
"""

from __future__ import annotations

import html
import io
import re
import zipfile
from collections.abc import Mapping, Sequence
from decimal import Decimal
from fractions import Fraction

from ..classroom import ClassResult, Learner
from ..policy import Grade, Grades, Rounding, on
from ..text import visible
from .csv_grades import cell, csv_text
from .markdown import rendered

MOODLE = ("Identifier", "Full name", "Grade", "Maximum Grade", "Last modified (grade)", "Feedback comments")
CANVAS = ("Student", "ID", "Section")
EXCUSED = "EX"
REPORT = "report.html"
EARLIEST = (1980, 1, 1, 0, 0, 0)


def moodle_csv(graded: ClassResult, grades: Grades, rounding: Rounding) -> str:
    """A grading worksheet for those who were handed in through Moodle; only its header when nobody was."""
    most = _most(grades)
    rows: list[Sequence[object]] = [MOODLE]
    for one, number, _ in _of(graded, "moodle"):
        points = _points(grades[one.id], most, rounding)
        if points is not None:
            said = _feedback(one, grades[one.id])
            rows.append((f"Participant {number}", cell(one.handed.shown), points, most, "-", cell(said)))
    return csv_text(rows)


def _feedback(one: Learner, grade: Grade) -> str:
    """HTML on one line, which Moodle shows as it is."""
    shown = [rendered(f"**{on(name)}**\n\n{text}") for name, text in grade.comments]
    return html.escape("; ".join((*grade.lines, *one.handed.refused, *one.handed.notes))) + "".join(shown)


def canvas_csv(graded: ClassResult, grades: Grades, rounding: Rounding, assignment: str) -> str:
    """A gradebook with one assignment for those who were handed in through Canvas."""
    most = _most(grades)
    rows: list[Sequence[object]] = [(*CANVAS, cell(assignment)), ("    Points Possible", "", "", most)]
    for one, number, _ in _of(graded, "canvas"):
        points = _points(grades[one.id], most, rounding)
        if points is not None or not one.faulty:
            rows.append((cell(one.handed.shown), int(number), "", EXCUSED if points is None else points))
    return csv_text(rows)


def moodle_feedback(graded: ClassResult, pages: Mapping[str, bytes]) -> bytes:
    """The zip with each learner's page, `pages[id]`, as a feedback file. The same pages give the same bytes."""
    named = {
        one.id: f"{_named(one)}_{number}_assignsubmission_file_{REPORT}" for one, number, _ in _of(graded, "moodle")
    }
    return _zip(graded, pages, named)


def canvas_feedback(graded: ClassResult, pages: Mapping[str, bytes]) -> bytes:
    """The same for Canvas, without those of whom no uploaded file is known."""
    known = [(one, number, upload) for one, number, upload in _of(graded, "canvas") if upload]
    return _zip(graded, pages, {one.id: f"{_named(one)}_{number}_{upload}_{REPORT}" for one, number, upload in known})


def _named(one: Learner) -> str:
    name = re.sub(r"[^\w .-]|_", " ", visible(one.handed.shown))[:60].strip(" .~")
    return "Participant" if name.isdigit() or not name else name  # Canvas takes the first number for the learner's


def _zip(graded: ClassResult, pages: Mapping[str, bytes], named: Mapping[str, str]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for one in graded.learners:
            if not one.faulty and one.id in pages and one.id in named:
                info = zipfile.ZipInfo(named[one.id], EARLIEST)
                info.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(info, pages[one.id])
    return buffer.getvalue()


def _of(graded: ClassResult, system: str) -> list[tuple[Learner, str, str]]:
    """Those who have a number there, the number and their last upload's. Two with the same are both left out."""
    found = [(one, number, upload) for one in graded.learners for kind, number, upload in [_account(one)]
             if kind == system and number.isdigit()]  # fmt: skip
    numbers = [number for _, number, _ in found]
    return [each for each in found if numbers.count(each[1]) == 1]


def _account(one: Learner) -> tuple[str, str, str]:
    system, number, upload = (*one.handed.account.split(" "), "", "")[:3]
    return system, number, upload


def _most(grades: Grades) -> Decimal:
    return max((grade.most for grade in grades.by_learner.values()), default=Decimal(0))


def _points(grade: Grade, most: Decimal, rounding: Rounding) -> Decimal | None:
    if grade.score is None or grade.most == most:
        return grade.score
    return rounding(Fraction(grade.score) * Fraction(most) / Fraction(grade.most)) if grade.most else None
