"""The static book: whole, readable without a network on any screen and on paper, and alive where it needs no kernel."""

from __future__ import annotations

import html
import json
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from support import one_of
from support.browser import CONTRASTS, faults
from support.front_end import wait_for

bs4 = pytest.importorskip("bs4", reason="not run: no nbconvert here")

from lockstep.authoring import book as books  # noqa: E402
from lockstep.course import (  # noqa: E402
    Course,
    CourseError,
    quizzes,
)
from lockstep.course.outline import outlines  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
COURSE = Course(ROOT)
NAMES = [chapter.name for chapter in COURSE.chapters]
PAGES = ["index", *NAMES]
# What leaves the window, or is wider than its box and cannot be scrolled there.
CUT_OFF = """() => [...document.querySelectorAll("main pre, main .wide, main .quiz, main p:has(> img), .output img, main iframe")].filter((one) =>
  one.getBoundingClientRect().right > innerWidth + 1
  || (one.scrollWidth > one.clientWidth + 1 && getComputedStyle(one).overflowX === "visible")).map((one) => one.textContent)"""
each_page = pytest.mark.parametrize("name", PAGES)
each_chapter = pytest.mark.parametrize("name", NAMES)


@cache
def soup(book: Path, name: str) -> Any:
    return bs4.BeautifulSoup((book / f"{name}.html").read_text(encoding="utf-8"), "html.parser")


@cache
def inside(book: Path) -> dict[str, set[str]]:
    """The anchors of every page."""
    return {f"{name}.html": {str(tag["id"]) for tag in soup(book, name).find_all(id=True)} for name in PAGES}


def open_until(page: Any, address: str, shows: Callable[[], bool]) -> None:
    """Open a page until it shows what another page has stored. Chromium may give it a process of its own, and hands what
    is stored from one process to the other some time after the script that stores it goes on.
    """

    def opened() -> bool:
        page.goto(address)
        return shows()

    wait_for(opened, 30, f"{address} does not show what another page has stored")


# The pages as text ----------------------------------------------------------------------------------------------------


@each_page
def test_every_link_and_anchor_leads_somewhere(book: Path, name: str) -> None:
    anchors, page, inner = inside(book), soup(book, name), 0
    for tag in page.find_all(["a", "link", "script", "img"]):
        address = tag.get("href") or tag.get("src")
        if not address or address.startswith("data:"):
            continue
        parts = urlsplit(address)
        if parts.scheme:
            assert tag.name == "a" and parts.scheme == "https", f"loads something from elsewhere: {address}"
            continue
        inner += 1
        target = parts.path or f"{name}.html"
        assert (book / target).is_file(), address
        if parts.fragment:
            assert unquote(parts.fragment) in anchors[target], address
    assert inner > 10
    ids = [tag["id"] for tag in page.find_all(id=True)]
    assert len(ids) == len(set(ids))


def test_nothing_is_loaded_from_elsewhere(book: Path) -> None:
    for file in [*book.glob("assets/*.css"), book / "assets" / "book.js"]:
        assert not re.search(r"https?://|@import|\bfetch\(|XMLHttpRequest|url\(", file.read_text(encoding="utf-8")), (
            file
        )


def test_the_contents_say_of_each_chapter_what_it_is_for(book: Path) -> None:
    for chapter, shown in zip(outlines(COURSE), soup(book, "index").select(".map > li"), strict=True):
        text = " ".join(shown.get_text().split())
        assert chapter.minutes and f"About {chapter.minutes}" in text
        assert chapter.needs and len(chapter.goals) >= 3 and len(shown.select(".goals li")) == len(chapter.goals)
        assert [link.get_text() for link in shown.select(".sections a")] == [one.title for one in chapter.sections]
        exercises = {name for section in chapter.sections for name in section.exercises}
        listed = next(one.exercises for one in COURSE.chapters if one.name == chapter.name)
        jobs = [name for name in listed if name.startswith("clinic/")]
        assert exercises == set(listed) and f"{len(listed) - len(jobs)} exercises" in text
        assert not jobs or f"{len(jobs)} broken jobs" in text


