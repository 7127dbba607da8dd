"""What is printed, and what a narrow window shows: nothing is cut, scrolled or folded, and a dark page is no dark paper."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_accessibility import GRADED, GRADES, PEOPLE, REPORT

from lockstep.authoring import book as books
from lockstep.grading.classroom import ClassResult
from lockstep.grading.exports.class_page import class_page
from lockstep.grading.exports.html_report import html_report
from lockstep.grading.policy import Policy, apply
from lockstep.grading.verdict import CheckOutcome, CheckResult, Diagnosis, ExerciseResult, Report
from lockstep.notebook.cards import report_card, run_card
from lockstep.ranks import Kind, Run
from lockstep.ranks.report import Cause, Frame, Waiting

PdfReader = pytest.importorskip("pypdf", reason="not run: no pypdf here").PdfReader
A4, A5 = 673, 438
"""Pixels between the margins."""
CUT = """() => [...document.querySelectorAll("body *")].filter((one) => { const style = getComputedStyle(one);
  if (!one.offsetParent || one.closest("svg, .tl-box")) return false;  // a stored timeline has the style of its day
  return one.getBoundingClientRect().right > document.documentElement.clientWidth + 1
    || (style.overflowX !== "visible" && one.scrollWidth > one.clientWidth + 1)
    || (style.overflowY !== "visible" && one.scrollHeight > one.clientHeight + 1)
}).map((one) => one.tagName + " " + one.className + ": " + one.textContent.slice(0, 60))"""
FOLDED = """() => [...document.querySelectorAll("main details > :not(summary)")].filter((one) =>
  !one.checkVisibility({ contentVisibilityAuto: true }) || !one.getBoundingClientRect().height).length"""
INK = "(one) => getComputedStyle(one).color"
DARK = (
    "<!doctype html><html lang=en data-theme=dark><title>x</title><style>{css}</style><body data-jp-theme-light=false>"
)


@pytest.fixture
def printed(browser: Any, tmp_path: Path) -> Iterator[Any]:
    """Opens a file, or a text as one, as a printer gets it; no script has run."""
    contexts = []

    def open_(page: Path | str, width: int) -> Any:
        if isinstance(page, str):
            file = tmp_path / f"{len(contexts)}.html"
            file.write_text(page, encoding="utf-8")
            page = file
        contexts.append(
            browser.new_context(
                java_script_enabled=False, color_scheme="dark", viewport={"width": width, "height": 900}
            )
        )
        opened = contexts[-1].new_page()
        opened.goto(f"file://{page}")
        opened.emulate_media(media="print")
        return opened

    yield open_
    for context in contexts:
        context.close()


def hang_card(folder: Path) -> str:
    file = folder / "train.py"
    file.write_text(
        f"import torch\nif dist.get_rank() != 3:  # {'the best ' * 9}\n    dist.all_reduce(t)\ndist.barrier()\n"
    )
    inside, outside = Frame(str(file), 3), Frame(str(file), 4)
    rows = tuple(Waiting(rank, "all_reduce #1", "1000×1000 float32", 1.0, inside) for rank in range(3))
    last = Waiting(3, "barrier #1", frame=outside, differs=True)
    cause = Cause(Kind.HANG, "it hangs", (2,), outside, (*rows, last), branch=2)
    return run_card(Run(4, "cpu", [], cause=cause, seconds=1.5))._repr_mimebundle_()["text/html"]


@pytest.mark.parametrize(
    "name, width", [("index", A5), ("03_debugging", A4), pytest.param("04_optimization", A5, marks=pytest.mark.slow)]
)
def test_no_page_of_the_book_is_cut_or_scrolled_or_folded(book: Path, printed: Any, name: str, width: int) -> None:
    page = printed(book / f"{name}.html", width)
    assert page.evaluate(CUT) == []
    assert page.evaluate(FOLDED) == 0


def test_what_the_script_has_unfolded_is_folded_again(book: Path, browser: Any) -> None:
    page = browser.new_page()
    page.goto(f"file://{book}/03_debugging.html")
    page.locator("main details summary").first.click()
    folded = page.locator("main details:not([open])").count()
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert folded and page.locator("main details:not([open])").count() == 0
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.locator("main details:not([open])").count() == folded
    page.close()


def test_a_heading_stays_with_its_text_and_a_hang_whole(book: Path, printed: Any) -> None:
    rule = "(one, rule) => getComputedStyle(one)[rule]"
    page = printed(book / "03_debugging.html", A4)
    for one in ("main h2", "main h3", "main summary", ".cell:not(:has(.ls-card)) .input"):
        assert page.locator(one).first.evaluate(rule, "breakAfter") == "avoid", one
    for one in (".output pre:has(.headline)", ".quiz", ".ls-card"):
        assert page.locator(one).first.evaluate(rule, "breakInside") == "avoid", one
    timelines = printed(book / "01_internals.html", A4)
    assert timelines.locator(".tl-keys").first.evaluate(rule, "breakInside") == "avoid", "a picture's key stays whole"
    assert int(page.locator(".output pre").first.evaluate(rule, "widows")) >= 4, "three ranks' lines stay together"
    contents = printed(book / "index.html", A4)
    for one in (".map h2", ".map .facts", ".map .after"):
        assert contents.locator(one).first.evaluate(rule, "breakAfter") == "avoid", one


def test_a_short_cell_stays_whole_and_source_code_keeps_its_lines(book: Path, printed: Any) -> None:
    """What is longer than half a page may be broken, though not after its first lines or before its last."""
    page = printed(book / "01_internals.html", A4)
    style = "(all, rule) => [...new Set(all.map((one) => getComputedStyle(one)[rule]))]"
    lines = "(all) => all.map((one) => [...one.querySelectorAll('pre')].map((pre) => pre.textContent.trim()).join('\\n').split('\\n').length)"
    short, long = page.locator(".cell.short"), page.locator(".cell:not(.short):not(:has(.html, img))")
    assert short.evaluate_all(style, "breakInside") == ["avoid"] and long.evaluate_all(style, "breakInside") == ["auto"]
    assert max(short.evaluate_all(lines)) == books.WHOLE < min(long.evaluate_all(lines))
    page = printed(book / "02_setup.html", A4)  # prints a file
    assert page.locator(".source .line:last-child").evaluate_all(style, "breakBefore") == ["avoid"]
    rows = "(all) => all.map((one) => one.getClientRects().length && Math.round(one.offsetHeight / parseFloat(getComputedStyle(one).lineHeight)))"
    assert set(page.locator(".source .line").evaluate_all(rows)) == {1}, "none is broken on A4"


def test_what_only_a_screen_can_do_is_not_printed(printed: Any) -> None:
    css = (Path(books.__file__).with_name("pages") / "book.css").read_text(encoding="utf-8")
    page = printed(f"<style>{css}</style><main><p>See. <span class=on-screen>Click.</span></p></main>", A4)
    assert page.locator("p").inner_text().strip() == "See."
    page.emulate_media(media="screen")
    assert page.locator("p").inner_text().strip() == "See. Click."


def test_each_printed_page_has_its_number(book: Path, printed: Any, tmp_path: Path) -> None:
    paper = tmp_path / "book.pdf"
    printed(book / "index.html", A4).pdf(path=paper)
    pages = [page.extract_text().split() for page in PdfReader(paper).pages]
    assert len(pages) > 1 and [page[0] for page in pages] == [str(number) for number, _ in enumerate(pages, 1)]


@pytest.mark.parametrize("width", [A4, A5])
def test_cards_are_whole_and_dark_only_on_a_screen(printed: Any, width: int, tmp_path: Path) -> None:
    css = (Path(books.__file__).with_name("pages") / "book.css").read_text(encoding="utf-8")
    cards = hang_card(tmp_path) + str(report_card(REPORT)._repr_mimebundle_()["text/html"])
    page = printed(DARK.format(css=css) + f"<main>{cards}</main>", width)
    assert page.evaluate(CUT) == [] and page.evaluate(FOLDED) == 0 and page.locator("details").count() >= 2
    assert page.locator(".ls-red").first.evaluate(INK) == "rgb(180, 35, 24)"
    odd = page.locator(".ls-odd td").first.evaluate("(one) => getComputedStyle(one).printColorAdjust")
    assert odd == "exact", "the tint is printed"


@pytest.mark.parametrize("width", [A4, A5])
def test_reports_are_whole(printed: Any, width: int) -> None:
    for text in (html_report(PEOPLE[0], GRADES["ada"]), class_page(GRADED, GRADES)):
        page = printed(text, width)
        assert page.evaluate(CUT) == []
        assert page.evaluate(FOLDED) == 0


# A narrow window ------------------------------------------------------------------------------------------------------

LINES = """(one) => { const range = document.createRange(); range.selectNodeContents(one);
  return new Set([...range.getClientRects()].map((box) => Math.round(box.top))).size }"""


@pytest.mark.parametrize("width", [1000, 700, 560, 390])
def test_a_note_in_a_hang_card_is_one_line(browser: Any, tmp_path: Path, width: int) -> None:
    """Beside its line of code, or below it: never a column of single words."""
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.set_content(f"<body style='margin: 8px'>{hang_card(tmp_path)}")
    notes = page.locator(".ls-code > div > :last-child:not(:empty)")
    assert notes.all_inner_texts() == ["the ranks part here", "← ranks 0, 1 and 2", "← rank 3"]
    assert [notes.nth(number).evaluate(LINES) for number in range(3)] == [1, 1, 1]
    assert page.evaluate(CUT) == []
    page.close()


LONG = "every_generator_of_every_worker_continues_where_it_was_when_the_checkpoint_was_saved"
BROKEN = """() => [...document.querySelectorAll("body *")].flatMap((one) => [...one.childNodes]).filter((text) => {
  if (text.nodeType !== 3 || !/^[a-z]+$/.test(text.textContent.trim())) return false;
  const range = document.createRange(); range.selectNodeContents(text);
  return new Set([...range.getClientRects()].map((box) => Math.round(box.top))).size > 1
}).map((text) => text.textContent)"""


def test_on_a_phone_names_are_whole_and_go_on_at_a_joint(browser: Any, tmp_path: Path) -> None:
    wrong = Diagnosis("raised", "It is 3.", file=f"exercises/{LONG}.py", line=7, source="x = 3")
    checks = tuple(replace(one, name=LONG) for one in REPORT.exercises[0].checks)
    exercises = (
        ExerciseResult("exact_resume_on_many_machines", checks, 1.0),
        ExerciseResult("train_ddp", (CheckResult(LONG, "x", CheckOutcome.FAILED, wrong),), 1.0),
    )
    graded = Report(7, exercises)
    learners = (replace(PEOPLE[0], report=graded),)
    names = tuple(one.name for one in exercises)
    classes = ClassResult(7, names, learners)
    grades = apply(Policy(), classes)
    page = browser.new_page(viewport={"width": 390, "height": 844})
    for text in (
        str(report_card(graded)._repr_mimebundle_()["text/html"]),
        html_report(learners[0], grades["ada"]),
        class_page(classes, grades),
    ):
        page.set_content(text)
        page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true })")
        cut = [one for one in page.evaluate(CUT) if not one.startswith("PRE")]  # what ranks printed may be scrolled
        assert cut == [] and page.evaluate(BROKEN) == []
        assert LONG in page.locator("body").inner_text()
    page.close()
