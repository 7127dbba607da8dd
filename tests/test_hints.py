"""Which hint comes next: one for what failed; if nothing has passed the next in order; and the last of all at the end."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from support import ROOT
from support.tiny_course import make_course
from typer.testing import CliRunner

from lockstep.authoring.review import _hints
from lockstep.commands import check
from lockstep.commands.learner import commands
from lockstep.course import Course, CourseError, hints, progress
from lockstep.grading.request import GradeRequest
from lockstep.grading.verdict import UNWRITTEN, CheckOutcome, CheckResult, Diagnosis, ExerciseResult, Report
from lockstep.notebook import exercise

SUM, QUIET = "test_agrees_on_both_ranks", "test_is_quiet"
TEXT = f"""\
# Start

One.

---

# Quiet
<!-- for: {QUIET} -->

Two.

---

<!--for: {SUM}, {QUIET}-->
Three.

---

# Answer
<!-- for: {SUM} -->

Four.
"""
ONE, TWO, THREE, FOUR = "**Start**\n\nOne.", "**Quiet**\n\nTwo.", "Three.", "**Answer**\n\nFour."
FOR_SUM = "for the check that failed: Both ranks get the same"
FOUND = "divides-by-contributors"
FOR_FOUND = "for what was found: It is divided by the number of ranks that had a gradient"
FOR_QUIET = "for the check that failed: Nothing is printed"


@pytest.fixture
def course(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Course:
    course = make_course(tmp_path)
    monkeypatch.setenv("LOCKSTEP_COURSE", str(course.root))
    (course.autograder / "hints").mkdir()
    (course.autograder / "hints" / "add.md").write_text(TEXT)
    return course


def take(course: Course) -> tuple[str, str]:
    """The next hint, and why it came."""
    taken, of, why = hints.take_hint(course, "add")
    assert len(taken) <= of <= 4 and (len(taken) == of) == (taken[-1] == FOUR)
    return taken[-1], why


def old_file(course: Course, count: int) -> None:
    """Progress as it was written when only the number of hints was kept."""
    known = {"passed": False, "best": 1, "max_score": 2, "attempts": 1, "last": "", "hints": count}
    course.workspace.mkdir(exist_ok=True)
    (course.workspace / "progress.json").write_text(json.dumps({"exercises": {"add": known}}))


def test_without_a_failed_check_they_come_in_order(course: Course) -> None:
    assert [take(course) for _ in range(5)] == [(ONE, ""), (TWO, ""), (THREE, ""), (FOUR, ""), (FOUR, "")]


@pytest.mark.parametrize(
    ("failed", "order"),
    [
        ([SUM, QUIET], [(THREE, FOR_SUM), (TWO, FOR_QUIET), (ONE, ""), (FOUR, FOR_SUM), (FOUR, "")]),
        ([QUIET, SUM], [(TWO, FOR_QUIET), (THREE, FOR_QUIET), (ONE, ""), (FOUR, FOR_SUM), (FOUR, "")]),
        ([QUIET], [(TWO, FOR_QUIET), (THREE, FOR_QUIET), (ONE, ""), (FOUR, ""), (FOUR, "")]),
        ([FOUND, SUM], [(ONE, FOR_FOUND), (THREE, FOR_SUM), (FOUR, FOR_SUM), (FOUR, "")]),
        (["test_gone"], [(ONE, ""), (TWO, ""), (THREE, ""), (FOUR, ""), (FOUR, "")]),
    ],
)
def test_one_for_the_first_failed_check_comes_first_and_the_last_comes_last(
    course: Course, failed: list[str], order: list[tuple[str, str]]
) -> None:
    file = course.autograder / "hints" / "add.md"
    if FOUND in failed:  # it is for what was found, before one for all that the check may find
        file.write_text(TEXT.replace("# Start\n", "# Start\n<!-- for: divides-by-contributors -->\n"))
    progress.record(course, "add", 0, 2, failed)
    assert [take(course) for _ in order] == order


@pytest.mark.parametrize(
    ("failed", "order"),
    [
        ([SUM], [THREE, FOUR]),
        ([QUIET], [TWO, THREE, FOUR]),
        (["test_gone", QUIET], [TWO, THREE, FOUR]),
        (["test_gone"], [ONE, TWO, THREE, FOUR]),
        ([], [ONE, TWO, THREE, FOUR]),
    ],
)
def test_once_something_has_passed_only_those_for_what_failed_come_before_the_last(
    course: Course, failed: list[str], order: list[str]
) -> None:
    progress.record(course, "add", 1, 2, failed)
    assert [take(course)[0] for _ in order] == order


def test_the_last_grading_counts_and_all_taken_stay_in_the_order_taken(course: Course) -> None:
    progress.record(course, "add", 1, 2, [SUM])
    assert take(course) == (THREE, FOR_SUM)
    progress.record(course, "add", 2, 2)
    assert take(course) == (ONE, "although the exercise has passed")
    progress.record(course, "add", 1, 2, [QUIET])
    assert hints.take_hint(course, "add") == ([THREE, ONE, TWO], 4, FOR_QUIET)
    assert progress.of(course, "add").hints == 3


@pytest.mark.parametrize(
    ("count", "taken"), [(0, [THREE]), (1, [ONE, THREE]), (2, [ONE, TWO, THREE]), (4, [ONE, TWO, THREE, FOUR])]
)
def test_of_an_older_file_the_hints_taken_stay_taken(course: Course, count: int, taken: list[str]) -> None:
    old_file(course, count)
    assert (progress.of(course, "add").hints, progress.of(course, "add").best) == (count, 1)
    progress.record(course, "add", 1, 2, [SUM])
    assert hints.take_hint(course, "add")[0] == taken
    assert not list(course.workspace.glob("*.broken-*"))


def test_a_file_that_is_not_python_takes_no_hint(course: Course) -> None:
    progress.record(course, "add", 1, 2, [SUM])
    course.exercises.mkdir()
    (course.exercises / "add.py").write_text("def add(a, b):\n    return (a\n")
    with pytest.raises(
        CourseError, match=r"add\.py:2 is not valid Python: '\(' was never closed\. .* no hint was taken"
    ):
        take(course)
    (course.exercises / "add.py").write_text("def add(a, b):\n    return a\n")
    assert take(course) == (THREE, FOR_SUM)


def test_a_file_of_fewer_hints_than_were_taken(course: Course) -> None:
    for _ in range(4):
        take(course)
    (course.autograder / "hints" / "add.md").write_text("One.\n---\nTwo.\n")
    assert hints.take_hint(course, "add") == (["One.", "Two."], 2, "")


def test_both_commands_say_why_and_show_no_comment(course: Course, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(exercise, "display", lambda card: shown.extend([repr(card), card.body]))
    progress.record(course, "add", 0, 2, [QUIET, SUM])
    exercise.ExerciseMagics(shell=None).hint("add")  # type: ignore[no-untyped-call]
    assert shown[0].startswith(f"Hint 1 of 4, {FOR_QUIET}\n\n{TWO}") and f"Hint 1 of 4, {FOR_QUIET}<" in shown[1]
    said = CliRunner().invoke(commands, ["hint", "add"]).stdout
    assert " ".join(said.split()).startswith(f"Hint 2 of 4, {FOR_QUIET} Three.")
    exercise.ExerciseMagics(shell=None).hint("add")  # type: ignore[no-untyped-call]
    assert shown[2].startswith("Hint 3 of 4\n\n**Start**")
    assert shown[3].index("Hint 1<") < shown[3].index("Two.") < shown[3].index("Hint 2<") < shown[3].index("Three.")
    assert "<!--" not in "".join(shown) + said and "test_" not in "".join(shown) + said


def test_each_grading_keeps_what_failed(course: Course, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was not written, or not imported, says nothing of a check's subject; what was not run hasn't failed."""
    outcomes = [(SUM, CheckOutcome.FAILED, "raised"), ("test_stub", CheckOutcome.FAILED, UNWRITTEN)]
    outcomes += [(f"test_{id}", CheckOutcome.FAILED, id) for id in ("syntax-error", "import-error")]
    checks = [CheckResult(id, id, outcome, Diagnosis(why, "It was so.")) for id, outcome, why in outcomes]
    checks += [CheckResult(QUIET, QUIET, CheckOutcome.PASSED), CheckResult("test_late", "late", CheckOutcome.NOT_RUN)]
    report = Report(7, (ExerciseResult("add", tuple(checks)),))
    course.exercises.mkdir()
    (course.exercises / "add.py").write_text("def add(a, b):\n    return a - b\n")
    monkeypatch.setattr(check, "_grade", lambda *_: report)
    monkeypatch.setattr(exercise, "_worker", SimpleNamespace(grade=lambda *_: report))
    check.check(course, GradeRequest(("add",)))
    assert progress.of(course, "add").failed == ["raised", SUM]
    progress.record(course, "add", 2, 2)
    assert progress.of(course, "add").failed == []
    exercise.ExerciseMagics(shell=None).check("add")  # type: ignore[no-untyped-call]
    assert progress.of(course, "add").failed == ["raised", SUM]


