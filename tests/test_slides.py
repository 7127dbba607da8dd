"""Slides from the chapters: whole in one file, readable from the back of a room, no answer before its question."""

from __future__ import annotations

import base64
import json
import re
from functools import cache
from itertools import dropwhile, pairwise
from pathlib import Path
from typing import Any

import pytest
from markupsafe import Markup
from support import ROOT, one_of
from support.browser import CONTRASTS, faults

bs4 = pytest.importorskip("bs4", reason="not run: no nbconvert here")

from lockstep.authoring import slides as decks  # noqa: E402
from lockstep.course import Course, quizzes  # noqa: E402
from lockstep.course.outline import outlines  # noqa: E402

COURSE = Course(ROOT)
NAMES = [chapter.name for chapter in COURSE.chapters]
each_chapter = pytest.mark.parametrize("name", one_of(NAMES))
# What leaves the room of its slide, or the slide; and the smallest code, in pixels.
CUT_OFF = """() => [...document.querySelectorAll(".slide")].flatMap((slide) => {
  const room = slide.querySelector(".room").getBoundingClientRect(), whole = slide.getBoundingClientRect();
  const parts = [...slide.querySelectorAll(".fit *")].filter((one) => one.tagName === "svg" || !one.closest("svg"));
  const out = (box, frame) => box.width && (box.right > frame.right + 2 || box.bottom > frame.bottom + 2 || box.left < frame.left - 2);
  return [...parts.filter((one) => out(one.getBoundingClientRect(), room)),
    ...[...slide.children].filter((one) => out(one.getBoundingClientRect(), whole))]
    .map((one) => `${slide.id}: ${one.outerHTML.slice(0, 80)}`) })"""
SMALLEST = """() => Math.min(...[...document.querySelectorAll(".fit pre.source, .fit > p:not(.cut, .runs, .keys)")].map((one) =>
  parseFloat(getComputedStyle(one).fontSize) * one.closest(".fit").dataset.zoom))"""

# The sizes of code and of what it printed, in pixels of a window of 720, each with how many slides have it.
SIZES = """() => { const found = {};
  for (const pre of document.querySelectorAll(".fit .highlight pre.source:not(.wide)")) {
    const size = (parseFloat(getComputedStyle(pre).fontSize) * pre.closest(".fit").dataset.zoom).toFixed(1);
    (found[size] ||= new Set()).add(pre.closest(".slide").id) }
  return Object.fromEntries(Object.entries(found).map(([size, ids]) => [size, ids.size])) }"""

# Lines of an output that take several lines, though a slide of the widest output is as wide.
BROKEN = """(columns) => [...document.querySelectorAll(".fit .printed .line")].filter((line) => line.textContent.trimEnd().length <= columns
  && line.getBoundingClientRect().height / line.closest(".fit").dataset.zoom > 1.5 * parseFloat(getComputedStyle(line).lineHeight))
  .map((line) => `${line.closest(".slide").id}: ${line.textContent}`)"""

# What was made larger than its slide has room for.
GROWN = """() => [...document.querySelectorAll(".fit[data-grow] .wide, .fit[data-grow]")].filter((one) =>
  one.closest(".fit").dataset.zoom > 1 && one.scrollWidth > one.clientWidth + 1).map((one) => one.closest(".slide").id)"""

# Lists whose numbers have no room beside them: 1.4 letters for "1." and the gap after it.
HANGING = """() => [...document.querySelectorAll(".slide ol")].filter((one) =>
  parseFloat(getComputedStyle(one).paddingLeft) < 1.4 * parseFloat(getComputedStyle(one).fontSize)).map((one) => one.closest(".slide").id)"""

# The smallest word in a drawing, in pixels.
LABELS = """() => Math.min(99, ...[...document.querySelectorAll(".fit svg text")].map((one) =>
  parseFloat(getComputedStyle(one).fontSize) * one.ownerSVGElement.getScreenCTM().a))"""


def text(book: Path, place: str) -> str:
    return (book / f"{place}.html").read_text(encoding="utf-8")


