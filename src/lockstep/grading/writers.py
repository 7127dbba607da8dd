"""The files of a graded class: one list of writers, each of which writes its own files into a folder.

A writer returns what it has written, the file to look at first. To add a format, write its pure function in `exports`
and add a line here.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

from ..course import Course
from ..course.files import write
from . import similar
from .classroom import ClassResult
from .exports.class_page import class_page
from .exports.classroom50 import scores
from .exports.csv_grades import grades_csv
from .exports.gradebooks import canvas_csv, canvas_feedback, moodle_csv, moodle_feedback
from .exports.gradescope import class_results
from .exports.html_report import html_report, in_the_book
from .exports.items import checks_csv, items_csv
from .exports.junit import junit
from .exports.summary_md import class_md
from .policy import Grades, Policy, apply
from .policy_file import load
from .store import pretty
from .teams import share

EARLIEST = datetime(1980, 1, 1, tzinfo=timezone.utc)  # when nothing says when a class handed in


@dataclass(frozen=True)
class Marked:
    """A graded class, its grades, and the course that it was graded by. `once` has what a group handed in once."""

    graded: ClassResult
    once: ClassResult
    course: Course
    policy: Policy
    grades: Grades


Writer = Callable[[Marked, Path], list[Path]]


def write_csv(marked: Marked, folder: Path) -> list[Path]:
    """`grades.csv`, with the mark by which spreadsheets recognize UTF-8."""
    text = grades_csv(marked.graded, marked.grades)
    return _written(folder / "grades.csv", text.encode("utf-8-sig", "backslashreplace"))


def write_junit(marked: Marked, folder: Path) -> list[Path]:
    """`junit.xml`: a suite for each learner's exercise, and one for each learner with nothing to grade."""
    return _written(folder / "junit.xml", junit(marked.graded).encode())


def write_summary(marked: Marked, folder: Path) -> list[Path]:
    """`summary.md`, for the summary of a CI job."""
    return _written(folder / "summary.md", class_md(marked.graded, marked.grades).encode())


def write_gradescope(marked: Marked, folder: Path) -> list[Path]:
    """`gradescope/ID.json`: each learner's `results.json`, except after a fault of ours."""
    folder = _emptied(folder / "gradescope")
    for one in marked.graded.learners:
        if not one.faulty:
            write(folder / f"{one.id}.json", pretty(class_results(one, marked.grades[one.id])))
    return [folder]


def write_classroom50(marked: Marked, folder: Path) -> list[Path]:
    """`classroom50/scores.json`, the gradebook, and `left_out.txt`, who is not in it; neither depends on a clock."""
    times = [one.handed.handed_in for one in marked.graded.learners if one.handed.handed_in]
    fallback = max(times, default=None) or marked.policy.late.deadline or EARLIEST
    where = marked.policy.classroom50
    book = scores(marked.graded, where.classroom, where.assignment, fallback, marked.grades)
    folder = _emptied(folder / "classroom50")
    write(folder / "scores.json", pretty(book.data))
    write(folder / "left_out.txt", "".join(f"{line}\n" for line in book.left_out).encode("utf-8", "backslashreplace"))
    return [folder]


def write_pages(marked: Marked, folder: Path) -> list[Path]:
    """`index.html` for the teacher, and `reports/ID.html`, a page for each learner."""
    graded = marked.graded
    reports = _emptied(folder / "reports")
    for id, page in _pages(marked).items():
        write(reports / f"{id}.html", page)
    alike = similar.in_class(marked.once, marked.course)
    class_wide = class_page(
        graded,
        marked.grades,
        similar=alike.pairs,
        tickets=similar.same_tickets(marked.once),
        solved=alike.solved,
        titles={id: entry.title for id, entry in marked.course.catalogue.items()},
    )
    return [*_written(folder / "index.html", class_wide.encode()), reports]


def _pages(marked: Marked) -> dict[str, bytes]:
    """Each learner's report."""
    linked = in_the_book(marked.policy.book, [chapter.name for chapter in marked.course.chapters])
    return {one.id: html_report(one, marked.grades[one.id], linked).encode() for one in marked.graded.learners}


def write_gradebooks(marked: Marked, folder: Path) -> list[Path]:
    """`checks.csv` and `items.csv`, and below `lms/` what the system takes back that the submissions came from."""
    graded, grades, rounding = marked.graded, marked.grades, marked.policy.rounding
    write(folder / "checks.csv", checks_csv(graded).encode("utf-8-sig", "backslashreplace"))
    write(folder / "items.csv", items_csv(graded).encode("utf-8-sig", "backslashreplace"))
    systems = {one.handed.account.partition(" ")[0] for one in graded.learners} - {""}
    lms = _emptied(folder / "lms")
    pages = _pages(marked) if systems else {}
    if "moodle" in systems:
        write(lms / "moodle_grades.csv", moodle_csv(graded, grades, rounding).encode("utf-8", "backslashreplace"))
        write(lms / "moodle_feedback.zip", moodle_feedback(graded, pages))
    if "canvas" in systems:
        title = marked.policy.canvas_assignment
        write(
            lms / "canvas_grades.csv", canvas_csv(graded, grades, rounding, title).encode("utf-8", "backslashreplace")
        )
        write(lms / "canvas_feedback.zip", canvas_feedback(graded, pages))
    if not systems:
        lms.rmdir()
    return [folder / "checks.csv", folder / "items.csv", *([lms] if systems else [])]


WRITERS: dict[str, Writer] = {
    "pages": write_pages,
    "grades": write_csv,
    "junit": write_junit,
    "summary": write_summary,
    "gradescope": write_gradescope,
    "classroom50": write_classroom50,
    "gradebooks": write_gradebooks,
}


def mark(graded: ClassResult, course: Course, policy: Policy) -> Marked:
    """The class with its groups and grades."""
    shared = share(policy, graded)
    grades = apply(policy, shared.graded, shared.lines)
    grades = replace(grades, remarks=(*shared.remarks, *grades.remarks))
    return Marked(shared.graded, shared.once, course, policy, grades)


def write_all(graded: ClassResult, folder: Path, course: Course, policy: Policy | None = None) -> list[Path]:
    """Call every writer; returns what a teacher may want to open. The default policy is the course's.

    Raises CourseError when the course's policy cannot be read.
    """
    marked = mark(graded, course, load(course) if policy is None else policy)
    return [path for writer in WRITERS.values() for path in writer(marked, folder)]


def _emptied(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def _written(path: Path, data: bytes) -> list[Path]:
    write(path, data)
    return [path]
