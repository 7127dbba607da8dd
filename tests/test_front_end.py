"""The course in the real JupyterLab, in a real browser: what a learner does on the first evening.

The server is started as `./lockstep lab` does it, on a copy of the course in which no exercise is written: Run All has to
reach the end of every chapter all the same. Running all of them takes some minutes, so outside CI (CI=true) only the first is
run; the others say so. LOCKSTEP_SCREENSHOTS=docs/images makes the README's pictures anew.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from support.browser import CONTRASTS, faults

pytest.importorskip("jupyterlab", reason="not run: no JupyterLab here")

from support import ROOT
from support.accessibility import violations
from support.front_end import CELL_SECONDS, Lab, Notebook, lab, picture, wait_for

from lockstep.authoring.bank import find
from lockstep.authoring.chapters import KERNEL
from lockstep.course import Course, progress, quizzes
from lockstep.notebook.start_page import write_start_page

CHAPTERS = [chapter.name for chapter in Course(ROOT).chapters]
CHAPTER_SECONDS = 900
IN_CI = os.environ.get("CI", "").lower() == "true"

HANG = """%%ranks 4
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
t = torch.ones(1)
dist.all_reduce(t)
if dist.get_rank() != 2:
    dist.all_reduce(t)
dist.barrier()"""
ENDLESS = """%%ranks 3 --timeout 600
import time, torch
import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 1:
    print("rank 1 sleeps", flush=True)
    time.sleep(500)  # not a hang: it would go on
dist.all_reduce(torch.ones(1))"""


@pytest.fixture(scope="module")
def running(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with lab(tmp_path_factory.mktemp("front_end")) as started:
        yield started


@pytest.fixture(scope="module")
def opened(browser: Any, running: Lab) -> Iterator[tuple[Notebook, str, list[str]]]:
    """Chapter 1: the open notebook, the text beside its first picture, which is there before anything has run, and the
    console's errors, which keep coming."""
    page = browser.new_page(viewport={"width": 1400, "height": 1000})
    errors = faults(page)
    notebook = Notebook(page, running, f"{CHAPTERS[0]}.ipynb")
    output = notebook.cell("timeline(run)").locator(".jp-OutputArea-output").first
    output.locator("img, svg").first.wait_for()
    yield notebook, output.inner_text(), errors
    page.close()


@pytest.fixture(scope="module")
def first(opened: tuple[Notebook, str, list[str]]) -> tuple[Notebook, list[Any], list[str]]:
    """Chapter 1, run top to bottom: the open notebook, its code cells and the console's errors."""
    notebook, _, errors = opened
    return notebook, notebook.run_all(CHAPTER_SECONDS), errors


def forget(running: Lab) -> None:
    """What is recorded of the learner; a test's own record is no other test's concern."""
    for file in (running.course / ".lockstep").glob("progress*"):
        file.unlink()


@pytest.fixture
def untouched(running: Lab) -> None:
    """The start page as a newcomer finds it, whatever other tests did before."""
    forget(running)
    write_start_page(Course(running.course))


@pytest.fixture
def bench(browser: Any, running: Lab) -> Iterator[Any]:
    """Opens a notebook of one's own with these cells, and sees to it that nothing was wrong in the browser."""
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    errors = faults(page)

    def write(*cells: str, first: str = "%load_ext lockstep") -> Notebook:
        made = [nbformat.v4.new_code_cell(text) for text in (first, *cells)]
        file = running.course / "chapters" / f"bench_{len(list(running.course.glob('chapters/bench_*')))}.ipynb"
        nbformat.write(nbformat.v4.new_notebook(cells=made, metadata={"kernelspec": KERNEL}), file)
        notebook = Notebook(page, running, file.name)
        notebook.run(notebook.cell(first))
        return notebook

    yield write
    page.close()
    assert errors == []


def assert_ran(cells: list[Any]) -> None:
    """Every cell ran, in order, and none failed that was not meant to."""
    for cell in cells:
        errors = [output for output in cell.outputs if output.output_type == "error"]
        meant = "raises-exception" in cell.metadata.get("tags", ())
        assert meant or not errors, (cell.source, errors)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))


