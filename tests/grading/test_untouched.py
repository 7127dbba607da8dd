"""A stub as it was handed out is answered at once: no rank, no torch, no try, and the course goes on where it was."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT
from support.command_line import call

from lockstep.commands import check
from lockstep.course import Course, find, progress
from lockstep.course.hints import stub
from lockstep.course.standing import standing
from lockstep.grading.request import GradeRequest
from lockstep.grading.text import exercise_text
from lockstep.grading.untouched import untouched
from lockstep.grading.verdict import CheckOutcome, Report
from lockstep.notebook import exercise

ALONE = [name for name in find().names if "/" not in name]


@pytest.fixture
def course(tmp_path: Path) -> Course:
    """A course whose exercises are stubs, and which no run may touch."""
    for part in ("autograder", "chapters", "solutions"):
        (tmp_path / part).symlink_to(ROOT / part)
    shutil.copytree(ROOT / "exercises", tmp_path / "exercises", ignore=shutil.ignore_patterns("__pycache__"))
    found = Course(tmp_path)
    for name in found.names:
        (found.exercises / f"{name}.py").write_text(stub(found, name))
    (found.exercises / "train.sbatch").write_text(stub(found, "train", ".sbatch"))
    return found


@pytest.fixture
def graded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """What is graded on ranks, instead of being graded."""
    told: list[tuple[str, ...]] = []

    def grade(course: Course, request: GradeRequest, on_check: object) -> Report:
        told.append(request.exercises)
        return Report(7, ())

    monkeypatch.setattr(check, "_grade", grade)
    monkeypatch.setattr(exercise._worker, "grade", grade)
    return told


@pytest.mark.parametrize("name", ALONE)
def test_each_stub_is_known_and_has_its_checks(course: Course, name: str) -> None:
    result = untouched(course, GradeRequest((name,)))[name]
    assert (result.score, result.max_score) == (0, course.count_checks(name))
    first, *others = result.checks
    assert first.diagnosis is not None and first.diagnosis.source.startswith("raise NotImplementedError(")
    assert first.diagnosis.message.startswith("Nothing is written here yet.\nTo do: ")
    assert {one.outcome for one in others} <= {CheckOutcome.NOT_RUN}
    shown = exercise_text(result)
    assert len(shown.splitlines()) <= 4 and f"exercises/{name}.py:{first.diagnosis.line}" in shown


def test_nothing_is_started_and_no_try_counted(
    course: Course, graded: list[tuple[str, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    before = standing(course)
    assert check.check(course, GradeRequest(("setup_ddp", "mini_ddp"))) == 1
    said = capsys.readouterr().out
    assert "mini_ddp: not begun; 9 checks wait for your code" in said and said.count("Nothing is written here yet") == 2
    assert re.search(
        r"10 checks wait for your code\nRead: chapter 2, .*setup_ddp\" \(\w+, \d+ minutes\)\nmini_ddp", said
    )
    assert graded == [] and progress.load(course).exercises == {}
    assert standing(course) == before and before.here is None, "the start page still says: Begin"


def test_so_it_is_in_a_notebook(
    course: Course, graded: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCKSTEP_COURSE", str(course.root))
    exercise.ExerciseMagics(shell=None).check("mini_ddp")  # type: ignore[no-untyped-call]
    assert graded == [] and progress.load(course).exercises == {}
    (course.exercises / "mini_ddp.py").write_text(stub(course, "mini_ddp") + "# mine\n")
    exercise.ExerciseMagics(shell=None).check("mini_ddp")  # type: ignore[no-untyped-call]
    assert graded == [("mini_ddp",)]


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("raise NotImplementedError", "pass  # raise NotImplementedError", 1),
        lambda text: text + "\nx = 1\n",
        lambda text: "",
        lambda text: "def (",
    ],
)
def test_what_was_begun_is_graded(course: Course, graded: list[tuple[str, ...]], change: object) -> None:
    assert callable(change)
    file = course.exercises / "mini_ddp.py"
    file.write_text(change(file.read_text()))
    check.check(course, GradeRequest(("setup_ddp", "mini_ddp")))
    assert graded == [("mini_ddp",)]


def test_a_batch_script_that_was_begun_is_graded(course: Course) -> None:
    assert "train" in untouched(course, GradeRequest(("train",)))
    with (course.exercises / "train.sbatch").open("a") as script:
        script.write("srun hostname\n")
    assert untouched(course, GradeRequest(("train",))) == {}


def test_a_broken_job_and_a_submission_are_always_graded(course: Course) -> None:
    job = next(name for name in course.names if "/" in name)
    assert untouched(course, GradeRequest((job,))) == {}
    assert untouched(course, GradeRequest(("mini_ddp",), course.exercises)) == {}


def test_the_answer_needs_no_torch(course: Course) -> None:
    code = (
        "import sys; from lockstep.commands.cli import main; sys.argv = ['lockstep', 'check', 'mini_ddp']\n"
        "try: main()\nexcept SystemExit as end: print(end.code, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT / "src"), "LOCKSTEP_COURSE": str(course.root)},
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "1 False", done.stderr
    told = json.loads(call("check", "mini_ddp", "--json", LOCKSTEP_COURSE=str(course.root)).stdout)
    assert told["exercises"][0]["checks"][0]["diagnosis"]["id"] == "not-implemented" and told["faults"] == []
