"""Weights, late days and accommodations: exact, rounded once, explained line by line; a bad file is one clear line."""

from __future__ import annotations

import csv
import io
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from support.command_line import CommandLine

from lockstep.authoring.release import contents
from lockstep.course import Course
from lockstep.grading.classroom import NOT_HANDED_IN, ClassResult, Learner
from lockstep.grading.exports.classroom50 import scores
from lockstep.grading.exports.csv_grades import grades_csv
from lockstep.grading.exports.gradescope import class_results
from lockstep.grading.exports.html_report import html_report
from lockstep.grading.intake import Handed
from lockstep.grading.policy import Classroom50, Grades, Half, Policy, Rounding, apply
from lockstep.grading.policy_file import PolicyError, load, parse
from lockstep.grading.stamp import stamp
from lockstep.grading.verdict import CheckOutcome, CheckResult, Diagnosis, ExerciseResult, Report

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("mini_ddp", "train_ddp", "clinic/subgroup")
DUE = datetime(2026, 11, 30, 23, 59, tzinfo=timezone.utc)
LATE = "[late]\ndeadline = 2026-12-01T00:59:00+01:00\npercent_a_day = 10\n"


def exercise(name: str, passed: int, most: int, reason: str = "") -> ExerciseResult:
    found = Diagnosis("hang", "it hangs\nmore", "", (1,), f"{name}.py", 3)
    checks = [CheckResult(f"check {n}", f"test_{n}", CheckOutcome.PASSED) for n in range(passed)]
    rest = CheckOutcome.NOT_RUN if reason else CheckOutcome.FAILED
    checks += [
        CheckResult(f"check {n}", f"test_{n}", rest, None if reason else found, reason) for n in range(passed, most)
    ]
    return ExerciseResult(name, tuple(checks), 1.0)


def learner(id: str = "ada", *results: ExerciseResult, late: timedelta | None = None, **more: Any) -> Learner:
    faults = more.pop("faults", ())
    report = Report(7, results, faults=faults) if results or faults else None
    handed = Handed(
        id,
        more.pop("shown", id),
        Path("/nowhere"),
        (),
        DUE + late if late is not None else None,
        more.pop("marked", False),
    )
    return Learner(handed, report, 7)


def graded(*learners: Learner, most: dict[str, int] | None = None) -> ClassResult:
    return ClassResult(7, ("mini_ddp", "train_ddp"), learners, max_scores=most or {"mini_ddp": 8, "train_ddp": 14})


FULL = (exercise("mini_ddp", 8, 8), exercise("train_ddp", 7, 14))


def policy(text: str) -> Policy:
    return parse(text, NAMES)


def test_without_a_word_each_check_is_a_point() -> None:
    for known in (Policy(), load(Course(ROOT)), policy("")):
        grade = apply(known, graded(learner("ada", *FULL, late=timedelta(days=9))))["ada"]
        assert (grade.score, grade.most, grade.lines, grade.late_days) == (15, 22, (), 0)
        assert [(one.name, one.points, one.most) for one in grade.exercises] == [
            ("mini_ddp", 8, 8),
            ("train_ddp", 7, 14),
        ]


def test_weights_and_all_or_nothing() -> None:
    known = policy("[points]\ntrain_ddp = 5\n[partial]\nmini_ddp = false\n")
    grade = apply(known, graded(learner("ada", exercise("mini_ddp", 7, 8), exercise("train_ddp", 13, 14))))["ada"]
    assert [(one.points, one.most) for one in grade.exercises] == [(0, 8), (Decimal("4.64"), 5)]
    assert grade.score == Decimal("4.64") and grade.most == 13
    assert grade.lines == (
        "mini_ddp: 7 of 8 checks passed, and it gives its points for all of them only",
        "train_ddp: 13 of 14 checks passed: 4.64 of 5 points",
    )
    nothing = apply(policy("[partial]\ndefault = false\ntrain_ddp = true"), graded(learner("ada", *FULL)))["ada"]
    assert nothing.score == 15, "an exercise whose checks all pass has its points, and one may be let off"