def assert_says_what_is_not_written(cells: list[Any]) -> None:
    """Each exercise's check is one output, of one line a part; nothing is left of the ticks that it showed meanwhile."""
    checks = [cell for cell in cells if cell.source.startswith("%check") and "clinic" not in cell.source]
    assert checks
    for cell in checks:
        name = cell.source.split()[1]
        (output,) = cell.outputs
        head, _, *lines = output.data["text/plain"].splitlines()
        assert head.split()[:3] == [name, "not", "begun;"] and lines
        for line in lines:
            place = rf"exercises/{name}\.(?:py|sbatch):\d+"
            assert re.fullmatch(rf" *✗ Nothing is written here yet ·\s{place} ·\s%hint {name}", line), line
        assert "ls-card" in output.data["text/html"] and "ls-moving" not in output.data["text/html"]


# Chapter 1 ------------------------------------------------------------------------------------------------------------


def test_the_first_picture_is_there_before_anything_has_run(opened: tuple[Notebook, str, list[str]]) -> None:
    """JupyterLab hides the stored pictures of a notebook that nobody has signed, and shows the text beside them."""
    assert "Timeline(" not in opened[1]


def test_a_chapter_that_was_only_opened_is_not_changed(browser: Any, running: Lab) -> None:
    """A kernel says what language it is, and JupyterLab writes that into a notebook that doesn't have it."""
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    notebook = Notebook(page, running, f"{CHAPTERS[1]}.ipynb")
    told = "jupyterapp.shell.currentWidget.context.model"
    wait_for(lambda: page.evaluate(f"Boolean({told}.getMetadata('language_info'))"), 60, "the kernel has not said")
    page.wait_for_timeout(1000)
    assert not page.evaluate(f"{told}.dirty") and notebook.panel.locator(".jp-Cell").count()
    page.close()


def test_the_start_page_leads_to_the_chapter_and_an_exercise_opens_beside_it(
    browser: Any, running: Lab, untouched: None
) -> None:
    page = browser.new_page(viewport={"width": 1400, "height": 1000})
    page.set_default_timeout(120_000)
    errors = faults(page)
    page.goto(f"{running.address}lab/tree/start.ipynb?token={running.token}&reset")
    onward = page.locator(".ls-map > p a:visible")
    assert onward.inner_text().startswith("Begin: chapter 1")
    assert set(page.locator(".jp-DirListing-itemText").all_inner_texts()) == {"chapters", "exercises", "start.ipynb"}
    start = page.locator(".jp-NotebookPanel", has=onward)
    code = start.locator(".jp-CodeCell")
    assert code.count() == 1 and not code.locator(".jp-Cell-inputWrapper").is_visible()
    page.locator(".jp-StatusBar-TextItem, .jp-StatusBar-GroupItem", has_text="| Idle").first.wait_for()
    code.locator(".ls-soft", has_text="all questions answered").click()
    page.keyboard.press("Shift+Enter")
    code.get_by_role("button", name="Refresh").wait_for()
    assert not code.locator(".jp-Cell-inputWrapper").is_visible(), "the map, and not the code that draws it"
    assert start.locator(".jp-Cell").count() == 3, "no empty cell was added"
    for name in ("average_gradients", "ring_all_reduce"):
        page.locator("a:visible", has_text=f"{name}.py").click()
        editor = page.locator(".jp-FileEditor", has_text=f"Exercise {name}")
        editor.wait_for()
        left, right = start.bounding_box(), editor.bounding_box()
        assert left["x"] + left["width"] <= right["x"], "both are seen"
        scroller = editor.locator(".cm-scroller")
        assert scroller.evaluate("it => it.scrollWidth <= it.clientWidth"), "half a window cuts the contract off"
    picture(page, "start")
    file = running.course / "exercises" / "ring_all_reduce.py"
    before = file.read_text(encoding="utf-8")
    editor.locator(".cm-content").click()
    page.keyboard.type("mine")
    assert file.read_text(encoding="utf-8") == before, "JupyterLab saves by itself only after a while"
    onward.click()
    page.locator(".jp-NotebookPanel:not(.lm-mod-hidden) h1", has_text="How DDP works inside").wait_for()
    wait_for(lambda: "mine" in file.read_text(encoding="utf-8"), 60, "a check would grade what was saved before")
    file.write_text(before, encoding="utf-8")
    assert errors == []
    page.close()


