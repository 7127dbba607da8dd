"""A group hands in once, and all of its members have the grade."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest

from lockstep.course import Course
from lockstep.grading.classroom import ClassResult, Learner
from lockstep.grading.intake import Handed
from lockstep.grading.policy_file import PolicyError, parse
from lockstep.grading.verdict import CheckOutcome, CheckResult, ExerciseResult, Report
from lockstep.grading.writers import mark, write_all

NAMES = ("setup_ddp",)
RED = '[group.red]\nmembers = ["ada-11", "bob-12", "cy-13"]\n'


def learner(id: str, digest: str = "", passed: int = 1, faults: tuple[str, ...] = ()) -> Learner:
    number = id.rpartition("-")[2]
    handed = Handed(id, id.title(), Path("/nowhere"), (), account=f"moodle {number}" if number.isdigit() else "")
    ends = [CheckOutcome.PASSED] * passed + [CheckOutcome.FAILED] * (3 - passed)
    checks = tuple(CheckResult(f"check {n}", f"test_{n}", end) for n, end in enumerate(ends))
    report = Report(7, (ExerciseResult("setup_ddp", checks),), faults=faults) if digest else None
    return Learner(handed, report, 7, digest, seconds=5.0)


def graded(*learners: Learner) -> ClassResult:
    return ClassResult(7, NAMES, tuple(sorted(learners, key=lambda one: one.id)), max_scores={"setup_ddp": 3})


def test_all_members_have_the_grade_of_the_one_who_handed_in(course: Course, tmp_path: Path) -> None:
    """Canvas's way: one member has handed in, one is in the download with nothing, one isn't in it at all."""
    some = graded(learner("ada-11", "x", 2), learner("bob-12"), learner("dan-14", "y", 3))
    own = "[learner.cy-13]\nexempt = []\n[learner.bob-12.mark.setup_ddp]\npoints = 1\n"
    found = mark(some, course, parse(RED + own, NAMES))
    assert {one.id: found.grades[one.id].score for one in found.graded.learners} == {
        "ada-11": 2, "bob-12": 1, "cy-13": 2, "dan-14": 3,
    }  # fmt: skip
    assert found.grades.remarks == ("not in the download, graded with their group red: cy-13",)
    assert [one.id for one in found.once.learners] == ["ada-11", "dan-14"]
    assert found.grades["cy-13"].lines == ("handed in by Ada-11, for the group red",)
    assert found.grades["bob-12"].by_hand[0] == "handed in by Ada-11, for the group red"
    assert found.grades["ada-11"].by_hand == (), "who handed in has nothing from another"
    assert [(one.handed.shown, one.handed.account) for one in found.graded.learners][1:3] == [
        ("Bob-12", "moodle 12"), ("cy-13", "moodle 13"),
    ]  # fmt: skip
    write_all(some, tmp_path, course, parse(RED, NAMES))
    assert (tmp_path / "reports" / "cy-13.html").is_file()
    rows = {row["Identifier"]: row["Grade"] for row in csv.DictReader(io.StringIO((tmp_path / "lms" / "moodle_grades.csv").read_text()))}  # fmt: skip
    assert rows == {"Participant 11": "2", "Participant 12": "2", "Participant 13": "2", "Participant 14": "3"}


def test_copies_of_one_work_are_one_work(course: Course) -> None:
    """Moodle's way: each member has a copy. The grading that did not break counts, and they are not alike by chance."""
    some = graded(learner("ada-11", "x", 0, faults=("broke",)), learner("bob-12", "x", 3), learner("cy-13", "x", 1))
    found = mark(some, course, parse(RED, NAMES))
    assert [found.grades[id].score for id in ("ada-11", "bob-12", "cy-13")] == [3, 3, 3]
    assert [one.id for one in found.once.learners] == ["bob-12"]
    assert [one.seconds for one in found.graded.learners] == [0.0, 5.0, 0.0]


@pytest.mark.parametrize(
    ("more", "scores", "remark"),
    [("", [3, 1, 0], "the members of the group red handed in different files (ada-11, bob-12), so each has their own grade: say whose counts with work ="),
     ('work = "bob-12"', [1, 1, 1], ""), ('work = "cy-13"', [3, 1, 0], "the group red names the work of cy-13, who handed in nothing")],
)  # fmt: skip
def test_of_different_work_the_teacher_says_whose_counts(
    course: Course, more: str, scores: list[int], remark: str
) -> None:
    some = graded(learner("ada-11", "x", 3), learner("bob-12", "y", 1), learner("cy-13"))
    found = mark(some, course, parse(RED + more, NAMES))
    assert [found.grades[one.id].score for one in found.graded.learners] == scores
    assert found.grades.remarks == ((remark,) if remark else ())


def test_a_group_of_nobody(course: Course) -> None:
    found = mark(graded(learner("ada-11"), learner("zoe-19", "x")), course, parse(RED, NAMES))
    assert found.grades.remarks == ("nobody of the group red handed in anything that can be graded",)
    assert [one.id for one in found.graded.learners] == ["ada-11", "zoe-19"]


@pytest.mark.parametrize(
    ("text", "said"),
    [('members = ["ada"]', "policy.toml:2: group.a.members is ['ada']: write a list of two ids or more"),
     ('members = ["ada", "ada"]', "two ids"), ("members = 3", "two ids"), ("", "two ids"),
     ('members = ["ada", "../../bob"]', "'../../bob', which is no id"), ('members = ["ada", "=cmd"]', "no id"),
     ('members = ["ada", "bob"]\nwork = "cy"', "policy.toml:3: group.a.work is 'cy': name one of the members"),
     ('members = ["ada", "bob"]\nwork = 3', "name one of the members"),
     ('members = ["ada", "bob"]\nmember = 3', "did you mean members?"),
     ('members = ["ada", "bob"]\n[group.b]\nmembers = ["cy", "ada"]', "policy.toml:4: group.b.members has ada, who is in the group a as well")],
)  # fmt: skip
def test_what_is_wrong_is_one_line(text: str, said: str) -> None:
    with pytest.raises(PolicyError) as error:
        parse(f"[group.a]\n{text}", NAMES)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_without_groups_nothing_changes(course: Course) -> None:
    some = graded(learner("ada-11", "x"), learner("bob-12", "x"))
    found = mark(some, course, parse("", NAMES))
    assert found.graded == some and found.once == some