@pytest.mark.parametrize(
    ("after", "days"),
    [(-timedelta(days=3), 0), (timedelta(0), 0), (timedelta(minutes=15), 0), (timedelta(minutes=16), 1), (timedelta(days=1), 1),
     (timedelta(days=1, seconds=1), 2), (timedelta(days=400), 401 - 1)],
)  # fmt: skip
def test_days_are_begun_days_after_the_deadline_in_any_zone(after: timedelta, days: int) -> None:
    """The deadline is given in Berlin, the download gives UTC; 15 minutes are forgiven, not given."""
    grade = apply(policy(LATE), graded(learner("ada", *FULL, late=after)))["ada"]
    assert grade.late_days == days
    percent = min(10 * days, 50)
    assert grade.taken_off == Rounding()(Fraction(15 * percent, 100)) and grade.score == 15 - grade.taken_off
    assert len(grade.lines) == (days > 0)
    if days:
        assert grade.lines[0].startswith(f"{days} day") and f"{percent} % of the points taken off" in grade.lines[0]
        assert ("the most that is taken off" in grade.lines[0]) == (days > 5)


def test_what_a_download_says_of_time() -> None:
    marked = apply(policy(LATE), graded(learner("ada", *FULL, marked=True)))["ada"]
    assert marked.late_days == 1 and marked.lines[0].startswith("marked as late by the download, which gives no time")
    assert apply(policy(LATE), graded(learner("ada", *FULL)))["ada"].late_days == 0
    free = apply(policy(LATE.replace("10", "0")), graded(learner("ada", *FULL, late=timedelta(days=2))))["ada"]
    assert free.score == 15 and free.lines == ("2 days late: nothing taken off",)


@pytest.mark.parametrize(
    ("own", "days", "score"),
    [("extra_days = 2", 1, Decimal("13.5")), ("extra_days = 2.5", 0, 15), ("deadline = 2026-12-04T00:00:00Z", 0, 15), ("late = false", 0, 15),
     ('exempt = ["train_ddp"]', 3, Decimal("5.6"))],
)  # fmt: skip
def test_accommodations_are_one_learners(own: str, days: int, score: Decimal) -> None:
    everybody = graded(*(learner(id, *FULL, late=timedelta(days=2, hours=10)) for id in ("ada", "bob")))
    grades = apply(policy(f"{LATE}[learner.ada]\n{own}\n[learner.zoe]\nlate = false"), everybody)
    assert (grades["ada"].late_days, grades["ada"].score) == (days, score)
    assert (grades["bob"].late_days, grades["bob"].score) == (3, Decimal("10.5"))
    assert grades.remarks == ("the policy has an accommodation for 'zoe', who is not in this class",)
    if "exempt" in own:
        assert grades["ada"].most == 8 and "train_ddp does not count for this learner" in grades["ada"].lines


def test_what_was_not_asked_for_costs_nothing() -> None:
    """It is not in the learner's report then; an exercise that was asked for is, with its checks not run."""
    grade = apply(policy(""), graded(learner("ada", exercise("mini_ddp", 4, 8))))["ada"]
    assert (grade.score, grade.most, grade.of("train_ddp")) == (4, 8, None)
    asked = learner("ada", exercise("mini_ddp", 4, 8), exercise("train_ddp", 0, 14, NOT_HANDED_IN))
    assert apply(policy(""), graded(asked))["ada"].most == 22


def test_whoever_is_graded_on_fewer_exercises_is_named() -> None:
    """Else the easiest exercise alone is worth all points, and nobody notices."""
    one = graded(learner("ada", *FULL), learner("bob", FULL[0]), learner("cy"))
    (said,) = apply(policy(""), one).remarks
    assert "cost them no points: bob." in said and said.endswith("--exercises mini_ddp,train_ddp --again")
    assert apply(policy('[learner.bob]\nexempt = ["train_ddp"]'), one).remarks == ()
    assert apply(policy(""), graded(learner("ada", *FULL), learner("cy"))).remarks == ()


