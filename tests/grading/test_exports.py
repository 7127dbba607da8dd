"""The forms that grades are handed on in: right, and harmless whatever a submission wrote into them."""

from __future__ import annotations

import csv
import io
import re
from xml.etree import ElementTree

import pytest
from support.hostile_texts import HOSTILE

from lockstep.grading.exports.csv_grades import Row, cell, grades_csv
from lockstep.grading.exports.junit import junit
from lockstep.grading.exports.summary_md import MOST_BYTES, plain, summary_md
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


def test_grades() -> None:
    text = grades_csv([
        Row("bob", "Bob", report(PASSED, failed("x"), SKIPPED)), Row("ada", "Ada", None, ("nothing to grade: …",)),
        Row("eve", "Eve", report(PASSED, faults=("a worker died",))),
    ], ["mini_ddp", "train_ddp"])  # fmt: skip
    ada, bob, eve = rows(text)
    assert ada == {"learner": "ada", "name": "Ada", "outcome": "nothing to grade", "score": "0", "max_score": "", "mini_ddp": "",
                   "train_ddp": "", "seed": "", "remarks": "nothing to grade: …"}  # fmt: skip
    assert (bob["score"], bob["max_score"], bob["train_ddp"], bob["mini_ddp"], bob["seed"]) == ("1", "3", "1", "", "7")
    assert (eve["outcome"], eve["score"], eve["remarks"]) == ("fault of the grader", "", "a worker died")
    with pytest.raises(ValueError, match="same learner id"):
        grades_csv([Row("a", "A", None), Row("a", "B", None)], [])


@pytest.mark.parametrize("text", HOSTILE)
def test_no_cell_is_a_formula_or_breaks_a_row(text: str) -> None:
    out = grades_csv([Row("ada", text, report(PASSED), (text,)), Row("bob", "Bob", None, (text,))], ["train_ddp"])
    assert out.count("\r\n") == len(out.splitlines()) == 3
    assert all(
        line.startswith('"') and line.endswith('"') for line in out.splitlines()
    )  # no other separator cuts a cell
    for row in rows(out):
        for value in row.values():
            assert not re.match(r"\s*[=+\-@＝＋－＠]", value) and value.isprintable()
    assert cell("a-b = c") == "a-b = c"


def test_junit() -> None:
    root = ElementTree.fromstring(
        junit(report(PASSED, failed("message\nmore", "proof"), SKIPPED, faults=("broke",)), "ada")
    )
    suite, faults = root
    assert suite.attrib == {
        "name": "train_ddp",
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


@pytest.mark.parametrize("text", HOSTILE)
def test_junit_stays_xml(text: str) -> None:
    written = junit(report(failed(text, text), SKIPPED, name=text, faults=(text,)), text)
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


def test_summary() -> None:
    text = summary_md(report(PASSED, failed("rank 1 saw 3", "<b>proof</b>"), SKIPPED))
    assert "| train&#95;ddp | 1 of 3 | ✅❌– |" in text
    assert "rank 1 saw 3" in text and "&lt;b&gt;proof&lt;/b&gt;" in text and "Not run: there is no GPU" in text
    assert "costs no points" not in text and "costs no points" in summary_md(report(PASSED, faults=("broke",)))


@pytest.mark.parametrize("text", HOSTILE)
def test_summary_holds_no_markup_of_others(text: str) -> None:
    ours = summary_md(report(failed("x", "x"), SKIPPED, name="x", faults=("x",)), "x")
    theirs = summary_md(report(failed(text, text), SKIPPED, name=text, faults=(text,)), text)
    marks = r"[<>|#*_`\[\]!@]|::|//"

    def structure(written: str) -> list[str]:
        outside = re.sub(r"<pre>\n.*?\n</pre>", "", written, flags=re.DOTALL)
        return re.findall(marks, re.sub(r"&#\d+;", "", outside))

    assert structure(theirs) == structure(ours)
    assert theirs.count("<pre>") == theirs.count("</pre>") == theirs.count("<details>") == 1
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f\u202e\ud800]", theirs)


def test_summary_stays_below_what_github_takes() -> None:
    text = summary_md(report(*[failed("é" * 9_000, "<" * 50_000) for _ in range(60)]))
    assert len(text.encode()) < MOST_BYTES and "more checks did not pass" in text
    assert text.endswith("Seed 7.\n") and text.count("<pre>") == text.count("</pre>")


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