def test_the_start_page_follows_without_a_kernel(browser: Any, running: Lab, untouched: None) -> None:
    """Whoever comes back to its tab sees what was done meanwhile, and what to do next; nothing asks to be saved."""
    page = browser.new_page(viewport={"width": 1400, "height": 1000})
    page.set_default_timeout(120_000)
    errors = faults(page)
    page.goto(f"{running.address}lab/tree/start.ipynb?token={running.token}&reset")
    chapter = page.locator(".ls-map li", has_text="How DDP works inside").first
    chapter.get_by_text("exercises 0 of 3").first.wait_for()
    assert not page.locator(".ls-stale").is_visible()
    page.locator("a:visible", has_text="average_gradients.py").click()
    page.locator(".jp-FileEditor", has_text="Exercise average_gradients").wait_for()
    passed = Course(running.course).count_checks("average_gradients")
    progress.record(Course(running.course), "average_gradients", passed, passed)
    page.get_by_role("tab", name="start.ipynb").click()
    chapter.get_by_text("exercises 1 of 3").first.wait_for()
    assert not page.locator(".jp-mod-dirty").count()
    page.close()
    assert errors == []


@pytest.mark.slow
def test_in_a_narrow_window_the_file_browser_makes_room_for_an_exercise(
    browser: Any, running: Lab, untouched: None
) -> None:
    page = browser.new_page(viewport={"width": 1024, "height": 768})
    page.set_default_timeout(120_000)
    page.goto(f"{running.address}lab/tree/start.ipynb?token={running.token}&reset")
    files = page.locator(".jp-DirListing")
    page.locator(".ls-map > p a").wait_for()
    assert files.is_visible()
    page.get_by_role("link", name="average_gradients.py").click()
    editor = page.locator(".jp-FileEditor", has_text="Exercise average_gradients")
    editor.wait_for()
    files.wait_for(state="hidden")
    wait_for(lambda: editor.bounding_box()["width"] > 430, 20, "the exercise has no room")
    page.close()


@pytest.mark.slow
def test_in_a_narrow_window_the_start_page_has_the_room(browser: Any, running: Lab, untouched: None) -> None:
    """The file browser is closed once; whoever opens it again keeps it. A wide window has both."""
    for width, left in ((1400, True), (700, False)):
        page = browser.new_page(viewport={"width": width, "height": 900})
        page.set_default_timeout(120_000)
        page.goto(f"{running.address}lab/tree/start.ipynb?token={running.token}&reset")
        page.locator(".ls-map > p a").wait_for()
        files = page.locator("#filebrowser")
        if left:
            page.wait_for_timeout(2000)
            assert files.is_visible()
            page.set_viewport_size({"width": 700, "height": 900})
            files.wait_for(state="hidden")
        else:
            files.wait_for(state="hidden")
            assert page.locator(".jp-NotebookPanel").bounding_box()["width"] > 0.85 * width
            page.keyboard.press("Control+b")
            files.wait_for()
            page.wait_for_timeout(3000)  # JupyterLab saves the arrangement a while after the last change
            page.reload()
            page.locator(".ls-map > p a").wait_for()
            page.wait_for_timeout(3000)
            assert files.is_visible()
        page.close()


def test_an_answer_to_a_prediction_is_folded_until_it_is_wanted(browser: Any, running: Lab) -> None:
    cells = [
        nbformat.v4.new_code_cell(f"print({n} + {n})", metadata={"jupyter": {"outputs_hidden": True}}) for n in (2, 3)
    ]
    for cell, said in zip(cells, ("4", "6"), strict=True):
        cell.outputs = [nbformat.v4.new_output("stream", text=f"{said}\n")]
    cells[1:1] = [nbformat.v4.new_markdown_cell("Four: the answer.\n\n### Another matter\n\nOf which more is said.")]
    file = running.course / "chapters" / "bench_folded.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": KERNEL}), file)
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    notebook = Notebook(page, running, file.name)
    first, second = notebook.cell("2 + 2"), notebook.cell("3 + 3")
    for cell in (first, second):
        folded = cell.locator(".jp-OutputPlaceholder")
        folded.wait_for()
        assert not cell.locator(".jp-OutputArea").is_visible() and not folded.inner_text().strip(), (
            "not even its first line"
        )
        told = folded.locator(".jp-Placeholder-content").evaluate("one => getComputedStyle(one, '::before').content")
        assert "click here" in told
    answer = notebook.panel.get_by_role("paragraph").filter(has_text="Four: the answer.")
    notebook.panel.get_by_role("paragraph").filter(has_text="Of which more is said.").wait_for()
    assert not answer.is_visible(), "the text below would tell it as well"
    first.locator(".jp-Placeholder-content").click()
    first.locator(".jp-OutputArea", has_text="4").wait_for()
    assert answer.is_visible()
    assert notebook.run(second).strip() == "6" and second.locator(".jp-OutputArea").is_visible()
    page.close()