def test_what_the_machine_lacks_costs_nothing() -> None:
    """The checks that ran share the points; where none could run, the exercise does not count."""

    def lacking(passed: int, failed: int, absent: int) -> ExerciseResult:
        ran = exercise("train_ddp", passed, passed + failed).checks
        missing = [
            CheckResult(f"host {n}", f"host_{n}", CheckOutcome.NOT_RUN, reason="no hosts", lacking=True)
            for n in range(absent)
        ]
        return ExerciseResult("train_ddp", (*ran, *missing), 1.0)

    grades = apply(
        Policy(),
        graded(learner("ada", lacking(12, 0, 2)), learner("bob", lacking(6, 6, 2)), learner("cleo", lacking(0, 0, 14))),
    )
    ada, bob, cleo = (grades[name].of("train_ddp") for name in ("ada", "bob", "cleo"))
    assert ada and (ada.points, ada.most) == (14, 14) and "2 of 14 checks could not be run" in ada.line
    assert bob and (bob.points, bob.most) == (7, 14)
    assert cleo and (cleo.points, cleo.most) == (0, 0)


def test_faults_and_nothing_to_grade() -> None:
    everybody = graded(
        learner("ada", *FULL, faults=("broke",), late=timedelta(days=2)), learner("bob", late=timedelta(days=2))
    )
    ada, bob = apply(policy(LATE), everybody).by_learner.values()
    assert (ada.score, ada.most, ada.taken_off) == (None, 22, 0) and "none is lost" in ada.lines[0]
    assert (bob.score, bob.most, bob.lines) == (0, 22, ())


@pytest.mark.parametrize(
    ("to", "half", "value", "expected"),
    [("0.01", "up", Fraction(13, 14) * 5, "4.64"), ("1", "up", Fraction(5, 2), "3"), ("1", "even", Fraction(5, 2), "2"), ("1", "down", Fraction(5, 2), "2"),
     ("1", "even", Fraction(7, 2), "4"), ("1", "down", Fraction(25001, 10000), "3"), ("0.5", "up", Fraction(7, 4), "2"), ("0.5", "up", Fraction(49, 40), "1"),
     ("0.25", "up", Fraction(1, 3), "0.25"), ("10", "up", Fraction(149, 10), "10"), ("1", "even", Fraction(5, 2) + Fraction(1, 10**60), "3"), ("0.01", "up", Fraction(20), "20")],
)  # fmt: skip
def test_rounding_is_exact(to: str, half: str, value: Fraction, expected: str) -> None:
    assert str(Rounding(Decimal(to), Half(half))(value)) == expected


def test_a_row_of_grades_adds_up() -> None:
    known = policy(f"{LATE}[points]\nmini_ddp = 10\ntrain_ddp = 3.3\n[rounding]\nto = 0.1\n")
    for passed in range(15):
        person = learner(
            "ada", exercise("mini_ddp", passed % 9, 8), exercise("train_ddp", passed, 14), late=timedelta(hours=30)
        )
        grade = apply(known, graded(person))["ada"]
        assert grade.score == sum(one.points for one in grade.exercises) - grade.taken_off
        assert grade.score is not None and 0 <= grade.score <= grade.most