@each_chapter
def test_a_page_holds_all_that_the_notebook_holds(book: Path, name: str) -> None:
    page = soup(book, name)
    shown = "".join(page.find("main").get_text().split())
    for cell in json.loads((ROOT / "chapters" / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if (
            cell["cell_type"] == "code"
            and not source.splitlines()[-1].startswith("quiz(")
            and "course_map(" not in source
        ):
            assert "".join(source.split()) in shown, source
            for output in cell["outputs"]:
                if output["output_type"] == "stream" and not source.startswith("%%writefile"):
                    assert "".join("".join(output["text"]).split()) in shown, source
    assert not any(books.WRITTEN.fullmatch(one.get_text().strip()) for one in page.select(".output"))
    turn = [page.select_one(f".turn a[rel={way}]")["href"] for way in ("prev", "next")]
    around = ["index", *NAMES, "index"]
    assert turn == [f"{around[NAMES.index(name)]}.html", f"{around[NAMES.index(name) + 2]}.html"]


@each_chapter
def test_a_page_asks_all_questions_and_gives_no_answer_away(book: Path, name: str) -> None:
    page, text = soup(book, name), (book / f"{name}.html").read_text(encoding="utf-8")
    questions = quizzes.read(ROOT / "chapters" / "quizzes" / f"{name}.toml").values()
    assert [quiz["data-key"] for quiz in page.select(".quiz")] == sorted(
        (one.key for one in questions), key=lambda key: text.index(f'data-key="{key}"')
    )
    for question in questions:
        quiz = page.select_one(f'[data-key="{question.key}"]')
        assert len(quiz.select("li")) == len(question.choices)
        for choice in question.choices:
            assert html.escape(choice.why, quote=False) not in text and choice.why not in text


def test_what_answers_a_prediction_is_folded_and_opens(book: Path, browser: Any) -> None:
    """As many cells as in the notebook, and never the cells of a page that asks for no prediction."""
    cells = json.loads((ROOT / "chapters" / "01_internals.ipynb").read_text(encoding="utf-8"))["cells"]
    covered = sum(cell["metadata"].get("jupyter", {}).get("outputs_hidden", False) for cell in cells)
    page = browser.new_page()
    page.goto(f"file://{book}/01_internals.html")
    folded = page.locator("details.output")
    assert folded.count() == covered > 5
    printed = folded.first.locator("pre, .html").first
    assert printed.is_hidden()
    folded.first.locator("summary").click()
    assert printed.is_visible() and printed.inner_text().strip()
    below = page.locator(".told > p").last  # the text that says what was to be predicted
    assert below.is_hidden()
    page.emulate_media(media="print")
    assert below.is_visible()
    page.emulate_media(media="screen")
    for summary in folded.locator("summary").all()[1:]:
        summary.click()
    assert below.is_visible()
    page.goto(f"file://{book}/05_checkpointing.html")
    assert folded.count() == 0 and page.locator("div.output").count() > 5
    page.close()


def test_what_reads_as_a_reference_is_a_link(book: Path) -> None:
    link = soup(book, "05_checkpointing").find("a", string=re.compile(r"chapter 4,\s+.Beyond DDP."))
    assert link["href"] == "04_optimization.html#beyond-ddp"
    first = soup(book, NAMES[0])
    link = first.find("a", string='"DDP\'s buckets"')
    assert link["href"] == "01_internals.html#ddp-s-buckets" and link.parent.name == "p"
    assert all(one.find_parent(class_=["cell", "quiz"]) is None for one in first.find_all("a", string=re.compile('^"')))


def test_what_is_searched_is_the_text_with_words_apart_and_without_how_to_read_a_picture(book: Path) -> None:
    text = (book / "assets" / "search.js").read_text(encoding="utf-8")
    places = json.loads(text.partition(" = ")[2].removesuffix(";\n"))
    found = {title: text for name, _, title, text in places if name == NAMES[0]}
    assert not [
        text for text in found.values() if re.search(r"Point at a bar|not shown here|the rank only waits?a", text)
    ]
    assert "timeline(run) The picture shows" in found["Chapter 1. How DDP works inside"]
    assert "8 dist.all_reduce(t) ← ranks 0 and 2 9 dist.barrier() ← rank 1 Ranks" in found["Every rank must call it"]
    assert "solution: ring_all_reduce 6 of 6 checks" in found["Exercise: implement ring_all_reduce"]
    assert "def average():" in found["The mean"] and "no_sync(), the" in found["Exercise: implement mini_ddp"]


def test_the_first_line_of_a_cell_is_said_in_words() -> None:
    assert books.what_it_runs("%%ranks 4\nx") == "4 ranks"
    assert books.what_it_runs("%%ranks\nx") == "2 ranks"
    assert books.what_it_runs("%%ranks 1 --into run") == "1 rank"
    told = books.what_it_runs("%%ranks 4 --nodes 2 --bandwidth 1gbit --expect out-of-memory")
    assert told == "4 ranks · 2 nodes · 1gbit · meant to end as: out of memory"
    assert books.what_it_runs("%%ranks 3 --expect anything") == "3 ranks"
    assert books.what_it_runs("%%writefile a.py\nx") == "writes a.py" and books.what_it_runs("x = 1") == ""


def test_a_folder_with_something_else_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("mine")
    with pytest.raises(CourseError, match="something else in it than a book"):
        books.write_book(COURSE, tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["letter.txt"]
    with pytest.raises(CourseError, match="is a file"):
        books.write_book(COURSE, tmp_path / "letter.txt")


@pytest.mark.slow
def test_the_first_page_links_each_chapters_slides_and_says_where_the_command_is(book: Path) -> None:
    shown = soup(book, "index")
    links = [str(link["href"]) for link in shown.select(".map a[href^='slides/']")]
    assert links == [f"slides/{name}.html" for name in NAMES] and all((book / link).is_file() for link in links)
    assert "clone the course and run ./lockstep lab in its folder" in " ".join(
        shown.header.find_next("header").get_text().split()
    )


def test_the_command_replaces_an_old_book_by_the_same_bytes_and_says_where(tmp_path: Path) -> None:
    """Another process has other hashes. One chapter will do: pages differ in what they hold, not in how they are made."""
    (tmp_path / "autograder").mkdir()
    (tmp_path / "autograder" / "course.toml").write_text(
        f'[[chapter]]\nname = "{NAMES[5]}"\ntitle = "Beyond"\nexercises = []\n'
    )
    (tmp_path / "chapters").symlink_to(ROOT / "chapters")
    first, out = tmp_path / "first", tmp_path / "book"
    books.write_book(Course(tmp_path), first)
    (out / "assets").mkdir(parents=True)
    (out / "assets" / "book.css").write_text("")
    (out / "06_gone.html").write_text("")
    command = [sys.executable, "-m", "lockstep", "book", "book"]
    environment = {"PYTHONPATH": str(ROOT / "src"), "LOCKSTEP_COURSE": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout) == (0, "book/index.html: 1 chapters\n"), done.stderr
    made, again = ({file.relative_to(top): file.read_bytes() for file in top.rglob("*") if file.is_file()}
                   for top in (first, out))  # fmt: skip
    assert made == again and len(made) > 5
    assert "slides" not in (out / "index.html").read_text(encoding="utf-8"), "none were asked for"


# The pages in a browser -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", one_of(["light", "dark"]))
@each_page
def test_it_reads_on_any_screen_by_day_and_by_night(book: Path, browser: Any, name: str, scheme: str) -> None:
    page = browser.new_page(color_scheme=scheme, viewport={"width": 1280, "height": 900})
    errors, asked = faults(page), []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"file://{book}/{name}.html")
    assert page.evaluate(CONTRASTS) == {}
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(255, 255, 255)") == (scheme == "light")
    for width in (1280, 760, 380):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate(CUT_OFF) == []
    text = page.locator("main p").first.bounding_box()
    assert text["x"] >= 8 and text["x"] + text["width"] <= 380 - 8, "text needs a margin"
    assert errors == [] and asked and all(url.startswith(("file://", "data:", "about:")) for url in asked)
    page.close()


def test_the_lines_are_of_a_length_that_reads_well(book: Path, browser: Any) -> None:
    page = browser.new_page(viewport={"width": 1600, "height": 900})
    page.goto(f"file://{book}/{NAMES[1]}.html")
    letters = page.evaluate("""() => {
      const p = [...document.querySelectorAll("main > p")].find((p) => p.textContent.length > 300);
      const lines = new Set([...function* () { const r = document.createRange(); r.selectNodeContents(p);
        for (const box of r.getClientRects()) yield Math.round(box.bottom / 10) }()]);
      return p.textContent.length / lines.size }""")
    assert 55 <= letters <= 90
    columns = page.evaluate("""() => {
      const pre = document.querySelector(".output pre"), probe = document.createElement("span");
      probe.textContent = "x".repeat(100); pre.append(probe);
      return [pre.clientWidth - 2 * parseFloat(getComputedStyle(pre).paddingLeft), probe.getBoundingClientRect().width] }""")
    assert columns[0] >= columns[1], "100 columns of output fit on a line"
    page.close()


def test_on_a_phone_sentences_wrap_small_pictures_fit_and_what_goes_on_fades(book: Path, browser: Any) -> None:
    page = browser.new_page(viewport={"width": 390, "height": 844})
    wider = "(one) => one.scrollWidth - one.clientWidth"
    page.goto(f"file://{book}/01_internals.html")
    loaded = "(one) => one.complete && one.naturalWidth"
    for name in ("broadcast", "reduce", "sum_everywhere", "all_gather", "reduce_scatter"):
        turns = page.locator(f"main img[src$='/{name}.svg']")
        turns.scroll_into_view_if_needed()  # it is loaded then
        wait_for(lambda turns=turns: turns.evaluate(loaded), 10, "a picture is not there")  # type: ignore[misc]
        box = turns.bounding_box()
        assert turns.evaluate("(one) => one.currentSrc").endswith(f"/{name}.narrow.svg")
        assert box["width"] == turns.evaluate(loaded), f"{name}: its numbers are as large as drawn"
        assert box["x"] >= 10 and box["x"] + box["width"] <= 380 and box["height"] > 200
    page.set_viewport_size({"width": 800, "height": 844})
    wait_for(lambda: turns.evaluate("(one) => one.currentSrc").endswith("scatter.svg"), 10, "it is still narrow")
    page.set_viewport_size({"width": 390, "height": 844})
    code = page.locator(".input pre", has_text="def ring_time")
    assert code.evaluate(wider) > 0 and "more" in code.get_attribute("class")
    drawn = page.locator(".tl-narrow").first  # with its steps below each other, so that all of it is seen
    assert drawn.evaluate(wider) == 0 and drawn.get_by_text("step 1", exact=True).is_visible()
    assert page.locator(".tl-box").first.is_hidden() and page.locator(".input pre").first.evaluate(wider) == 0
    page.goto(f"file://{book}/03_debugging.html")
    drift = page.locator("pre", has_text="DRIFT at step 4").first
    assert drift.evaluate(wider) == 0 and "weight on rank 1 differs" in drift.inner_text()
    assert page.locator("main p:has(> img[src$='/drift.svg'])").evaluate(wider) == 0
    page.goto(f"file://{book}/02_setup.html")
    large = page.locator("main p:has(> img[src$='/deal.svg'])")
    assert large.evaluate(wider) > 0
    for wide, classes in ((0, "more"), (1e4, ""), (0, "more")):
        large.evaluate(f"(one) => {{ one.scrollLeft = {wide} }}")
        wait_for(
            lambda classes=classes: large.get_attribute("class") == classes, 10, "it does not fade where it goes on"
        )  # type: ignore[misc]
    assert large.get_attribute("tabindex") == "0"
    here = page.locator(".chapters [aria-current]").bounding_box()
    assert here["width"] == here["height"]
    page.close()


def test_search_finds_from_any_page_and_leads_there(book: Path, browser: Any) -> None:
    page = browser.new_page()
    errors = faults(page)
    page.goto(f"file://{book}/{NAMES[0]}.html")
    page.keyboard.press("/")
    page.keyboard.type("monitored BARRIER")
    first = page.locator(".found a").first
    first.wait_for()
    assert first.locator("b").inner_text() == "Who is missing: a monitored barrier"
    assert page.locator(".found mark").count() > 0
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_url("**/03_debugging.html#who-is-missing-a-monitored-barrier")
    assert 0 <= page.locator("#who-is-missing-a-monitored-barrier").bounding_box()["y"] < 200
    page.locator(".search input").fill("no such words <b>")
    page.locator(".found p").wait_for()
    assert page.locator(".found").inner_text() == "Nothing here says “no such words <b>”."
    page.keyboard.press("Escape")
    assert page.locator(".found").is_hidden() and errors == []
    page.close()


def test_the_diagram_steps(book: Path, browser: Any) -> None:
    page = browser.new_page()
    errors = faults(page)
    page.goto(f"file://{book}/01_internals.html")
    page.locator("iframe").scroll_into_view_if_needed()
    assert page.locator("iframe").count() == 1
    frame = page.frame_locator("iframe")
    frame.get_by_label("one step forward").click()
    assert frame.get_by_role("status").inner_text().startswith("Step 1 of 6")
    frame.get_by_label("to the end").click()
    assert "Done: all ranks hold the same sum" in frame.get_by_role("status").inner_text()
    assert errors == []
    page.close()


def test_a_question_is_answered_and_remembered(book: Path, browser: Any) -> None:
    context = browser.new_context()
    page = context.new_page()
    page.goto(f"file://{book}/02_setup.html")
    question = quizzes.read(ROOT / "chapters" / "quizzes" / "02_setup.toml")["set_epoch"]
    quiz = page.locator('[data-key="02_setup/set_epoch"]')
    for number, choice in sorted(enumerate(question.choices), key=lambda pair: pair[1].right):
        quiz.get_by_role("button").nth(number).click()
        told = quiz.get_by_role("status")
        assert told.inner_text().startswith("Right." if choice.right else "Not quite.")
        assert re.sub(r"[`\s]", "", choice.why) in re.sub(r"\s", "", told.inner_text())
        assert quiz.locator("[aria-pressed=true]").count() == 1
    mark = page.locator(".places .mark[data-keys*=set_epoch]")
    assert mark.inner_text() == "?", "its section asks another one"
    (other,) = {*str(mark.get_attribute("data-keys")).split()} - {"02_setup/set_epoch"}
    right = [one.right for one in quizzes.read(ROOT / "chapters" / "quizzes" / "02_setup.toml")[other[9:]].choices]
    page.locator(f'[data-key="{other}"]').get_by_role("button").nth(right.index(True)).click()
    assert mark.inner_text() == "✓"
    page.reload()
    assert quiz.get_by_role("status").inner_text() == told.inner_text() and told.inner_text().startswith("Right.")
    assert quiz.locator("[aria-pressed=true].right").count() == 1
    page.get_by_label("I have read this chapter").check()
    reads = page.locator(".map li.done h2 a")
    open_until(page, f"file://{book}/index.html", lambda: page.locator(".start").inner_text().startswith("Continue"))
    assert page.locator(".start").get_attribute("href").endswith("03_debugging.html")
    open_until(page, f"file://{book}/index.html", lambda: reads.all_inner_texts() == [COURSE.chapters[1].title])
    context.close()


def test_the_theme_is_chosen_and_kept(book: Path, browser: Any) -> None:
    from playwright.sync_api import expect

    context = browser.new_context(color_scheme="light")
    page = context.new_page()
    page.goto(f"file://{book}/01_internals.html")
    page.locator(".theme").click()  # the first press already shows the other theme
    theme = "document.documentElement.dataset.theme"
    open_until(page, f"file://{book}/02_setup.html", lambda: page.evaluate(theme) == "dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(17, 20, 23)"
    assert page.evaluate(CONTRASTS) == {}
    page.goto(f"file://{book}/01_internals.html")
    page.locator("iframe").scroll_into_view_if_needed()
    inside = page.frame_locator("iframe").locator("body")
    expect(inside).to_have_css("background-color", "rgb(17, 20, 23)")  # the diagram follows
    page.locator(".theme").click()
    expect(inside).to_have_css("background-color", "rgb(255, 255, 255)")
    page.emulate_media(color_scheme="dark")
    expect(inside).to_have_css("background-color", "rgb(255, 255, 255)")  # chosen, whatever the system prefers
    context.close()


def test_unless_a_theme_is_chosen_page_and_diagram_follow_the_system(book: Path, browser: Any) -> None:
    from playwright.sync_api import expect

    context = browser.new_context(color_scheme="dark")
    page = context.new_page()
    page.goto(f"file://{book}/01_internals.html")
    page.locator("iframe").scroll_into_view_if_needed()
    inside = page.frame_locator("iframe").locator("body")
    for scheme, ground in (("dark", "rgb(17, 20, 23)"), ("light", "rgb(255, 255, 255)"), ("dark", "rgb(17, 20, 23)")):
        page.emulate_media(color_scheme=scheme)
        for shown in (page.locator("body"), inside):
            expect(shown).to_have_css("background-color", ground)
    for pressed in ("light", "dark", "as the system", "light"):
        page.locator(".theme").click()
        assert page.locator(".theme").get_attribute("aria-label") == f"Theme: {pressed}. Change"
    expect(inside).to_have_css("background-color", "rgb(255, 255, 255)")
    context.close()


def test_on_a_phone_the_marks_in_the_list_of_sections_are_explained(book: Path, browser: Any) -> None:
    page = browser.new_page(viewport={"width": 390, "height": 844})
    page.goto(f"file://{book}/01_internals.html")
    page.locator(".places summary").click()
    legend = page.locator(".places .legend")
    assert legend.is_visible() and " ".join(legend.inner_text().split()) == "✎ exercise ? question ✓ answered"
    page.close()


@pytest.mark.parametrize("width", [360, 390])
def test_on_a_phone_the_search_field_says_what_it_is(book: Path, browser: Any, width: int) -> None:
    page = browser.new_page(viewport={"width": width, "height": 800})
    page.goto(f"file://{book}/index.html")
    room, needed = page.locator(".search input").evaluate("""(field) => {
      const style = getComputedStyle(field), brush = document.createElement("canvas").getContext("2d");
      brush.font = style.font;
      const room = field.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
      return [room, brush.measureText(field.placeholder).width] }""")
    assert room >= needed
    page.close()


def test_long_lines_of_source_go_on_under_their_beginning_and_letters_stand_at_the_first_line(
    book: Path, browser: Any
) -> None:
    page = browser.new_page(viewport={"width": 390, "height": 800})
    page.goto(f"file://{book}/02_setup.html")
    lines = page.evaluate("""() => [...document.querySelectorAll(".source .line")].map((line) => {
      const r = document.createRange(); r.selectNodeContents(line);
      const lefts = new Map([...r.getClientRects()].filter((box) => box.width > 1).map((box) => [Math.round(box.top), 0]));
      for (const box of r.getClientRects()) if (box.width > 1) {
        const top = Math.round(box.top); lefts.set(top, Math.min(lefts.get(top) || 1e9, box.left)) }
      return [[...lefts.values()], line.style.getPropertyValue("--in") * 1] })""")
    wrapped = [(lefts, indent) for lefts, indent in lines if len(lefts) > 1 and indent]
    assert len(wrapped) > 5
    start = min(left for lefts, _ in lines for left in lefts)
    for lefts, indent in wrapped:
        assert all(left > start + 5 * indent for left in lefts[1:]), "not at the edge"
    assert page.locator(".source .k, .source .kn").count() > 5, "colored"
    off = page.evaluate("""() => [...document.querySelectorAll(".quiz li")].filter((item) => item.offsetHeight > 50).map((item) => {
      const button = item.querySelector("button"), range = document.createRange(); range.selectNodeContents(button);
      return getComputedStyle(item).alignItems === "baseline" && button.offsetTop - item.offsetTop < 3 })""")
    assert off and all(off)
    page.close()


def test_on_paper_there_is_the_text_and_nothing_to_click(book: Path, browser: Any) -> None:
    page = browser.new_page(color_scheme="dark")
    page.goto(f"file://{book}/01_internals.html")
    page.emulate_media(media="print", color_scheme="dark")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    for gone in (".bar", ".places", ".turn", ".read", ".output iframe"):
        assert page.locator(gone).first.is_hidden(), gone
    assert page.locator("main details").count() == page.locator("main details[open]").count() > 0
    assert page.get_by_alt_text("Ring all-reduce of 8 numbers").is_visible(), "in the place of the diagram"
    assert page.evaluate("getComputedStyle(document.querySelector('main p')).color") == "rgb(29, 33, 37)"
    assert page.evaluate("getComputedStyle(document.querySelector('.output pre')).whiteSpace") == "pre-wrap"
    assert page.locator(".quiz li").first.is_visible()
    page.close()


def test_without_scripts_all_of_it_can_be_read(book: Path, browser: Any) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(f"file://{book}/02_setup.html")
    assert page.locator(".quiz .question").first.is_visible() and page.locator(".quiz li").first.is_visible()
    assert page.locator(".places a").first.is_visible() and page.locator("h2").first.is_visible()
    context.close()