@cache
def soup(book: Path, place: str) -> Any:
    return bs4.BeautifulSoup(text(book, place), "html.parser")


@cache
def anchors(book: Path, place: str) -> set[str]:
    """Of a page whose text need not be parsed for it: that takes most of a second."""
    return set(re.findall(r'<\w[^<>]* id="([^"]+)"', text(book, place)))


@cache
def slides(book: Path, name: str) -> list[Any]:
    return list(soup(book, f"slides/{name}").select(".slide"))


def words(tag: Any) -> str:
    return re.sub(r"\s", "", tag if isinstance(tag, str) else tag.get_text())


# The slides as text ---------------------------------------------------------------------------------------------------


def test_the_command_says_how_many_slides_there_are(book: Path) -> None:
    told = dict(re.findall(r"(\w+)\.html: (\d+) slides", (book.parent / "said").read_text(encoding="utf-8")))
    assert told == {
        name: str(len(re.findall(r'<section class="slide\b', text(book, f"slides/{name}")))) for name in NAMES
    }


@each_chapter
def test_a_file_is_whole_and_its_links_lead_into_the_book(book: Path, name: str) -> None:
    page = soup(book, f"slides/{name}")
    for tag in page.find_all(["img", "script", "iframe", "link", "source", "object"]):
        assert str(tag.get("src") or tag.get("href") or "data:").startswith("data:"), tag
    assert not re.search(
        r"@import|\bfetch\(|url\((?!#)", page.style.get_text() + page.find_all("script")[-1].get_text()
    )
    for link in page.find_all("a"):
        place, _, anchor = str(link["href"]).partition("#")
        if place.startswith("../"):
            there = anchors(book, place.removeprefix("../").removesuffix(".html"))
            assert not anchor or anchor in there, link
        else:
            assert place.startswith("https://") or (not place and page.find(id=anchor)), link
    shown = slides(book, name)
    for number, slide in enumerate(shown, 1):
        assert slide["id"] == str(number)
        assert slide.select_one(".number").get_text() == f"{number} / {len(shown)}"
        assert slide.select_one(".foot a")["href"].startswith(f"../{name}.html#")


@each_chapter
def test_all_sections_come_in_order_each_with_its_place_in_the_book(book: Path, name: str) -> None:
    found = [
        one for one in slides(book, name) if {"section", "exercise"} & {*one["class"]} and not one.select_one(".above")
    ]
    titles = soup(book, name).select("main > h1, main > h2")[1:]
    assert [words(one.h2) for one in found] == [words(title).removesuffix("#") for title in titles]
    assert [one.select_one(".foot a")["href"].partition("#")[2] for one in found] == [title["id"] for title in titles]
    plan = soup(book, f"slides/{name}").select(".plan a")
    assert [link["href"] for link in plan] == [f"#{one['id']}" for one in found]
    lines = [words(item) for item in soup(book, name).find(id="what-to-remember").find_next("ul").select("li")]
    assert lines == [
        words(item) for one in found if one.h2.get_text() == "What to remember" for item in one.select("li")
    ]


@each_chapter
def test_an_answer_is_on_the_slide_after_its_question(book: Path, name: str) -> None:
    shown = slides(book, name)
    chapter = next(one for one in outlines(COURSE) if one.name == name)
    for question in quizzes.read(quizzes.quiz_file(ROOT, name)).values():
        plain = words(question.text.replace("`", ""))
        (at,) = [n for n, one in enumerate(shown) if "ask" in one["class"] and plain in words(one)]
        right = next(choice for choice in question.choices if choice.right)
        assert all(words(choice.text.replace("`", "")) in words(shown[at]) for choice in question.choices)
        assert "answer" in shown[at + 1]["class"] and words(right.why.replace("`", "")) in words(shown[at + 1])
        assert words(right.why.replace("`", "")) not in words(shown[at])
        (section,) = [one for one in chapter.sections if question.key in one.quizzes]
        assert words(section.plain.partition(":")[0]) == words(shown[at].h2), "not about the subsection before it"


