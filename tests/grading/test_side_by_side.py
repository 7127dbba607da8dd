"""Two exercises at once: the same results as one after the other, told in order, and a fault stays where it happened."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import ROOT
from support.tiny_course import RIGHT, WRONG, make_course

from lockstep.course import Course, CourseError
from lockstep.grading.request import GradeRequest
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
        tiny, GradeRequest(("add", "times"), handed_in, seed=5), lambda name, check: told.append((name, check.id))
    )
    assert told == [(exercise.name, check.id) for exercise in report.exercises for check in exercise.checks]
    assert [(one.name, one.passed) for one in report.exercises] == [("add", True), ("times", False)]
    worker = Worker()
    try:
        assert plain(worker.grade(tiny, GradeRequest(("add", "times"), handed_in, seed=5))) == plain(report)
    finally:
        worker.stop()


@pytest.mark.slow
def test_a_fault_of_ours_is_one_exercises(tiny: Course, handed_in: Path) -> None:
    (handed_in / "times.py").write_text("# trap: dies\n" + RIGHT["times"])
    report = grade_side_by_side(tiny, GradeRequest(("add", "times"), handed_in, seed=5))
    assert [(one.name, one.passed) for one in report.exercises] == [("add", True)]
    assert len(report.faults) == 1 and report.exit_code == 3


def test_what_is_not_in_the_course_is_said(tiny: Course, handed_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CourseError, match="no exercise 'minus'"):
        grade_side_by_side(tiny, GradeRequest(("add", "minus"), handed_in))

    def refuse(*given: Any, **more: Any) -> Report:
        raise CourseError("not today")

    monkeypatch.setattr(Worker, "grade", refuse)
    with pytest.raises(CourseError, match="not today"):
        grade_side_by_side(tiny, GradeRequest(("add", "times"), handed_in))


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


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="not run: looks at /proc")
def test_ctrl_c_ends_all_of_it(tmp_path: Path) -> None:
    """The command says so by its status, and none of its processes is left."""
    mark = f"LOCKSTEP_SIDE_BY_SIDE={tmp_path.name}-{os.getpid()}"
    name, _, value = mark.partition("=")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "LOCKSTEP_WARM": "0", name: value}
    command = [sys.executable, "-m", "lockstep", "check", "--all", "--submission", "solutions"]
    running = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        until(lambda: len(marked(mark)) >= 5)  # itself, two that grade, and what starts their ranks
        os.killpg(running.pid, signal.SIGINT)
        _, said = running.communicate(timeout=60)
        assert running.returncode == 130, said
        assert b"Traceback" not in said
        until(lambda: not marked(mark))
    finally:
        for pid in marked(mark):
            os.kill(pid, signal.SIGKILL)


def marked(mark: str) -> list[int]:
    """The processes that have this in their environment."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def until(is_so: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait for it, and fail when it does not come."""
    give_up = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < give_up, "it never came to that"
        time.sleep(0.1)
