"""axe-core finds nothing to object to: in the book and its slides, a learner's report, the class page, a notebook's outputs.

Notebook outputs are put into a page of their own, without JupyterLab, light and dark; the widgets themselves are looked at
in tests/test_front_end.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import ROOT, one_of
from support.accessibility import violations

from lockstep.course import Course
from lockstep.grading.classroom import ClassResult, Learner
from lockstep.grading.exports.class_page import class_page
from lockstep.grading.exports.html_report import html_report
from lockstep.grading.intake import Handed
from lockstep.grading.policy import Policy, apply
from lockstep.grading.verdict import UNWRITTEN, CheckOutcome, CheckResult, Diagnosis, ExerciseResult, Report
from lockstep.notebook.bars import bars
from lockstep.notebook.cards import report_card, run_card
from lockstep.notebook.course_map import course_map
from lockstep.notebook.quiz import quiz
from lockstep.notebook.stepper import Stepper
from lockstep.ranks import Kind, Run
from lockstep.ranks.report import Cause, Frame, Topic, Waiting
from lockstep.ranks.text import Row

COURSE = Course(ROOT)
NAMES = [chapter.name for chapter in COURSE.chapters]
LONG = "a line of output that is much wider than any page and has to be scrolled " * 4
in_both_schemes = pytest.mark.parametrize("scheme", one_of(["light", "dark"]))


def found_on(browser: Any, file: Path, scheme: str) -> list[str]:
    page = browser.new_page(color_scheme=scheme, viewport={"width": 1024, "height": 900})
    page.goto(f"file://{file}")
    for one in page.locator("details").all():
        one.evaluate("one => { one.open = true }")  # what is folded is not looked at
    found = violations(page)
    page.close()
    return found


def test_axe_notices_what_is_wrong(browser: Any, tmp_path: Path) -> None:
    inner = "<html lang=en><title>Inside</title><img src='data:,'>"
    (tmp_path / "page.html").write_text(f'<button></button><iframe title="x" srcdoc="{inner}"></iframe>')
    found = {one.partition(":")[0] for one in found_on(browser, tmp_path / "page.html", "light")}
    assert {"button-name", "document-title", "html-has-lang", "image-alt"} <= found


@in_both_schemes
def test_the_contents_of_the_book(book: Path, browser: Any, scheme: str) -> None:
    assert found_on(browser, book / "index.html", scheme) == []


@pytest.mark.slow
@pytest.mark.parametrize("name, scheme", list(zip(NAMES, ["light", "dark"] * 3, strict=True)))
def test_a_chapter_of_the_book(book: Path, browser: Any, name: str, scheme: str) -> None:
    """One scheme each: all pages have the same style sheet."""
    assert found_on(browser, book / f"{name}.html", scheme) == []


@pytest.mark.slow
@pytest.mark.parametrize("name, scheme", list(zip(NAMES, ["dark", "light"] * 3, strict=True)))
def test_a_chapters_slides(book: Path, browser: Any, name: str, scheme: str) -> None:
    assert found_on(browser, book / "slides" / f"{name}.html", scheme) == []


# A grading that has everything ----------------------------------------------------------------------------------------

WRONG = Diagnosis("raised", "Expected 3.\nRank 0 has 4.", LONG, (0,), "exercises/train_ddp.py", 7, "x = 3", "Because.",
                  'chapter 1, "The mean"', (Row("0", f"barrier  {LONG}", differs=True),))  # fmt: skip
REPORT = Report(7, (
    ExerciseResult("train_ddp", (
        CheckResult("it adds", "test_a", CheckOutcome.PASSED, output=f"[rank 0] {LONG}\n"),
        CheckResult("it means", "test_b", CheckOutcome.FAILED, WRONG, "", LONG, 0.25),
        CheckResult("on a GPU", "test_c", CheckOutcome.NOT_RUN, reason="there is none"),
    ), 1.5),
    ExerciseResult("mini_ddp", (CheckResult("it runs", "test_d", CheckOutcome.PASSED),), 0.5),
    ExerciseResult("checkpoint", (
        CheckResult("it saves", "test_e", CheckOutcome.FAILED, Diagnosis(UNWRITTEN, "Nothing is written here yet.")),
    )),
), faults=("the grader broke",))  # fmt: skip
PEOPLE = tuple(
    Learner(Handed(id, id.title(), Path("/x"), ("train_ddp.py",)), REPORT, 7, isolation="none") for id in ("ada", "bob")
)
GRADED = ClassResult(7, ("train_ddp", "mini_ddp", "checkpoint"), PEOPLE, max_scores={"train_ddp": 3})
GRADES = apply(Policy(), GRADED)


@in_both_schemes
def test_the_learners_report(browser: Any, tmp_path: Path, scheme: str) -> None:
    (tmp_path / "report.html").write_text(html_report(PEOPLE[0], GRADES["ada"]), encoding="utf-8")
    assert found_on(browser, tmp_path / "report.html", scheme) == []


@in_both_schemes
def test_the_class_page(browser: Any, tmp_path: Path, scheme: str) -> None:
    (tmp_path / "class.html").write_text(class_page(GRADED, GRADES), encoding="utf-8")
    assert found_on(browser, tmp_path / "class.html", scheme) == []


# What cells show ------------------------------------------------------------------------------------------------------

PLAIN = """<!doctype html><html lang="en" data-theme="{scheme}"><title>Outputs</title><body style="background: {ground};
  color: {ink}; --jp-content-font-color1: {ink}; --jp-content-font-color2: {soft}; --jp-brand-color1: {brand}">
  <main><h1>Outputs</h1>{outputs}</main></body></html>"""
SCHEMES = {
    "light": {"ground": "#fff", "ink": "rgba(0,0,0,.87)", "soft": "rgba(0,0,0,.54)", "brand": "#1976d2"},
    "dark": {"ground": "#111", "ink": "#fff", "soft": "rgba(255,255,255,.7)", "brand": "#1976d2"},
}


@pytest.fixture
def outputs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The HTML of each kind of output; the timelines are those that chapter 1 has stored.

    What it has stored of the stepper is left out: the stepper is made here.
    """
    monkeypatch.chdir(ROOT / "chapters")
    monkeypatch.setenv("LOCKSTEP_COURSE", str(ROOT))
    rows = (
        Waiting(0, "all_reduce #1", "1 × float32", 1.0, Frame(str(ROOT / "chapters" / "four_ranks.py"), 5)),
        Waiting(1, "barrier #1", "", 1.0, Frame(str(ROOT / "chapters" / "four_ranks.py"), 6), differs=True),
    )
    said = "rank 1 never joined all_reduce #1."
    cause = Cause(Kind.HANG, said, (1,), rows[1].frame, rows, ("It waits.",), topic=Topic.HANGS, branch=4)
    made = [run_card(Run(2, "cpu", [], cause=cause, seconds=1.5)), report_card(REPORT, ['Next: chapter 1, "The mean"'])]
    here, question = course_map("02_setup"), quiz("02_setup/set_epoch")
    shown = [card.body for card in made] + [here.html, here.stored_html(), question.stored_html()]
    shown = [f'<div class="lockstep-said">{body}</div>' for body in shown]
    cells = json.loads((ROOT / "chapters" / "01_internals.ipynb").read_text(encoding="utf-8"))["cells"]
    stored = [output.get("data", {}).get("text/html", "") for cell in cells for output in cell.get("outputs", ())]
    shown += [
        made[0]._repr_mimebundle_()["text/html"],
        *(one for one in map("".join, stored) if "srcdoc" not in one),
        bars({"with": 2.0, "without": 1.0}, unit="s", title="Seconds")._repr_mimebundle_()["text/html"],
        Stepper(ranks=4, length=8)._repr_mimebundle_()["text/html"],
    ]
    return shown


@in_both_schemes
def test_what_cells_show(browser: Any, tmp_path: Path, outputs: list[str], scheme: str) -> None:
    page = PLAIN.format(scheme=scheme, outputs="\n".join(outputs), **SCHEMES[scheme])
    (tmp_path / "outputs.html").write_text(page, encoding="utf-8")
    assert found_on(browser, tmp_path / "outputs.html", scheme) == []