@pytest.mark.slow
def test_a_new_kernel_can_go_on_in_the_middle_of_a_chapter(bench: Any, running: Lab) -> None:
    """The map leads there on the next day, past the cell that loads the magics."""
    notebook = bench("run_of_yesterday", "%check average_gradients", "quiz, course_map", first="1 + 1")
    told = notebook.run(notebook.cell("run_of_yesterday"))
    assert "NameError" in told and told.strip().endswith("has not run it: Run > Run All Above Selected Cell.")
    assert "Nothing is written here yet" in notebook.run(notebook.cell("%check average_gradients"))
    assert "NameError" not in notebook.run(notebook.cell("quiz, course_map"))
    notebook = bench("run_of_yesterday")  # a notebook that loads them itself
    assert "Run All Above" not in notebook.run(notebook.cell("run_of_yesterday"))


CELLS_BEFORE = """title => {
  const seen = new MutationObserver(() => {
    const panel = document.querySelector(".jp-NotebookPanel:not(.lm-mod-hidden)");
    if (![...panel?.querySelectorAll("h2") ?? []].some((one) => one.innerText.includes(title))) return;
    window.cellsBefore = panel.querySelectorAll(".jp-Cell").length;
    seen.disconnect();
  });
  seen.observe(document.body, { childList: true, subtree: true });
}"""
"""How many cells are drawn when the section is."""


@pytest.mark.parametrize(
    "title",
    ["Exercise: implement setup_ddp", pytest.param("Is it the gradient of the joined batch?", marks=pytest.mark.slow)],
)
def test_the_maps_links_lead_to_their_sections(browser: Any, running: Lab, untouched: None, title: str) -> None:
    """At once, although JupyterLab draws a chapter from its first cell on; so do the links in a chapter's text."""
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    page.set_default_timeout(120_000)
    page.goto(f"{running.address}lab/tree/start.ipynb?token={running.token}&reset")
    page.locator(".ls-map > p a").wait_for()
    link = page.locator(".ls-map a", has_text=title)
    link.evaluate("one => { one.closest('details').open = true }")
    page.evaluate(CELLS_BEFORE, title)
    link.click()
    panel = page.locator(".jp-NotebookPanel:not(.lm-mod-hidden)")
    heading = panel.locator("h2", has_text=title)
    heading.wait_for()
    wait_for(lambda: 0 < (heading.bounding_box() or {"y": -1})["y"] < 400, 60, "the section is not in view")
    selected = panel.locator(".jp-Cell.jp-mod-active")
    wait_for(lambda: title in selected.inner_text(), 60, "Shift+Enter would run another cell")
    assert page.evaluate("cellsBefore") < 20, "of some hundred"
    if title.startswith("Exercise"):
        panel.locator('a:not(.jp-InternalAnchorLink)[href*="#Cleanup"]').first.evaluate("one => one.click()")
        there = panel.locator("h2, h3", has_text=re.compile("^Cleanup")).first
        wait_for(lambda: 0 < (there.bounding_box() or {"y": -1})["y"] < 400, 60, "the link in the text leads nowhere")
    page.close()


def test_the_first_chapter_runs_top_to_bottom(first: tuple[Notebook, list[Any], list[str]]) -> None:
    notebook, cells, errors = first
    assert_ran(cells)
    assert_says_what_is_not_written(cells)
    (mine,) = (cell for cell in cells if "from mini_ddp import MiniDDP" in cell.source)
    line = r"✗ Nothing is written here yet ·\sexercises/mini_ddp\.py:\d+ ·\s%hint mini_ddp"
    assert re.fullmatch(line, mine.outputs[0].data["text/plain"])
    assert len(cells) > 50 and errors == []
    own = Path("chapters") / f"{CHAPTERS[0]}.ipynb"
    assert (notebook.lab.course / own).read_bytes() == (ROOT / own).read_bytes(), "git sees no change"
    shown = notebook.cell("timeline(run)")
    assert shown.locator("img, svg").count() >= 1
    picture(shown, "timeline")