WRONG = {
    "[late]\n\n  percent_a_day = 120": "policy.toml:3: late.percent_a_day is 120: give a number from 0 to 100",
    "[late]\npercent_a_day = -1": "policy.toml:2: late.percent_a_day is -1: give a number from 0 to 100",
    "[late]\npercent_a_day = 5": "policy.toml:2: late.percent_a_day takes points off, but there is no late.deadline: write one",
    "[late]\ndeadline = 2026-11-30T23:59:00": "policy.toml:2: late.deadline is 2026-11-30 23:59:00: write day, time and offset",
    "[late]\ndeadline = 'soon'": "policy.toml:2: late.deadline is 'soon': write day",
    "[late]\nper_day = 5": "policy.toml:2: late.per_day is not known",
    "[points]\ntrain_dp = 3": "policy.toml:2: points.train_dp names no exercise: did you mean train_ddp?",
    "[points]\n'clinic/subgroup' = true": "policy.toml:2: points.clinic/subgroup is true: give 0 or more points",
    "[points]\nmini_ddp = nan": "policy.toml:2: points.mini_ddp is NaN",
    "[points]\nmini_ddp = inf": "policy.toml:2: points.mini_ddp is Infinity",
    "[points]\nmini_ddp = 1e99": "policy.toml:2: points.mini_ddp is 1E+99",
    "[partial]\nmini_ddp = 1": "policy.toml:2: partial.mini_ddp is 1: write true or false",
    "[partial]\nno_such = true": "policy.toml:2: partial.no_such names no exercise",
    "points = 3": "policy.toml:1: points is 3: write a table, [points]",
    "weights = 3": "policy.toml:1: weights is not known",
    "[rounding]\nto = 0": "policy.toml:2: rounding.to is 0: give a number such as 1, 0.5 or 0.01",
    "[rounding]\nhalf = 'off'": "policy.toml:2: rounding.half is 'off': write",
    "[learner.ada]\nexempt = 'mini_ddp'": "policy.toml:2: learner.ada.exempt is 'mini_ddp': write a list",
    "[learner.ada]\nexempt = ['x']": "policy.toml:2: learner.ada.exempt names 'x', which is no exercise",
    "[learner.ada]\n\nlate = 'no'": "policy.toml:3: learner.ada.late is 'no': write true or false",
    "[learner]\nada = 3": "policy.toml:2: learner.ada is 3: write a table, [learner.ada]",
    "[learner.ada]\nextra_days = 1\n[learner.bob]\nextra_days = 'x'": "policy.toml:4: learner.bob.extra_days is 'x'",
    "[canvas]\nassignment = 4": "policy.toml:2: canvas.assignment is 4: copy the column's heading",
    "[classroom50]\nclassroom = 'CS 1'": "policy.toml:2: classroom50.classroom is 'CS 1': write a short name",
    "[late\n": "policy.toml: Expected ']'",
    "[late]\na = 1\na = 2": "policy.toml: Cannot overwrite a value",
}


@pytest.mark.parametrize("text", WRONG, ids=[line[:40] for line in WRONG.values()])
def test_what_is_wrong_is_one_line_with_its_place(text: str) -> None:
    with pytest.raises(PolicyError) as caught:
        policy(text)
    assert str(caught.value).startswith(WRONG[text]) and "\n" not in str(caught.value)
    assert "line" in str(caught.value) or ":" in str(caught.value)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"there is no .*mine.toml: copy autograder/policy.toml"):
        load(Course(ROOT), tmp_path / "mine.toml")
    (tmp_path / "mine.toml").write_bytes(b"\xff")
    with pytest.raises(PolicyError, match="cannot be read"):
        load(Course(ROOT), tmp_path / "mine.toml")


def test_a_file_that_another_editor_saved(tmp_path: Path) -> None:
    """Windows marks UTF-8 at its beginning; UTF-16 is one line that says so, and so is a file of brackets."""
    file = tmp_path / "policy.toml"
    file.write_text('[learner.ada]\ncomment = "é"\n', encoding="utf-8-sig")
    assert load(Course(ROOT), file).learners["ada"].comment == "é"
    for data, said in (("x = 1".encode("utf-16"), "cannot be read"), (b"x = " + b"[" * 100_000, "policy.toml: ")):
        file.write_bytes(data)
        with pytest.raises(PolicyError, match=said) as error:
            load(Course(ROOT), file)
        assert "\n" not in str(error.value)


def test_a_mistyped_id_is_asked_about() -> None:
    grades = apply(policy("[learner.ada-lovelase]\nlate = false\n"), graded(learner("ada-lovelace", *FULL)))
    assert grades.remarks[0].endswith("who is not in this class: did you mean ada-lovelace?")


