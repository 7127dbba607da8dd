"""Two exercises at once: the same results as one after the other, told in order, and a fault stays where it happened."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny import RIGHT, WRONG, make_course

from lockstep.grading.course import Course, CourseError
from lockstep.grading.side_by_side import _InOrder, grade_side_by_side
from lockstep.grading.verdict import CheckOutcome, CheckResult, Report
from lockstep.grading.worker import Worker


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Course:
    """A course of two exercises."""
    return make_course(tmp_path_factory.mktemp("tiny") / "course")


@pytest.fixture
def handed_in(tmp_path: Path) -> Iterator[Path]:
    """The first is right, the second prints."""
    (tmp_path / "add.py").write_text(RIGHT["add"])
    (tmp_path / "times.py").write_text(WRONG["times"])
    yield tmp_path


def plain(report: Report) -> dict[str, Any]:
    """A report without the times that it took."""
    data = report.to_json()
    for exercise in data["exercises"]:
        for timed in (exercise, *exercise["checks"]):
            timed.pop("seconds")
    return data


def test_same_report_and_the_checks_in_order(tiny: Course, handed_in: Path) -> None:
    told: list[tuple[str, str]] = []
    report = grade_side_by_side(
        tiny, ["add", "times"], handed_in, seed=5, progress=lambda name, check: told.append((name, check.id))
    )
    assert told == [(exercise.name, check.id) for exercise in report.exercises for check in exercise.checks]
    assert [(one.name, one.passed) for one in report.exercises] == [("add", True), ("times", False)]
    worker = Worker()
    try:
        assert plain(worker.grade(tiny, ["add", "times"], handed_in, seed=5)) == plain(report)
    finally:
        worker.stop()


def test_a_fault_of_ours_is_one_exercises(tiny: Course, handed_in: Path) -> None:
    (handed_in / "times.py").write_text("# trap: dies\n" + RIGHT["times"])
    report = grade_side_by_side(tiny, ["add", "times"], handed_in, seed=5)
    assert [(one.name, one.passed) for one in report.exercises] == [("add", True)]
    assert len(report.faults) == 1 and report.exit_code == 3


def test_what_is_not_in_the_course_is_said(tiny: Course, handed_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CourseError, match="no exercise 'minus'"):
        grade_side_by_side(tiny, ["add", "minus"], handed_in)

    def refuse(*given: Any, **more: Any) -> Report:
        raise CourseError("not today")

    monkeypatch.setattr(Worker, "grade", refuse)
    with pytest.raises(CourseError, match="not today"):
        grade_side_by_side(tiny, ["add", "times"], handed_in)


def test_a_later_exercise_waits_for_its_turn() -> None:
    told: list[str] = []
    order = _InOrder(["a", "b", "c"], lambda name, check: told.append(check.id))
    for name, id in (("c", "c1"), ("a", "a1"), ("b", "b1"), ("b", "b2")):
        order(name, CheckResult(id, id, CheckOutcome.PASSED))
    assert told == ["a1"]
    order.done("c")
    order.done("a")
    assert told == ["a1", "b1", "b2"]
    order.done("b")
    assert told == ["a1", "b1", "b2", "c1"]
