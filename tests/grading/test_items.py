"""Which checks are hard: counted over those who handed in, with what was found; and who failed which."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

from lockstep.grading.classroom import NOT_HANDED_IN, ClassResult, Learner
from lockstep.grading.exports.class_page import class_page
from lockstep.grading.exports.items import checks_csv, items, items_csv
from lockstep.grading.intake import Handed
from lockstep.grading.policy import Policy, apply
from lockstep.grading.verdict import CheckOutcome, CheckResult, Diagnosis, ExerciseResult, Report

PASSED, FAILED, NOT_RUN = CheckOutcome.PASSED, CheckOutcome.FAILED, CheckOutcome.NOT_RUN


def check(number: int, end: CheckOutcome, diagnosis: str = "", reason: str = "") -> CheckResult:
    found = Diagnosis(diagnosis, "it hangs", "", (0,), "x.py", 3) if diagnosis else None
    return CheckResult(f"check {number}", f"test_{number}", end, found, reason)


def learner(id: str, *results: ExerciseResult, shown: str = "") -> Learner:
    return Learner(Handed(id, shown or id, Path("/nowhere"), ()), Report(7, results) if results else None, 7)


ABSENT = ExerciseResult("mini_ddp", (check(1, NOT_RUN, reason=NOT_HANDED_IN),))
SOME = ClassResult(7, ("mini_ddp", "train_ddp"), (
    learner("ada", ABSENT, ExerciseResult("train_ddp", (check(1, PASSED), check(2, FAILED, "hang"), check(3, NOT_RUN)))),
    learner("bob", ABSENT, ExerciseResult("train_ddp", (check(1, PASSED), check(2, FAILED, "=boom"), check(3, PASSED)))),
    learner("cy", ABSENT, ExerciseResult("train_ddp", (check(1, FAILED, "hang"), check(2, FAILED, "hang"), check(3, FAILED)))),
    learner("di", ABSENT, shown="ada"),
    learner("eve"),
), max_scores={"mini_ddp": 1, "train_ddp": 3})  # fmt: skip


def test_what_became_of_each_check() -> None:
    found = {(one.exercise, one.id): one for one in items(SOME)}
    assert list(found) == [("mini_ddp", "test_1"), *(("train_ddp", f"test_{n}") for n in (1, 2, 3))]
    assert found["mini_ddp", "test_1"].handed_in == 0, "who did not hand in says nothing about a check"
    second = found["train_ddp", "test_2"]
    assert (second.handed_in, second.ends[FAILED], second.frequent) == (3, 3, (("hang", 2), ("=boom", 1)))
    head, _, first, *_, third = csv.reader(io.StringIO(items_csv(SOME)))
    assert dict(zip(head, first, strict=True)) == {
        "exercise": "train_ddp", "check": "test_1", "title": "check 1", "handed_in": "3", "passed": "2", "failed": "1", "not_run": "0",
        "diagnoses": "hang 1",
    }  # fmt: skip
    assert third[4:7] == ["1", "1", "1"]


def test_who_passed_what() -> None:
    head, *body = csv.reader(io.StringIO(checks_csv(SOME)))
    assert head == ["learner", "mini_ddp: test_1", *(f"train_ddp: test_{n}" for n in (1, 2, 3))]
    assert body[0] == ["ada", "not run", "passed", "failed", "not run"] and body[-1] == ["eve", "", "", "", ""]


def test_the_class_page_has_both() -> None:
    page = class_page(SOME, apply(Policy(), SOME))
    marks = re.findall(r'<td class="mono">((?:<span class="(?:pass|fail|skip)">[✓✗–]+</span>)*)</td>', page)
    assert [re.sub("<[^>]*>", "", one) for one in marks] == ["", "✓✗–", "", "✓✗✓", "", "✗✗✗", "", ""]
    text = re.sub(r"<[^>]+>", " ", page)
    assert "By check" in text and re.search(r"3 checks, handed in by 3\b", text) and "=boom" in text
    assert re.search(r"2\s+check 2\s+0\s+3\s+0\s+hang\s+2\s+=boom\s+1", text)


def test_two_of_one_name_can_be_told_apart() -> None:
    page = class_page(SOME, apply(Policy(), SOME))
    assert ">ada (ada)<" in page and ">ada (di)<" in page and ">bob<" in page