@each_chapter
def test_what_is_to_be_predicted_is_asked_before_any_output(book: Path, name: str) -> None:
    shown = slides(book, name)
    for one in (one for one in shown if "ask" in one["class"]):
        assert not one.select(".printed, .html, svg, img:not(.covered)") and "meant to end" not in one.get_text()
    predicted = [
        paragraph
        for paragraph in soup(book, name).select("main > p")
        if any(bold.get_text().startswith("Predict") for bold in paragraph.select("strong"))
    ]
    for paragraph in predicted:
        asked = re.sub(r"\(--timeline[^()]*\)", "", words(paragraph))
        at = next(n for n, one in enumerate(shown) if "ask" in one["class"] and asked in words(one))
        assert "answer" in next(one for one in shown[at:] if "ask" not in one["class"])["class"]
    assert predicted or name == "05_checkpointing"


@each_chapter
def test_a_question_asks_and_its_title_does_not_answer(book: Path, name: str) -> None:
    """A question that takes several slides is on each of them."""
    for one in (one for one in slides(book, name) if "ask" in one["class"]):
        said = " ".join(part.get_text() for part in one.select(".fit > p"))
        assert "?" in said or "Predict" in said or one.select(".choices"), (one["id"], said)
        assert ":" not in one.h2.get_text()
    if name == "01_internals":
        asked = [one for one in slides(book, name) if one.select("img.covered")]
        assert [one.h2.get_text() for one in asked] == ["Broadcast", "Reduce", "All-reduce", "All-gather", "Reduce-scatter"]  # fmt: skip
        said = {" ".join(one.select_one(".fit > p.key").get_text().split()) for one in asked}
        assert said == {"What will each rank hold?"}


@each_chapter
def test_a_timeline_says_what_it_shows(book: Path, name: str) -> None:
    """In the chapter's own words, below the picture; each part of it, where it takes several slides."""
    drawn = [one for one in slides(book, name) if one.select(".lockstep-timeline")]
    for one in drawn:
        (said,) = one.select(".fit > p.taken")
        assert words(said) in words(soup(book, name).main), (one["id"], said)
    if name == "01_internals":
        said = words(drawn[0].select_one(".taken"))
        assert said.endswith(words("the rank only waits; its backward is hatched meanwhile."))


def test_of_before_and_after_the_second_half_is_covered_first(book: Path) -> None:
    shown = slides(book, "01_internals")
    covered = [n for n, one in enumerate(shown) if one.select(".fit > img.covered")]
    pictures = [one["src"] for one in soup(book, "01_internals").select('img[src^="pictures/"]')]
    assert len(covered) == sum(b">before<" in (ROOT / "chapters" / one).read_bytes() for one in pictures) == 5
    for at in covered:
        first, then = shown[at].img, shown[at + 1].img
        assert first["src"] == then["src"] and "covered" not in then["class"]
        assert "ask" in shown[at]["class"] and "answer" in shown[at + 1]["class"]
        above, again = ([words(one) for one in picture.find_previous_siblings()] for picture in (first, then))
        assert above == again and above, "the picture stays in its place"
        picture = base64.b64decode(first["src"].partition(",")[2]).decode()
        (width,), (after,) = re.findall(r'viewBox="0 0 (\d+)', picture), re.findall(r'x="(\d+)"[^>]*>after', picture)
        assert first["style"] == f"--after: {int(after) / int(width):.0%}"


def test_what_a_slide_lacks_is_not_spoken_of() -> None:
    """Options, a picture to click, where to read on."""
    body = bs4.BeautifulSoup(
        "<p>Look. <span class=on-screen>Click it.</span> Guess (twice). (<code class=keep>--into</code> keeps it.)</p>"
        "<div class=ls-card><p>HANG</p><p>Read: more</p></div>",
        "html.parser",
    )
    decks._make_whole(body, ROOT, "01_internals")
    assert " ".join(body.get_text(" ").split()) == "Look. Guess (twice). HANG"


