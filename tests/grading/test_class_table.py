"""What the terminal says of a graded class: a small one by name, a large one in numbers, never wider than it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.commands import class_table
from lockstep.course import find
from lockstep.grading import writers
from lockstep.grading.classroom import NOT_HANDED_IN, ClassResult, Learner
from lockstep.grading.intake import Handed
from lockstep.grading.policy import Policy
from lockstep.grading.verdict import CheckOutcome, CheckResult, Diagnosis, ExerciseResult, Report

PASSED = CheckResult("adds", "a", CheckOutcome.PASSED)
RAISED = CheckResult("adds", "a", CheckOutcome.FAILED, Diagnosis("raised", "Your code raised a ValueError."))
EMPTY = CheckResult("adds", "a", CheckOutcome.FAILED, Diagnosis("not-implemented", "Nothing is written here yet."))
ABSENT = CheckResult("adds", "a", CheckOutcome.NOT_RUN, reason=NOT_HANDED_IN)


def marked(points: dict[str, int], of: int = 4) -> writers.Marked:
    """Learners with so many of 4 points in `mini_ddp`; at -1 nothing was handed in that could be graded."""

    def learner(id: str, score: int) -> Learner:
        checks = (*[PASSED] * score, *[RAISED] * (of - score - 1), *[EMPTY] * (score < of))
        absent = ExerciseResult("train_ddp", (ABSENT,))
        report = Report(7, (ExerciseResult("mini_ddp", checks), absent)) if score >= 0 else None
        return Learner(Handed(id, id, Path(), ("mini_ddp.py",)), report, 7)

    course = find()
    names = ("mini_ddp", "train_ddp")
    everybody = tuple(learner(*one) for one in points.items())
    return writers.mark(ClassResult(7, names, everybody, max_scores={"mini_ddp": of, "train_ddp": 1}), course, Policy())


def test_a_small_class_is_a_table() -> None:
    graded = marked({"ada": 4, "bo": 1, "cy": -1})
    assert class_table.points(graded, 80) == [
        "  learner            points  mini_ddp  train_ddp",
        "  ada                4 of 5    4 of 4          –",
        "  bo                 1 of 5    1 of 4          –",
        "  cy       nothing to grade",
        "  – not handed in",
    ]
    assert class_table.points(graded, 40)[1] == "  ada                4 of 5", "the points alone, where it is narrow"


@pytest.mark.parametrize(("few", "shown"), [(30, 32), (31, 4)])
def test_a_large_class_is_a_few_numbers(few: int, shown: int) -> None:
    """From 31 learners on. Who has least is named, and where everybody is."""
    graded = marked({f"id-{n:02}": (0, 1, 4)[min(n, 2)] for n in range(few)})
    said = class_table.points(graded, 80)
    assert len(said) == shown
    if few == 31:
        assert said == [
            "  mean 3.77, median 4 of 5 points",
            "  0 with all points, 1 without a point",
            "  lowest: id-00 0 · id-01 1 · id-02 4 · id-03 4 · id-04 4",
            "  everybody's points: grades.csv",
        ]


def test_mistakes_are_told_in_words_and_an_empty_part_is_none() -> None:
    assert class_table.frequent(marked({"ada": 4, "bo": 1, "cy": 0}), 80) == [
        "Found most often:",
        "  Your code raised an error: 2 learners",
    ]
    assert class_table.frequent(marked({"ada": 4}), 80) == []


@pytest.mark.parametrize("columns", [60, 80])
def test_the_files_have_room(columns: int) -> None:
    files = [Path(name) for name in ("graded/index.html", "reports", "grades.csv", "junit.xml", "lms", "gradescope")]
    said = class_table.files(files, columns)
    assert [line.split()[0] for line in said if line[0] != " "] == [
        "Class", "Reports", "Gradebook", "Upload", "Also", "Again"
    ]  # fmt: skip
    assert "junit.xml, gradescope" in said[4] and max(len(row) for line in said for row in line.split("\n")) <= columns