def test_author_check_reports_a_check_that_does_not_exist(course: Course) -> None:
    assert list(_hints(course, "add")) == []
    file = course.autograder / "hints" / "add.md"
    file.write_text(TEXT.replace(QUIET, "test_quiet").replace("for: test_agrees", "fro: test_agrees"))
    assert [(lack.where, lack.text) for lack in _hints(course, "add")] == [
        ("autograder/hints/add.md", "a hint is for test_quiet, and no check or diagnosis has this name"),
        ("autograder/hints/add.md", "a hint is for fro:, and no check or diagnosis has this name"),
    ]


@pytest.mark.parametrize("name", Course(ROOT).names)
def test_every_hint_of_the_course_is_for_checks_that_exist(name: str) -> None:
    course = Course(ROOT)
    assert [str(lack) for lack in _hints(course, name)] == []
    *others, last = hints.hints(course, name)
    assert "<!--" not in "".join(one.text for one in (*others, last))
    assert any(one.checks for one in others) or "/" in name, "none says which check it is for"


def test_after_a_pass_a_hint_says_so(course: Course) -> None:
    progress.record(course, "add", 1, 2, ["test_sum"])
    assert take(course)[1] != "although the exercise has passed"
    progress.record(course, "add", 2, 2)
    assert take(course)[1] == "although the exercise has passed"
    progress.record(course, "add", 1, 2, ["test_sum"])
    assert take(course)[1] != "although the exercise has passed", "it fails again"


def test_a_solutions_code_has_no_contract_and_no_example() -> None:
    text = '"""Exercise add.\n\nChapter 1.\n"""\n\nimport os\n\n\ndef add(a, b):\n    """Add.\n\n    Both.\n    """\n    return a + b\n\n\n'
    text += 'def help():\n    """A line."""\n\n\nclass Empty:\n    """Nothing\n    but this."""\n\n\nif __name__ == "__main__":\n    add(1, 2)\n'
    code = hints.code_of(text)
    assert code.startswith('import os\n\n\ndef add(a, b):\n    return a + b\n\n\ndef help():\n    """A line."""\n')
    assert "__main__" not in code
    ast.parse(code)