def test_the_file_that_we_ship_can_be_used_with_each_of_its_comments_taken_off() -> None:
    text = (ROOT / "autograder" / "policy.toml").read_text(encoding="utf-8")
    head, body = text.split("[points]", 1)
    lines = [
        line.removeprefix("# ") if "=" in line or line.startswith("# [") else line
        for line in f"[points]{body}".splitlines()
    ]
    known = parse("\n".join(lines), Course(ROOT).names)
    assert known.points == {"train_ddp": 20, "clinic/fixed_address": 5} and known.partial == {
        "launch_distributed": False
    }
    assert known.late.deadline == datetime(2026, 11, 30, 22, 59, tzinfo=timezone.utc)
    assert known.classroom50 == Classroom50("cs101-fall", "lockstep")
    assert known.canvas_assignment == "Homework 4 (123)"
    assert known.book == "https://example.org/lockstep"
    assert known.learners["ada-lovelace-4711"].exempt == {"mini_ddp"}
    assert "Learners never see this file" in head


@pytest.mark.parametrize("address", ['"javascript:alert(1)"', '"https://a b"', "1"])
def test_the_books_address_is_one(address: str) -> None:
    with pytest.raises(PolicyError, match=r"book.*address"):
        policy(f"[book]\naddress = {address}\n")


def test_no_learner_is_given_the_policy() -> None:
    files = contents(Course(ROOT), ["average_gradients"])
    assert "autograder/diagnoses.toml" in files and "autograder/policy.toml" not in files


# grades.csv and Classroom 50 ------------------------------------------------------------------------------------------


def everybody() -> tuple[ClassResult, Grades]:
    people = (
        learner("ada", *FULL, late=timedelta(hours=1), shown="cs1-hw1-ada-l"), learner("bob", exercise("mini_ddp", 0, 8, NOT_HANDED_IN), exercise("train_ddp", 14, 14), shown="bob"),
        learner("eve", *FULL, faults=("broke",), shown="eve"), learner("nil", shown="nil"), learner("odd", *FULL, shown="Odd Name"), learner("two", *FULL, shown="BOB"),
    )  # fmt: skip
    whole = graded(*people)
    return whole, apply(policy(f"{LATE}[points]\ntrain_ddp = 5\n[rounding]\nto = 0.5"), whole)


def test_grades_csv_has_the_policys_points_and_says_why() -> None:
    whole, grades = everybody()
    text = grades_csv(whole, grades)
    ada, bob, eve, nil, *_ = csv.DictReader(io.StringIO(text, newline=""))
    assert (ada["score"], ada["max_score"], ada["mini_ddp"], ada["train_ddp"]) == ("9.5", "13", "8", "2.5")
    assert (
        ada["remarks"]
        == "train_ddp: 7 of 14 checks passed: 2.5 of 5 points / 1 day late: 10 % of the points taken off (−1)"
    )
    assert (bob["score"], bob["mini_ddp"]) == ("5", "0")
    assert (eve["outcome"], eve["score"], eve["max_score"], eve["train_ddp"]) == ("fault of the grader", "", "13", "")
    assert (nil["outcome"], nil["score"], nil["max_score"]) == ("nothing to grade", "0", "13")
    assert '"9.5"' not in text, "points are numbers"


def test_gradescope_is_given_the_policys_points_and_the_reasons() -> None:
    whole, grades = everybody()
    ada = class_results(whole.learners[0], grades["ada"])
    assert ada["score"] == 9.5 and sum(test["score"] for test in ada["tests"]) == 15
    assert "9.5 of 13 points" in ada["output"] and "1 day late: 10 % of the points taken off (−1)" in ada["output"]


def whole_numbers(record: dict[str, Any]) -> None:
    """What Classroom 50's own validator asks of a record."""
    pairs = [(record["score"], record["max-score"]), *((test["score"], test["max-score"]) for test in record["tests"])]
    assert all(type(number) is int for pair in pairs for number in pair)
    assert all(0 <= score <= most for score, most in pairs)
    assert all(
        isinstance(test["test-name"], str) and test["test-name"] and type(test["passed"]) is bool
        for test in record["tests"]
    )
    assert record["schema"] == "classroom50/result/v1" and record["submission"].startswith("submit/")
    assert all(record[key] for key in ("classroom", "owner", "commit", "release", "review"))
    datetime.strptime(record["datetime"], "%Y-%m-%dT%H:%M:%SZ")