def test_the_terminal_has_one_address_and_no_log(first: tuple[Notebook, list[Any], list[str]], running: Lab) -> None:
    """A kernel has started and run by now; what a library logs meanwhile is nothing that a learner could act on."""
    address = f"{running.address}lab/tree/start.ipynb?token={running.token}"
    assert running.said() == ["JupyterLab is at this address (Ctrl-C stops it):", address]


def test_the_diagram_steps(first: tuple[Notebook, list[Any], list[str]]) -> None:
    notebook, _, errors = first
    cell = notebook.cell("Stepper(ranks=4, length=8)")
    frame = cell.frame_locator("iframe:visible")
    frame.get_by_label("to the beginning").wait_for()
    for _ in range(4):
        frame.get_by_label("one step forward").click()
    assert frame.get_by_role("status").inner_text().startswith("Step 4 of 6, all-gather")
    picture(frame.locator("main"), "stepper")
    frame.get_by_label("to the end").click()
    assert "Done: all ranks hold the same sum" in frame.get_by_role("status").inner_text()
    assert errors == []


def test_a_question_is_answered_and_the_answer_kept(first: tuple[Notebook, list[Any], list[str]], running: Lab) -> None:
    notebook, _, errors = first
    key = "01_internals/buffers"
    question = quizzes.read(ROOT / "chapters" / "quizzes" / "01_internals.toml")["buffers"]
    cell = notebook.cell(f'quiz("{key}")')
    box = cell.locator(".lockstep-quiz")
    assert box.get_by_role("button", name="Check").is_disabled()
    for number, choice in sorted(enumerate(question.choices), key=lambda pair: pair[1].right):
        box.get_by_role("radio").nth(number).check()
        box.get_by_role("button", name="Check").click()
        told = box.get_by_role("status").filter(has_text="Right." if choice.right else "Not quite.")
        told.wait_for()
        mark = "label => getComputedStyle(label, '::before').content"
        assert box.locator("label:has(:checked)").evaluate(mark) == ('"✓"' if choice.right else '"✗"')
        assert re.sub(r"[`\s]", "", choice.why) in re.sub(r"\s", "", told.inner_text())
        kept = "right" if choice.right else "wrong"
        wait_for(lambda kept=kept: running.progress()["quizzes"].get(key) == kept, 20, "the answer is not recorded")
    notebook.run(cell)
    box.get_by_role("status").filter(has_text="Right.").wait_for()
    assert errors == []


def test_in_a_narrow_window_nothing_is_cut_off(first: tuple[Notebook, list[Any], list[str]]) -> None:
    notebook, _, errors = first
    notebook.page.keyboard.press("Control+b")  # the file browser goes
    notebook.page.set_viewport_size({"width": 560, "height": 900})
    notebook.page.wait_for_timeout(1000)
    edge = notebook.panel.bounding_box()
    for text, part in (
        ('quiz("01_internals/ring")', ".lockstep-quiz"),
        ("Stepper(ranks=4, length=8)", "iframe:visible"),
    ):
        inner = notebook.cell(text).locator(part)
        inner.wait_for()
        place = inner.bounding_box()
        assert place["x"] >= edge["x"] and place["x"] + place["width"] <= edge["x"] + edge["width"], text
        assert inner.evaluate("one => one.scrollWidth <= one.clientWidth + 1"), text
    notebook.page.set_viewport_size({"width": 1400, "height": 1000})
    assert errors == []


# The other chapters ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CHAPTERS[1:])
def test_a_chapter_runs_top_to_bottom(browser: Any, running: Lab, name: str) -> None:
    if not IN_CI:
        pytest.skip("not run: takes minutes; CI=true runs all chapters in the browser")
    page = browser.new_page(viewport={"width": 1400, "height": 1000})
    errors = faults(page)
    cells = Notebook(page, running, f"{name}.ipynb").run_all(CHAPTER_SECONDS)
    assert_ran(cells)
    assert_says_what_is_not_written(cells)
    assert errors == []
    page.close()