@each_chapter
def test_an_exercise_has_its_names_its_minutes_and_its_command(book: Path, name: str) -> None:
    chapter = next(one for one in outlines(COURSE) if one.name == name)
    told = [one for one in slides(book, name) if "exercise" in one["class"]]
    for section, slide in zip([one for one in chapter.sections if one.exercises], told, strict=True):
        group = section.exercises[0].partition("/")[0]
        assert section.effort in slide.get_text() and group in slide.select_one(".facts").get_text()
        command = group if len(section.exercises) == 1 else f"{group}/NAME"
        assert slide.select_one(".command").get_text() == f"./lockstep check {command}"


def pictures_of(drawn: Any) -> int:
    """How many slides a timeline takes: one for each run; of a tall one, for each rank."""
    svg = drawn.select_one(".tl-box > svg")
    if runs := drawn.select(".tl-box text.tl-bold"):
        return len(runs)
    tall = svg is not None and float(svg["viewbox"].split()[3]) > decks.TALL
    return len([one for one in svg.select("text[x='8']") if one.get_text().startswith("rank ")]) if tall else 1


@each_chapter
def test_every_picture_is_there(book: Path, name: str) -> None:
    page = soup(book, f"slides/{name}")
    stored = {base64.b64decode(one["src"].partition(",")[2]) for one in page.select("img[src*=svg]")}
    for picture in soup(book, name).select('img[src^="pictures/"]'):
        assert (ROOT / "chapters" / picture["src"]).read_bytes() in stored, picture["src"]
    drawn = soup(book, name).select(".output div.lockstep-timeline, .output > .html > svg")
    runs = sum(map(pictures_of, drawn))
    assert len(page.select(".fit .html > .lockstep-timeline, .fit .html > svg")) == runs


def test_a_timeline_of_two_runs_is_two_slides_with_one_axis(book: Path) -> None:
    """Each has its own bars and what they tell; the numbers below are at the same places, so a turn compares them."""
    shown = [one for one in slides(book, "04_optimization") if one.select("text.tl-bold")]
    assert [[title.get_text() for title in one.select("text.tl-bold")] for one in shown] == [
        ["defaults"],
        ["buckets of 0.5 MiB"],
    ]
    first, second = (one.select_one(".tl-box > svg") for one in shown)
    (whole,) = soup(book, "04_optimization").select(".tl-box > svg:has(text.tl-bold)")
    bars = [[bar["aria-label"] for bar in one.select(".tl-bar")] for one in (first, second, whole)]
    assert bars[0] and bars[1] and bars[0] + bars[1] == bars[2]
    axis = [[(one["x"], one.get_text()) for one in svg.select("[text-anchor=middle]")] for svg in (first, second)]
    assert axis[0] == axis[1] and len(axis[0]) > 3
    assert [svg["aria-label"].count("Timeline(") for svg in (first, second)] == [1, 1]
    assert "defaults" in first["aria-label"] and "buckets of 0.5 MiB" in second["aria-label"]