def test_classroom_50_of_a_class() -> None:
    whole, grades = everybody()
    book = scores(whole, "cs1", "hw1", DUE, grades)
    (bucket,) = book.data["assignments"].values()
    assert book.data["schema"] == "classroom50/scores/v1" and bucket["type"] == "individual"
    assert [entry["owner"] for entry in bucket["entries"]] == ["ada-l", "bob", "nil"]
    assert [line.partition(":")[0] for line in book.left_out] == ["eve", "odd", "two"]
    for entry in bucket["entries"]:
        (record,) = entry["submissions"]
        whole_numbers(record)
        assert entry["override"] is True and "assignment" not in record and record["max-score"] == 13
    ada = bucket["entries"][0]["submissions"][0]
    assert (ada["score"], ada["datetime"], ada["submission"]) == (
        10,
        "2026-12-01T00:59:00Z",
        "submit/manual-2026-12-01T00-59-00Z",
    )
    assert [test["max-score"] for test in ada["tests"]] == [1] * 8 + [5]


def test_whole_points_in_the_policy_are_classroom_50s() -> None:
    known = policy(f"{LATE}[points]\ntrain_ddp = 5\nmini_ddp = 3\n[rounding]\nto = 1")
    for passed in range(15):
        person = learner(
            "ada", exercise("mini_ddp", passed % 9, 8), exercise("train_ddp", passed, 14), late=timedelta(hours=passed)
        )
        grades = apply(known, graded(person))
        grade = grades["ada"]
        (bucket,) = scores(graded(person), "cs1", "hw1", DUE, grades).data["assignments"].values()
        record = bucket["entries"][0]["submissions"][0]
        whole_numbers(record)
        assert (record["score"], record["max-score"]) == (grade.score, grade.most)


