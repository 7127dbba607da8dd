"""The forms that grades are handed on in: right, and harmless whatever a submission wrote into them."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from support.hostile_texts import HOSTILE
from support.one_learner import class_of

from lockstep.grading.classroom import ClassResult
from lockstep.grading.exports.csv_grades import cell, grades_csv
from lockstep.grading.exports.junit import junit
from lockstep.grading.exports.summary_md import MOST_BYTES, class_md, plain
from lockstep.grading.policy import Policy, apply
from lockstep.grading.text import check_text
from lockstep.grading.verdict import CheckOutcome, CheckResult, Diagnosis, ExerciseResult, Report


def failed(text: str, evidence: str = "") -> CheckResult:
    found = Diagnosis(text, text, evidence, (1,), text, 3, text, text)
    return CheckResult(text, "test_x", CheckOutcome.FAILED, found, "", text, 0.25)


def report(*checks: CheckResult, name: str = "train_ddp", faults: tuple[str, ...] = ()) -> Report:
    return Report(7, (ExerciseResult(name, checks, 1.5),), faults=faults)


PASSED = CheckResult("it passes", "test_a", CheckOutcome.PASSED)
SKIPPED = CheckResult("needs a GPU", "test_b", CheckOutcome.NOT_RUN, reason="there is no GPU")


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text, newline="")))


def plain_csv(graded: ClassResult) -> str:
    """`grades.csv` without a policy."""
    return grades_csv(graded, apply(Policy(), graded))


def test_grades() -> None:
    ada, bob, eve = (
        rows(plain_csv(replace(graded, exercises=("mini_ddp", "train_ddp"))))[0]
        for graded in (
            class_of(None, refused=("nothing to grade: …",)),
            class_of(report(PASSED, failed("x"), SKIPPED), "Bob"),
            class_of(report(PASSED, faults=("a worker died",)), "Eve"),
        )
    )
    assert ada == {"learner": "ada", "name": "Ada", "outcome": "nothing to grade", "score": "0", "max_score": "0", "mini_ddp": "",
                   "train_ddp": "", "seed": "", "remarks": "nothing to grade: …"}  # fmt: skip
    assert (bob["score"], bob["max_score"], bob["train_ddp"], bob["mini_ddp"], bob["seed"]) == ("1", "3", "1", "", "7")
    assert (eve["outcome"], eve["score"], eve["remarks"]) == ("fault of the grader", "", "a worker died")


@pytest.mark.parametrize("text", HOSTILE)
def test_no_cell_is_a_formula_or_breaks_a_row(text: str) -> None:
    for graded in (class_of(report(PASSED), text, (text,)), class_of(None, text, (text,))):
        out = plain_csv(graded)
        assert out.count("\r\n") == len(out.splitlines()) == 2
        # No other separator cuts a cell.
        assert all(line.startswith('"') and line.endswith('"') for line in out.splitlines())
        for value in rows(out)[0].values():
            assert not re.match(r"\s*[=+\-@＝＋－＠]", value) and value.isprintable()
    assert cell("a-b = c") == "a-b = c"


def test_junit() -> None:
    done = report(PASSED, failed("message\nmore", "proof"), SKIPPED, faults=("broke",))
    suite, faults = ElementTree.fromstring(junit(class_of(done)))
    assert suite.attrib == {
        "name": "ada: train_ddp",
        "tests": "3",
        "failures": "1",
        "skipped": "1",
        "errors": "0",
        "time": "1.500",
    }
    one, two, three = suite
    assert len(one) == 0 and three[0].attrib == {"message": "there is no GPU"}
    assert two[0].attrib["message"] == "message" and "proof" in (two[0].text or "")
    assert faults.attrib["errors"] == "1" and faults[0][0].tag == "error"
    [[case]] = ElementTree.fromstring(junit(class_of(None, refused=("no file", "no other"))))
    assert case[0].tag == "skipped" and case[0].attrib == {"message": "no file; no other"}


@pytest.mark.parametrize("text", HOSTILE)
def test_junit_stays_xml(text: str) -> None:
    written = junit(class_of(report(failed(text, text), SKIPPED, name=text, faults=(text,)), text))
    root = ElementTree.fromstring(written.encode())
    assert [len(suite) for suite in root] == [2, 1]
    assert {item.tag for item in root.iter()} == {
        "testsuites",
        "testsuite",
        "testcase",
        "failure",
        "skipped",
        "system-out",
        "error",
    }
    if text.isprintable():
        assert root[0][0].attrib["name"] == text == root[0][0][1].text


def summary(graded: ClassResult) -> str:
    """`summary.md` without a policy."""
    return class_md(graded, apply(Policy(), graded))


def test_summary() -> None:
    text = summary(class_of(report(PASSED, failed("x"), SKIPPED)))
    assert "| learner | points | train&#95;ddp |" in text and "| ada | 1 of 3 | 1 |" in text
    assert "1 graded" in text and "Most frequent: x 1." in text and "Seed 7." in text
    assert "costs no points" not in text and "costs no points" in summary(class_of(report(PASSED, faults=("broke",))))


@pytest.mark.parametrize("text", HOSTILE)
def test_summary_holds_no_markup_of_others(text: str) -> None:
    for faults in ((), (text,)):
        ours = summary(class_of(report(failed("x"), SKIPPED, name="x", faults=faults and ("x",))))
        theirs = summary(class_of(report(failed(text), SKIPPED, name=text, faults=faults), text, (text,)))
        structure = [re.findall(r"[<>|#*_`\[\]!@]|::|//", re.sub(r"&#\d+;", "", one)) for one in (ours, theirs)]
        assert structure[0] == structure[1]
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f\u202e\ud800]", theirs)


def test_summary_stays_below_what_github_takes() -> None:
    (one,) = class_of(report(PASSED)).learners
    many = [replace(one, handed=replace(one.handed, id=f"{'é' * 500}-{n:04}")) for n in range(2_000)]
    text = summary(ClassResult(7, ("train_ddp",), tuple(many)))
    assert len(text.encode()) < MOST_BYTES and "more learners; grades.csv has them all" in text
    assert text.endswith("Seed 7.\n")


def test_plain_is_one_line() -> None:
    assert plain("a\n\n# b") == "a &#35; b"


def test_a_check_that_was_not_run_takes_one_line_and_a_reason_of_its_own_is_whole() -> None:
    """What a check waits for is named if there is room; why a machine cannot run it always."""
    premise = "needs “a step sends the gradients once, however many micro-batches it has”"
    long = "the loss counts samples, even if ranks hold different numbers of them"
    lacking = "a stranger's batch script is not run: the SLURM cluster stands outside of the sandbox, where it would be let in"

    def shown(name: str, reason: str) -> list[str]:
        return check_text(CheckResult(name, "id", CheckOutcome.NOT_RUN, reason=reason)).splitlines()

    (line,) = shown("the gradient is that of the big batch", premise)
    assert line == "  – the gradient is that of the big batch".ljust(60) + "  not run: needs a check above"
    head, *rest = shown(f"{long}, and more", premise)
    assert head == f"  – {long}, and more" and " ".join(" ".join(rest).split()) == f"not run: {premise}"
    assert shown("short", "needs “a”") == ["  – short".ljust(60) + "  not run: needs “a”"]
    first, *rest = shown(long, lacking)
    assert first == f"  – {long}" and " ".join(" ".join(rest).split()) == f"not run: {lacking}"