def test_a_tall_timeline_is_a_slide_for_each_rank(book: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same axis, each with its own bars."""
    height = lambda svg: float(svg["viewbox"].split()[3])  # noqa: E731
    whole = max(soup(book, "01_internals").select(".tl-box > svg:not(:has(text.tl-bold))"), key=height)
    monkeypatch.setattr(decks, "TALL", height(whole) - 1)
    bars = [bar["aria-label"] for bar in whole.select(".tl-bar")]
    output = bs4.BeautifulSoup(str(whole.find_parent(class_="html")), "html.parser").div
    parts = [bs4.BeautifulSoup(part, "html.parser").select_one(".tl-box > svg") for part in decks._runs_apart(output)]
    mine = [[bar["aria-label"] for bar in svg.select(".tl-bar")] for svg in parts]
    assert len(parts) > 1 and all(mine) and [label for one in mine for label in one] == bars
    named = [[text.get_text() for text in svg.select("text[x='8']")] for svg in parts]
    assert named == [[f"rank {rank}", "ms"] for rank in range(len(parts))]
    axes = [[(one["x"], one.get_text()) for one in svg.select("[text-anchor=middle]")] for svg in parts]
    assert len(axes[0]) > 3 and all(axis == axes[0] for axis in axes)
    assert max(map(height, parts)) < height(whole)


@each_chapter
def test_code_that_goes_on_says_so_and_leaves_no_tail(book: Path, name: str) -> None:
    """A slide with the last one or two lines of a cell says nothing."""
    shown = [one for one in slides(book, name) if one.select_one(".part")]
    while shown:
        (first, of), *_ = told = [[int(n) for n in words(one.select_one(".part")).split("of")] for one in shown]
        assert first == 1 and told[:of] == [[n, of] for n in range(1, of + 1)]
        if "code" in shown[0]["class"]:
            lines = [len(one.select(".input .line")) for one in shown[:of]]
            assert min(lines) > 3, (words(shown[0]), lines)
        shown = shown[of:]


@each_chapter
def test_no_slide_is_of_machinery_alone(book: Path, name: str) -> None:
    """Neither a sentence that promises code, nor what `%%writefile` prints, nor how a cell calls a command."""
    for slide in slides(book, name):
        said = words(slide)
        assert "redirect_stdout(" not in said and "def torchrun(" not in said, said
        assert not re.search(r"\b(Ov|W)riting \S+\.\w+", said) and "Overwriting" not in said, said
        if "code" in slide["class"]:
            assert slide.select("pre, img, svg, .html"), said


@each_chapter
def test_code_is_whole_but_for_imports_and_a_long_output_says_how_much_is_left_out(book: Path, name: str) -> None:
    shown, cut = slides(book, name), 0
    indented = {line.get_text().rstrip() for one in shown for line in one.select(".input .line")}
    code = "".join(words(pre) for one in shown for pre in one.select(".input pre"))
    for cell in json.loads((ROOT / "chapters" / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] != "code" or decks.NOT_SHOWN.search(source) or source.startswith(("quiz(", "print(Path(")):
            continue
        lines = [*dropwhile(re.compile(r"$|%%ranks|%%writefile|import |from |%load_ext").match, source.splitlines())]
        if decks.PLUMBING.search(source) and "" in lines:
            lines = lines[len(lines) - lines[::-1].index("") :]
            assert words("".join(lines)) in code, source
        elif cell["outputs"] and len(lines) > decks.FEW:
            assert words("".join(lines)) in code, source
            assert {line.rstrip() for line in lines} <= indented, "with its indent"
    for remark in (one for slide in shown for one in slide.select(".printed + .cut")):
        kept = [words(line) for line in remark.find_previous("pre").select(".line")]
        whole = next(
            lines
            for pre in soup(book, name).select(".output pre")
            if kept[-1] in (lines := [words(line) for line in pre.get_text().strip("\n").split("\n")])
            and all(line in lines for line in kept)
        )
        assert remark.get_text() == f"… {len(whole) - len(kept)} more lines in the book"
        cut += 1
    assert cut < 8


@each_chapter
def test_a_note_speaks_of_what_is_on_its_slide(book: Path, name: str) -> None:
    """Neither what comes below, nor the question of the next slide; a title's slide has nothing below it."""
    for one in slides(book, name):
        said = " ".join(note.get_text() for note in one.select(".taken"))
        assert "?" not in said and not re.search(r"\b[Bb]elow,|next (\w+ )?cell|:$", said.strip()), (one["id"], said)
        if "section" in one["class"]:
            assert not re.search(r"\b[Bb]elow,", one.get_text()), one["id"]


def test_a_hangs_card_is_two_slides_if_it_has_no_room_on_one(book: Path) -> None:
    """Its headline, the ranks and the line that parted them; then the code and the notes. Nothing is on both."""
    shown, cards, whole = [*slides(book, "02_setup"), *slides(book, "03_debugging")], 0, 0
    for at, one in enumerate(shown):
        for card in one.select(".ls-card:has(table)"):
            if card.select(":scope > p:not(.ls-red)"):
                assert card.select(".ls-code") and decks._height(Markup(card.parent.parent.decode())) <= decks.ROOM
                whole += 1
                continue
            assert card.select_one(":scope > .ls-red") and not card.select(":scope > p:not(.ls-red), pre"), one["id"]
            assert all("ls-branch" in line["class"] for line in card.select(".ls-code > div"))
            (more,) = shown[at + 1].select(".ls-card")
            assert more.select(".ls-code") and not more.select(".ls-red:not(span), table") and more.select("p, pre")
            assert "RuntimeError" not in "".join(p.get_text() for p in more.select("p")) or not more.pre
            cards += 1
    assert cards > 6 and whole


@each_chapter
def test_what_a_cell_printed_has_the_cell_or_its_last_lines_above_it(book: Path, name: str) -> None:
    """Only where they have no room, the question or a word is above it."""
    shown, apart = slides(book, name), 0
    for one in shown:
        printed = one.select_one(".printed")
        if printed is not None and not printed.find_previous_sibling(class_=["input", "end"]):
            assert printed.find_previous_sibling("p"), (one["id"], words(one)[:80])
            apart += 1
        for end in one.select(".end"):
            lines = [line.get_text().rstrip() for line in end.select(".line")]
            assert len(lines) <= decks.SHORT and not lines[0].startswith(" "), (one["id"], lines)
    assert apart <= len(shown) / 20, "most have it"


@each_chapter
def test_no_slide_is_a_tail(book: Path, name: str) -> None:
    """What follows under one heading and has room is on one slide; no slide but a question's is a line or a sentence."""
    shown = slides(book, name)
    for one in (one for one in shown if {"code", "text", "answer"} & {*one["class"]}):
        height = decks._height(Markup(one.select_one(".fit").decode_contents()))
        assert height > 4, (one["id"], height, words(one)[:80])
    for one, then in pairwise(shown):
        if all({"code", "text", "picture"} & {*slide["class"]} and not slide.select(".part") for slide in (one, then)):
            both = Markup("".join(slide.select_one(".fit").decode_contents() for slide in (one, then)))
            alike = one.select_one(".foot a")["href"] == then.select_one(".foot a")["href"]
            assert not alike or "data-alone" in both or decks._height(both) > decks.ROOM, (one["id"], then["id"])


# The slides in a browser ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width, height", [pytest.param(1280, 720, marks=pytest.mark.slow), (1024, 768)])
@each_chapter
def test_nothing_is_cut_and_all_can_be_read_from_the_back(
    book: Path, browser: Any, name: str, width: int, height: int
) -> None:
    scheme = "light" if width == 1280 else "dark"
    page = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": height})
    errors, asked = faults(page), []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"file://{book}/slides/{name}.html")
    assert page.evaluate(CUT_OFF) == []
    assert page.evaluate(SMALLEST) >= 0.021 * height
    assert page.evaluate(GROWN) == []
    assert page.evaluate(HANGING) == []
    if width == 1280:
        sizes = page.evaluate(SIZES)
        most = max(sizes, key=sizes.get)
        alike = sum(number for size, number in sizes.items() if float(size) >= 0.9 * float(most))
        assert max(map(float, sizes)) == float(most) and alike >= 0.94 * sum(sizes.values()), "code has one size"
        assert sizes[most] >= 0.8 * sum(sizes.values()) and min(map(float, sizes)) >= 16, sizes
        assert page.evaluate(BROKEN, 80 + len("[rank 0] ")) == [], "a terminal's line is not broken again"
    assert page.evaluate(LABELS) >= 0.0165 * height, "12 pixels of 720"
    assert page.evaluate(CONTRASTS) == {}
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert errors == [] and all(url.startswith(("file://", "data:")) for url in asked)
    page.close()