def test_a_bad_policy_is_told_before_anything_is_graded(lockstep: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("[late]\npercent_a_day = 120\n", encoding="utf-8")
    (tmp_path / "class" / "ada").mkdir(parents=True)
    done = lockstep("grade", tmp_path / "class", "--out", tmp_path / "out", "--policy", tmp_path / "mine.toml")
    said = "lockstep: mine.toml:2: late.percent_a_day is 120: give a number from 0 to 100\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)
    assert not (tmp_path / "out").exists()


def test_a_late_policy_warns_when_no_time_is_known(lockstep: CommandLine) -> None:
    """Nothing can be taken off then, and the teacher has to know it; who is not late anyway is no matter."""
    some = graded(*(learner(name, exercise("mini_ddp", 8, 8)) for name in ("ada", "bob", "cy", "di")),
                  learner("eve", exercise("mini_ddp", 8, 8), late=timedelta(0)),
                  learner("fay", exercise("mini_ddp", 8, 8), marked=True))  # fmt: skip
    _, remark = apply(parse(LATE + "[learner.di]\nlate = false\n", NAMES), some).remarks
    assert remark.endswith("so nothing was taken off for lateness: ada, bob, cy")
    assert "lateness" not in str(apply(parse(LATE.replace("10", "0"), NAMES), some).remarks)
    done = lockstep("grade", "x", "--late", "3")
    assert done.returncode == 2 and "No such option" in done.stderr and "slice" not in done.stderr


BY_HAND = """
[learner.ada]
comment = "well \\n done <b>"
[learner.ada.mark.train_ddp]
points = 12.5
comment = "a typo"
[learner.bob.mark.train_ddp]
excuse = true
[learner.cy.mark.mini_ddp]
points = 8
[learner.di.mark."clinic/subgroup"]
points = 1
[learner.di]
late_days = 2
"""


def test_more_points_by_hand_than_there_are_is_a_remark() -> None:
    """185 for 18.5 is a typing mistake; what is more on purpose still counts."""
    known = policy("[learner.ada.mark.train_ddp]\npoints = 125\n[learner.bob.mark.train_ddp]\npoints = 14\n")
    grades = apply(known, graded(learner("ada", *FULL), learner("bob", *FULL)))
    assert grades.remarks == ("ada has 125 points by hand for train_ddp, which gives 14 at most",)
    assert grades["ada"].score == 8 + 125


def test_a_comment_stays_when_the_grader_broke() -> None:
    known = policy('[learner.ada]\ncomment = "call me"\nextra_days = 2\nlate = false\n')
    some = graded(learner("ada", faults=("broke",)))
    grades = apply(known, some)
    grade = grades["ada"]
    assert grade.score is None and grade.by_hand == ("2 days more", "nothing is taken off for lateness")
    assert "call me" in html_report(some.learners[0], grade)
    (row,) = csv.DictReader(io.StringIO(grades_csv(some, grades)))
    assert row["remarks"] == "broke / comment: call me"


def test_marks_by_hand() -> None:
    """They stand in place of the checks' points, say so, and a regrade that finds other points keeps them."""
    known = policy(LATE + BY_HAND)
    for points in (7, 3):
        results = (exercise("mini_ddp", 8, 8), exercise("train_ddp", points, 14))
        some = graded(learner("ada", *results), learner("bob", *results), learner("cy"), learner("di", *results))
        grades = apply(known, some)
        ada, bob, cy, di = (grades[id] for id in ("ada", "bob", "cy", "di"))
        assert (ada.score, ada.most) == (Decimal("20.5"), 22)
        assert ada.lines == (by_hand := f"train_ddp: 12.5 of 14 points, given by hand in place of {points}",)
        assert ada.comments == (("train_ddp", "a typo"), ("", "well \n done <b>")) and ada.by_hand == (by_hand,)
        assert ada.said == (by_hand, "comment on train_ddp: a typo", "comment: well done <b>")
        assert bob.by_hand == ("train_ddp does not count",) and di.by_hand == ("counted as 2 days late",)
        assert (bob.score, bob.most) == (8, 8) and "train_ddp does not count for this learner" in bob.lines
        assert (cy.score, cy.most) == (8, 22) and cy.lines == ("mini_ddp: 8 of 8 points, given by hand in place of 0",)
        assert di.late_days == 2 and di.taken_off == Rounding()(Fraction(8 + points, 5))
        assert di.lines[0].startswith("2 days late: 20 % of the points taken off")
        assert "di has marks by hand for what was not graded here: clinic/subgroup" in grades.remarks
        table = {row["learner"]: row for row in csv.DictReader(io.StringIO(grades_csv(some, grades)))}
        assert table["ada"]["score"] == "20.5" and "given by hand" in table["ada"]["remarks"]
        assert (table["cy"]["score"], table["cy"]["mini_ddp"]) == ("8", "8")
        assert class_results(some.learners[2], cy)["score"] == 8.0
        assert "&lt;b&gt;" in html_report(some.learners[0], ada) and "<b>" not in html_report(some.learners[0], ada)


@pytest.mark.parametrize(
    ("text", "said"),
    [("mark.train_ddp.points = -1", "points is -1: give 0 or more points"), ("mark.train_dpd.points = 1", "did you mean train_ddp?"),
     ("mark.train_ddp.comment = 3", "comment is 3: write a text"), ("mark.train_ddp.point = 3", "did you mean points?"),
     (f"comment = '{'x' * 10_001}'", "comment has 10,001 characters: write 10,000 at most"),
     ("late_days = -2", "late_days is -2: give whole days"), ("mark = 3", "write a table")],
)  # fmt: skip
def test_a_mark_that_is_wrong_is_one_line(text: str, said: str) -> None:
    with pytest.raises(PolicyError) as error:
        policy(f"[learner.ada]\n{text}")
    assert said in str(error.value) and "\n" not in str(error.value)


def test_a_mark_in_the_courses_policy_asks_for_no_regrade(tmp_path: Path) -> None:
    """The policy decides what a grading counts for, not what it concludes."""
    (tmp_path / "autograder").mkdir()
    (tmp_path / "solutions").mkdir()
    found = set()
    for text in ("", BY_HAND):
        (tmp_path / "autograder" / "policy.toml").write_text(text)
        found.add(stamp(Course(tmp_path)))
    (tmp_path / "autograder" / "diagnoses.toml").write_text("x = 1")
    assert len(found) == 1 and stamp(Course(tmp_path)) not in found