# What a learner does --------------------------------------------------------------------------------------------------


def test_a_hang_explains_itself(bench: Any) -> None:
    notebook = bench(HANG)
    cell = notebook.cell("%%ranks 4")
    said = notebook.run(cell)
    assert re.search(r"HANG after [\d.]+ s at cell line 10: rank 2 never joined all_reduce #2", said)
    assert "Traceback" not in said and "cell line 9" in said
    picture(cell, "hang")


@pytest.mark.slow
def test_what_a_cell_prints_stays_in_view_after_shift_enter(bench: Any) -> None:
    """JupyterLab selects the next cell. A browser that kept that in its place would push the output out of sight."""
    filler = ["\n".join(f"# {number}.{line}" for line in range(12)) for number in range(8)]
    notebook = bench(*filler[:4], HANG, *filler[4:])
    cell = notebook.cell("%%ranks 4")
    notebook.run(notebook.cell("# 0.0"))
    cell.evaluate("cell => { const panel = cell.closest('.jp-WindowedPanel-outer');"
                  " panel.scrollTop += cell.getBoundingClientRect().top - panel.getBoundingClientRect().top - 250 }")  # fmt: skip
    before = cell.bounding_box()["y"]
    notebook.run(cell)
    assert cell.bounding_box()["y"] == pytest.approx(before, abs=2)
    headline = cell.get_by_text(re.compile(r"rank 2 never joined")).first.bounding_box()["y"]
    assert 0 < headline < notebook.page.viewport_size["height"]


@pytest.mark.slow
def test_code_in_a_choice_is_shown_as_code(bench: Any) -> None:
    key = "01_internals/collectives"
    notebook = bench(f'from lockstep.notebook.quiz import quiz\nquiz("{key}")')
    notebook.run(notebook.cell(key))
    box = notebook.cell(key).locator(".lockstep-quiz")
    box.locator("label code").first.wait_for()
    assert box.locator("label code").all_inner_texts() == [
        "broadcast", "src=0", "all_gather", "all_gather", "if rank == 0",
    ]  # fmt: skip


def test_a_question_needs_only_the_keyboard(bench: Any, running: Lab) -> None:
    """The choices are one group with one Tab stop; arrow keys stay in it, and the verdict is announced where it appears."""
    key = "01_internals/ring"
    choices = quizzes.read(ROOT / "chapters" / "quizzes" / "01_internals.toml")["ring"].choices
    right = next(number for number, choice in enumerate(choices) if choice.right)
    notebook = bench(f'from lockstep.notebook.quiz import quiz\nquiz("{key}")')
    notebook.run(notebook.cell(key))
    box = notebook.cell(key).locator(".lockstep-quiz")
    radios, check, status = box.get_by_role("radio"), box.get_by_role("button", name="Check"), box.get_by_role("status")
    focused = "one => one === document.activeElement"
    press = notebook.page.keyboard.press
    box.get_by_role("radiogroup", name=re.compile(r"\w{3}")).wait_for()
    assert radios.count() == len(choices) and status.count() == 1
    radios.first.focus()
    press("Space")
    for number in (*range(1, len(choices)), 0):
        press("ArrowDown")
        assert radios.nth(number).is_checked() and radios.nth(number).evaluate(focused)
    for _ in range(len(choices) - right):
        press("ArrowUp")
    assert radios.nth(right).is_checked() and box.locator("input:checked").count() == 1
    wait_for(check.is_enabled, 20, "there is nothing to press")
    press("Tab")
    assert check.evaluate(focused)
    press("Shift+Tab")
    assert radios.nth(right).evaluate(focused)
    press("Tab")
    press("Enter")
    status.filter(has_text="Right.").wait_for()
    assert check.evaluate(focused) and violations(notebook.page, ".lockstep-quiz") == []
    press("Shift+Tab")
    press("ArrowDown")
    wait_for(lambda: not status.inner_text(), 20, "the verdict on another choice is still there")