def at(page: Any) -> int:
    """The slide that fills the window; its number is in the address too."""
    found = page.evaluate("[...document.querySelectorAll('.slide')].filter((one) => Math.abs(one.getBoundingClientRect().top) < 2)"
                          ".map((one) => one.id)")  # fmt: skip
    assert len(found) == 1 and page.url.endswith(f"#{found[0]}"), (found, page.url)
    return int(found[0])


def test_keys_and_a_swipe_turn_slides(book: Path, browser: Any) -> None:
    context = browser.new_context(viewport={"width": 1280, "height": 720}, has_touch=True)
    page = context.new_page()
    errors = faults(page)
    page.goto(f"file://{book}/slides/02_setup.html#2")
    starts = [int(one["id"]) for one in slides(book, "02_setup") if {"section", "exercise"} & {*one["class"]}]
    last = len(slides(book, "02_setup"))
    for key, number in [("ArrowRight", 3), ("Space", 4), ("PageDown", 5), ("ArrowLeft", 4), ("Shift+Space", 3),
                        ("ArrowDown", starts[1]), ("ArrowDown", starts[2]), ("ArrowUp", starts[1]), ("End", last),
                        ("ArrowRight", last), ("Home", 1), ("PageUp", 1)]:  # fmt: skip
        page.keyboard.press(key)
        assert at(page) == number, key
    swipe = """([from, to]) => { const touch = (x) => new Touch({ identifier: 1, target: document.body, clientX: x, clientY: 300 });
      document.body.dispatchEvent(new TouchEvent("touchstart", { touches: [touch(from)], bubbles: true }));
      document.body.dispatchEvent(new TouchEvent("touchend", { changedTouches: [touch(to)], bubbles: true })) }"""
    page.evaluate(swipe, [900, 300])
    assert at(page) == 2
    page.evaluate(swipe, [300, 900])
    assert at(page) == 1
    page.set_viewport_size({"width": 1024, "height": 768})
    page.keyboard.press("ArrowRight")
    page.locator(".plan a").nth(3).click()
    assert at(page) == starts[3] and errors == []
    context.close()


