"""The files that come of a graded class: one list of writers, each from a `ClassResult` to files of its own in a folder.

A writer gives back what it has written, the file to look at first. To add a format, write its pure function in `exports`
and put a line here.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from .classroom import ClassResult, Learner
from .exports.csv_grades import Row, grades_csv
from .exports.gradescope import class_results
from .exports.junit import junit_class
from .exports.summary_md import class_md
from .store import pretty, write

Writer = Callable[[ClassResult, Path], list[Path]]


def remarks(learner: Learner) -> tuple[str, ...]:
    """What a teacher should know of this grading in a line or two: what was refused, and what is missing."""
    missing = (f"not handed in: {', '.join(learner.missing)}",) if learner.missing else ()
    return (*learner.handed.refused, *missing)


def write_csv(graded: ClassResult, folder: Path) -> list[Path]:
    """`grades.csv`, with the mark by which spreadsheets know UTF-8."""
    rows = (Row(one.id, one.handed.shown, one.report, remarks(one)) for one in graded.learners)
    return _written(folder / "grades.csv", grades_csv(rows, graded.exercises).encode("utf-8-sig", "backslashreplace"))


def write_junit(graded: ClassResult, folder: Path) -> list[Path]:
    """`junit.xml`: a suite for each learner's exercise."""
    reports = {one.id: one.report for one in graded.learners if one.report is not None}
    return _written(folder / "junit.xml", junit_class(reports).encode())


def write_summary(graded: ClassResult, folder: Path) -> list[Path]:
    """`summary.md`, for the summary of a CI job."""
    return _written(folder / "summary.md", class_md(graded).encode())


def write_gradescope(graded: ClassResult, folder: Path) -> list[Path]:
    """`gradescope/ID.json`: each learner's `results.json`; none for whom our grader failed."""
    folder = folder / "gradescope"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for one in graded.learners:
        if not one.faulty:
            write(folder / f"{one.id}.json", pretty(class_results(one)))
    return [folder]


WRITERS: dict[str, Writer] = {
    "grades": write_csv,
    "junit": write_junit,
    "summary": write_summary,
    "gradescope": write_gradescope,
}


def write_all(graded: ClassResult, folder: Path) -> list[Path]:
    """Call every writer; returns what a teacher may want to open."""
    return [path for writer in WRITERS.values() for path in writer(graded, folder)]


def _written(path: Path, data: bytes) -> list[Path]:
    write(path, data)
    return [path]