@pytest.mark.slow
def test_by_night_it_can_be_read_as_well(bench: Any) -> None:
    question, diagram = 'quiz("01_internals/overlap")', "Stepper(ranks=4, length=8)"
    notebook = bench(f"from lockstep.notebook.quiz import quiz\n{question}",
                     f"from lockstep.notebook.stepper import Stepper\n{diagram}")  # fmt: skip
    for text in (question, diagram):
        notebook.run(notebook.cell(text))
    notebook.menu("Settings", "Theme", "JupyterLab Dark")
    notebook.page.locator("body[data-jp-theme-light=false]").wait_for(state="attached")
    notebook.cell(question).locator(".lockstep-quiz").wait_for()
    notebook.page.wait_for_timeout(2000)  # the theme's style sheet replaces the other's
    assert notebook.cell(question).locator(".lockstep-quiz").evaluate(CONTRASTS) == {}
    frames = notebook.cell(diagram).locator("iframe:visible")
    assert frames.count() == 1 and "lockstep-dark" in (frames.get_attribute("class") or "")
    inside = notebook.cell(diagram).frame_locator("iframe:visible").locator("body")
    ground = "one => getComputedStyle(one).backgroundColor"
    wait_for(lambda: inside.evaluate(ground) == "rgb(17, 20, 23)", 30, "the diagram is not dark")
    notebook.menu("Settings", "Theme", "JupyterLab Light")
    notebook.page.locator("body[data-jp-theme-light=true]").wait_for(state="attached")
    notebook.page.emulate_media(color_scheme="dark")  # what the system has is not what JupyterLab has
    wait_for(lambda: inside.evaluate(ground) == "rgb(255, 255, 255)", 30, "the diagram is not light")
    notebook.page.emulate_media(color_scheme="light")


def test_on_the_next_day_question_and_map_are_there_without_a_kernel(
    bench: Any, browser: Any, running: Lab, exercise: Path
) -> None:
    """Where a widget's model is gone, its stored form shows, with what was answered; where it is not, only the widget."""
    question, why = 'quiz("01_internals/overlap")', "The last bucket waits for the last gradient."
    notebook = bench(f"from lockstep.notebook.quiz import quiz\n{question}", "%course map", "%course 2")
    stored = "Run this cell (Shift+Enter) to answer"
    assert notebook.run(notebook.cell("%load_ext lockstep")).strip() == "", "again, and not a word"
    for text in (question, "%course map", "%course 2"):
        notebook.run(notebook.cell(text))
    cell = notebook.cell(question)
    cell.get_by_role("radio").first.wait_for()
    assert stored not in cell.locator(".jp-OutputArea").inner_text()
    cell.get_by_role("radio").first.check()
    cell.get_by_role("button", name="Check").click()
    cell.locator(".lockstep-feedback", has_text=why).wait_for()
    today = notebook.page
    today.keyboard.press("Control+s")
    wait_for(lambda: "(your answer)" in notebook.file.read_text(encoding="utf-8"), 60, "the notebook is not saved")
    notebook.menu("Kernel", "Shut Down Kernel")  # this one's only: the other tests' pages keep theirs
    sessions = f"{running.address}api/sessions?token={running.token}"
    wait_for(lambda: notebook.file.name not in today.request.get(sessions).text(), 120, "the kernel is not shut down")
    today.goto("about:blank")  # not before: it would take back the requests that are under way
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    notebook = Notebook(page, running, notebook.file.name)
    cell = notebook.cell(question)
    answered = cell.get_by_text(why)
    answered.wait_for()
    assert cell.locator("li", has_text="(your answer)").count() == 1
    there = notebook.cell("%course 2").inner_text()
    assert "Run this cell to bring the map up to date" in there and "Sharding" in there
    page.get_by_text("Error displaying widget").first.wait_for(state="attached")
    assert not page.locator(".jp-OutputArea-output.jupyter-widgets:visible").count()
    assert answered.is_visible()
    page.close()


@pytest.mark.slow
def test_a_cell_that_does_not_end_is_interrupted_and_says_where_everybody_was(bench: Any) -> None:
    notebook = bench(ENDLESS, 'print(6 * 7, "and on it goes")')
    cell = notebook.cell("%%ranks 3")
    notebook.start(cell)
    cell.get_by_text("[rank 1] rank 1 sleeps").first.wait_for(timeout=CELL_SECONDS * 1000)
    notebook.menu("Kernel", "Interrupt Kernel")
    cell.get_by_text("all_reduce #1").first.wait_for(timeout=CELL_SECONDS * 1000)
    said = cell.locator(".jp-OutputArea").inner_text()
    assert "Traceback" not in said and "time.sleep(500)" in said
    assert notebook.run(notebook.cell("and on it goes")).strip() == "42 and on it goes"