@pytest.mark.slow
def test_pictures_are_dark_in_the_dark(book: Path, browser: Any) -> None:
    page = browser.new_page(color_scheme="light", viewport={"width": 1280, "height": 720})
    page.goto(f"file://{book}/slides/01_internals.html#5")
    corner = """async (png) => { const image = new Image(); image.src = `data:image/png;base64,${png}`; await image.decode();
      const canvas = new OffscreenCanvas(image.width, image.height).getContext("2d"); canvas.drawImage(image, 0, 0);
      return [...canvas.getImageData(image.width / 2, 5, 1, 1).data].slice(0, 3) }"""
    picture = page.locator(".picture img").first
    picture.scroll_into_view_if_needed()
    colors = []
    for _ in range(2):
        colors.append(page.evaluate(corner, base64.b64encode(picture.screenshot()).decode()))
        page.keyboard.press("t")
    assert colors == [[255, 255, 255], [17, 20, 23]]
    page.close()


@pytest.mark.parametrize("name", ["02_setup", pytest.param("01_internals", marks=pytest.mark.slow)])
def test_on_paper_a_slide_is_a_page(book: Path, browser: Any, tmp_path: Path, name: str) -> None:
    page = browser.new_page(color_scheme="dark", viewport={"width": 1024, "height": 768})
    page.goto(f"file://{book}/slides/{name}.html")
    page.pdf(path=str(tmp_path / "slides.pdf"), prefer_css_page_size=True, print_background=True)
    printed = (tmp_path / "slides.pdf").read_bytes()
    boxes = re.findall(rb"/Type\s*/Page\b(?!s).*?/MediaBox\s*\[([^\]]*)\]", printed, re.DOTALL)
    assert len(boxes) == len(slides(book, name)) and set(boxes) == {b"0 0 960 540"}
    page.emulate_media(media="print", color_scheme="dark")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate(CUT_OFF) == []
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    page.close()