@pytest.fixture
def exercise(running: Lab) -> Iterator[Path]:
    """The learner's file of an exercise, before its first try; afterwards it is the stub again, and was never tried."""
    file = running.course / "exercises" / "average_gradients.py"
    forget(running)
    yield file
    shutil.copy(ROOT / "exercises" / file.name, file)
    forget(running)


def test_a_check_fails_and_passes_and_the_map_knows(bench: Any, running: Lab, exercise: Path, tmp_path: Path) -> None:
    wrong = find(ROOT, "average_gradients/touches_frozen")
    assert wrong is not None
    go_on = tmp_path / "go on"
    notebook = bench("%check average_gradients", "%course 01_internals")
    cell = notebook.cell("%check average_gradients")
    notebook.run(notebook.cell("%course 01_internals"))  # a map on any page lets links open beside it
    gate = f"\n\nimport os, time\nwhile not os.path.exists({str(go_on)!r}):\n    time.sleep(0.05)\n"
    exercise.write_text(wrong.text + gate, encoding="utf-8")
    notebook.start(cell)
    cell.get_by_text(f"0 of {Course(running.course).count_checks(exercise.stem)} checks").wait_for()
    go_on.touch()
    cell.get_by_text(re.compile(r"of \d+ checks passed")).wait_for(timeout=CELL_SECONDS * 1000)
    exercise.write_text(wrong.text, encoding="utf-8")
    said = notebook.run(cell)
    assert "✓" in said and "✗" in said and "Traceback" not in said
    assert re.search(r"^ *exercises/average_gradients\.py:\d+ ", said, re.MULTILINE), "a path that one can read"
    picture(cell, "check")
    link = cell.get_by_role("link", name=re.compile(r"average_gradients\.py:\d+")).first
    line = link.inner_text().rpartition(":")[2]
    link.click()
    editor = notebook.page.locator(".jp-FileEditor", has_text="def average_gradients")
    editor.wait_for()
    notebook.page.locator(".jp-StatusBar-TextItem", has_text=f"Ln {line}, Col 1").wait_for()
    assert link.is_visible() and line != "1"
    notebook.page.get_by_role("tab", name=notebook.file.name).click()
    shutil.copy(ROOT / "exercises" / "average_gradients.py", exercise)
    said = notebook.run(cell)
    assert "✗" in said and "✓" not in said, "a stub passes nothing"
    assert running.progress()["exercises"]["average_gradients"]["passed"] is False
    shutil.copy(ROOT / "solutions" / "average_gradients.py", exercise)
    said = notebook.run(cell)
    assert "✓" in said and "✗" not in said and "then ring_all_reduce: %check ring_all_reduce" in said
    section, following = cell.locator("p", has_text="Next: ").locator("a").all()
    assert "01_internals" in (section.get_attribute("href") or "")
    following.click()
    notebook.page.locator(".jp-FileEditor", has_text="def ring_all_reduce").wait_for()
    notebook.page.get_by_role("tab", name=notebook.file.name).click()
    assert running.progress()["exercises"]["average_gradients"]["passed"] is True
    there = notebook.cell("%course 01_internals")
    assert "you are here" in notebook.run(there)
    picture(there, "map")
    there.get_by_label("Mark this chapter as complete").check()
    wait_for(lambda: running.progress().get("chapters") == {CHAPTERS[0]: "complete"}, 20, "the mark is not recorded")
    there.get_by_text("· complete").first.wait_for()
    assert "Setting up: from one process to many" in there.locator("li:visible", has_text="you are here").inner_text()
    there.get_by_role("link", name=re.compile("^Next: chapter 2")).locator("visible=true").click()
    notebook.page.get_by_role("tab", name="02_setup.ipynb").wait_for()
    own = notebook.page.get_by_role("tab", name=notebook.file.name)
    assert own.count(), "it stands beside this notebook"
    passed = Course(running.course).count_checks("ring_all_reduce")
    progress.record(Course(running.course), "ring_all_reduce", passed, passed)
    own.click()  # the map is up to date without a click on Refresh
    there.get_by_text("exercises 2 of 3").locator("visible=true").first.wait_for()
