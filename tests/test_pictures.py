"""The two pictures of chapter 1: what the stepper shows is an all-reduce, and the timeline tells what the ranks did."""

from __future__ import annotations

import itertools
import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.browser import faults

from lockstep import ranks
from lockstep.authoring import book as books
from lockstep.authoring import chapters, pictures
from lockstep.course import all_reduce
from lockstep.course.all_reduce import How, Move, Schedule, Step
from lockstep.notebook import stepper
from lockstep.notebook.stepper import Stepper
from lockstep.notebook.timeline import Timeline, timeline
from lockstep.ranks import timeline_picture

ROOT = Path(__file__).resolve().parents[1]
SVG = "{http://www.w3.org/2000/svg}"

each_size = pytest.mark.parametrize("size", range(2, stepper.LARGEST + 1))


def sums(schedule: Schedule, length: int) -> bool:
    """Does every rank end with the sum of what all brought?"""
    values = all_reduce.brought(schedule.ranks, length)
    expected = [sum(column) for column in zip(*values, strict=True)]
    return all(row == expected for row in all_reduce.states(schedule, values)[-1])


# The stepper's schedule ----------------------------------------------------------------------------------------------


@each_size
@pytest.mark.parametrize("make", [all_reduce.ring, all_reduce.naive])
def test_every_rank_ends_with_the_sum_at_every_length(make: Any, size: int) -> None:
    for length in (*stepper.LENGTHS, 0, 1, 7, 840):
        assert sums(make(size), length)


@each_size
def test_the_ring_makes_2_n_minus_1_steps_and_sends_2_n_minus_1_nths(size: int) -> None:
    plan, length = all_reduce.ring(size), 840  # which all sizes up to 8 divide
    assert len(plan.steps) == 2 * (size - 1)
    whole = length * all_reduce.NUMBER_BYTES
    assert all_reduce.bytes_sent(plan, length) == [2 * (size - 1) * whole // size] * size
    assert all_reduce.bytes_sent(all_reduce.naive(size), length) == [(size - 1) * whole] * size


@each_size
def test_in_a_ring_each_rank_sends_one_chunk_to_the_right_and_what_it_sends_is_there(size: int) -> None:
    plan = all_reduce.ring(size)
    held = all_reduce.states(plan, [[1] * plan.chunks for _ in range(size)])  # how many ranks' numbers a chunk holds
    for number, step in enumerate(plan.steps):
        assert sorted(move.sender for move in step.moves) == list(range(size))
        assert all(move.receiver == (move.sender + 1) % size for move in step.moves)
        for move in step.moves:
            count = held[number][move.sender][move.chunk]
            assert count == (number + 1 if move.how is How.ADD else size), (
                "partial sums grow by one; copies are complete"
            )


@each_size
def test_chunks_cover_the_tensor_and_differ_by_one_at_most(size: int) -> None:
    for length in range(20):
        ends = all_reduce.bounds(length, size)
        sizes = [end - begin for begin, end in itertools.pairwise(ends)]
        assert ends[0] == 0 and ends[-1] == length and max(sizes) - min(sizes) <= 1


def test_a_wrong_schedule_is_noticed() -> None:
    right = all_reduce.ring(4)
    short = Schedule("ring", 4, 4, right.steps[:-1])
    assert not sums(short, 8)
    first = right.steps[0]
    turned = tuple(Move(move.sender, move.receiver, (move.chunk + 1) % 4, move.how) for move in first.moves)
    assert not sums(Schedule("ring", 4, 4, (Step(first.phase, turned), *right.steps[1:])), 8)


def test_the_page_carries_the_schedule_and_nothing_that_changes_or_comes_from_elsewhere() -> None:
    page = Stepper().page()
    assert page == Stepper().page()
    assert not re.search(r"https?://(?!www\.w3\.org)|src=|@import|import\(", page)
    data = json.loads(re.search(r"getElementById\('stepper'\), (\{.*\})\);</script>", page)[1])  # type: ignore[index]
    for size in range(2, stepper.LARGEST + 1):
        moves = [[tuple(move[:3]) for move in step["moves"]] for step in data["schedules"][f"ring/{size}"]["steps"]]
        assert moves == [[(m.sender, m.receiver, m.chunk) for m in step.moves] for step in all_reduce.ring(size).steps]
    bundle = Stepper()._repr_mimebundle_()
    assert 'sandbox="allow-scripts"' in bundle["text/html"] and bundle["text/plain"] == repr(Stepper())
    with pytest.raises(ValueError, match="2 to 8"):
        Stepper(ranks=9)


def test_the_still_picture_shows_every_number_of_every_step() -> None:
    drawn = ElementTree.fromstring(pictures.all_reduce())
    shown = [int(text.text or "") for text in drawn.iter(f"{SVG}text") if text.get("class") == "n"]
    states = all_reduce.states(all_reduce.ring(4), all_reduce.brought(4, 8))
    assert shown == [number for state in states for row in state for number in row]


def test_the_page_in_a_browser_ends_with_the_same_numbers(browser: Any, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(Stepper().page(), encoding="utf-8")
    page = browser.new_page()
    errors = faults(page)
    page.goto(f"file://{tmp_path}/page.html")
    for size, length, way in ((4, 8, "ring"), (3, 5, "ring"), (8, 3, "ring"), (5, 12, "naive")):
        for place, value in enumerate((size, length, way)):
            page.locator("select").nth(place).select_option(str(value))
        plan = all_reduce.ring(size) if way == "ring" else all_reduce.naive(size)
        states = all_reduce.states(plan, all_reduce.brought(size, length))
        page.locator("#stepper").focus()
        for step in range(len(plan.steps)):
            assert table(page) == states[step], (size, length, way, step)
            page.keyboard.press("ArrowRight")
        assert table(page) == states[-1]
        page.keyboard.press("ArrowLeft")
        assert table(page) == states[-2]
        page.keyboard.press("Home")
        assert table(page) == states[0]
    assert errors == []


def test_it_asks_first_then_plays_and_nothing_jumps_or_loses_the_focus(browser: Any, tmp_path: Path) -> None:
    shown = f"<!doctype html><meta charset=utf-8>{Stepper()._repr_mimebundle_()['text/html']}<p>below"
    (tmp_path / "page.html").write_text(shown, encoding="utf-8")
    plan = all_reduce.ring(4)
    for width in (780, 390):
        page = browser.new_page(viewport={"width": width, "height": 900}, reduced_motion="no-preference")
        errors = faults(page)
        page.goto(f"file://{tmp_path}/page.html")
        frame = page.frame_locator("iframe:visible")
        inside = page.locator("iframe:visible").element_handle().content_frame()
        assert frame.get_by_role("group", name="Where does chunk 1 end?").is_visible()
        frame.get_by_role("button", name="rank 2", exact=True).click()
        # As high as what is in it, whatever the caption says.
        page.wait_for_function("document.querySelector('iframe').style.height")
        places = "() => [document.body.scrollHeight, document.querySelector('table').getBoundingClientRect().top]"
        fits, top = inside.evaluate(places)
        assert 0 <= page.locator("iframe:visible").bounding_box()["height"] - fits <= 1
        forward = frame.get_by_label("one step forward")
        for number in range(1, len(plan.steps) + 1):
            forward.press("Enter")
            assert frame.get_by_role("status").inner_text().startswith(f"Step {number} of 6")
            high, table_top = inside.evaluate(places)
            assert table_top == pytest.approx(top, abs=1) and (high == fits or width == 390)
            said = frame.get_by_role("status").inner_text()
            assert ("Chunk 1 is now complete on rank 0." in said) == (number == 3)
            wrong = "✗ Not on rank 2: chunk 1 was complete first on rank 0, after step 3."
            assert frame.locator(".verdict").inner_text() == (wrong if number >= 3 else "")
        assert forward.get_attribute("aria-disabled") == "true"
        assert forward.evaluate("one => one === document.activeElement")
        assert inside.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert (
            frame.locator("td.fresh").count() == 4
            and table(inside) == all_reduce.states(plan, all_reduce.brought(4, 8))[-1]
        )
        frame.get_by_role("button", name="Play").click()  # again from the beginning
        frame.locator(".flies").first.wait_for(state="detached")
        frame.get_by_role("button", name="Play").wait_for()
        assert frame.get_by_role("status").inner_text().startswith("Step 6 of 6")
        assert errors == []
        page.close()


def test_a_phone_shows_no_hole_and_no_keys(browser: Any, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(f"<meta name=viewport content=width=device-width>{Stepper().page()}")
    context = browser.new_context(viewport={"width": 390, "height": 900}, has_touch=True, is_mobile=True)
    page = context.new_page()
    page.goto(f"file://{tmp_path}/page.html")
    above, below = page.get_by_role("button", name="rank 3").bounding_box(), page.locator(".play").bounding_box()
    assert 0 < below["y"] - above["y"] - above["height"] < 20
    said, drawn = page.locator(".said").bounding_box(), page.locator(".field").bounding_box()
    below = page.locator(".key").bounding_box()
    assert drawn["y"] + drawn["height"] <= said["y"] and 0 < below["y"] - said["y"] - said["height"] < 20
    asked = page.locator(".question").bounding_box()
    assert "Home End" not in page.locator("#stepper").inner_text()
    page.get_by_role("button", name="rank 0", exact=True).click()
    page.get_by_label("to the end").click()
    for guess in ("rank 0", "rank 3"):
        page.get_by_role("button", name=guess, exact=True).click()
        verdict = page.locator(".verdict").bounding_box()
        assert (verdict["x"], verdict["y"]) == (asked["x"], asked["y"]) and verdict["height"] <= asked["height"]
    assert page.locator(".question").is_hidden() and page.locator(".field").bounding_box()["y"] == drawn["y"]
    assert page.locator(".rule").is_visible()
    for width in (390, 312):  # a phone; beside JupyterLab's file browser in a window of 700 px
        page.set_viewport_size({"width": width, "height": 900})
        assert page.locator(".field").evaluate("one => one.scrollWidth <= one.clientWidth"), "nothing to scroll"
    context.close()


def test_it_says_in_plain_words_what_each_rank_holds_and_sends(browser: Any, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(Stepper().page(), encoding="utf-8")
    page = browser.new_page()
    page.goto(f"file://{tmp_path}/page.html")
    status = page.get_by_role("status")
    assert status.inner_text() == "Before step 1 of 6: each rank holds its own numbers."
    text = page.locator("body").inner_text()
    assert "a sum over some ranks" in text and "Method" in text
    assert "a rank sends up to 48 bytes (1.50 × the tensor) in the ring, and 96 bytes (3.00 × the tensor) if" in text
    page.get_by_role("button", name="rank 0", exact=True).click()
    forward = page.get_by_label("one step forward")
    for _ in range(3):
        forward.click()
    assert "which adds it to its own. Chunk 1 is now complete on rank 0." in status.inner_text()
    forward.click()
    assert "which replaces its own chunk with it." in status.inner_text()
    page.get_by_label("Method").select_option("naive")
    forward.click()
    said = "Step 1 of 3, every rank to every rank: all ranks send at once. Rank 0 sends all its own numbers"
    assert status.inner_text().startswith(said)
    assert not re.search("everybody|brought", page.locator("body").inner_text())


def test_the_verdict_stays_for_every_choice_until_there_is_another_question(browser: Any, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(Stepper().page(), encoding="utf-8")
    page = browser.new_page()
    page.goto(f"file://{tmp_path}/page.html")
    verdict, first, asked = (
        page.locator(".verdict"),
        "hunk 1 was complete first on rank 0, after step 3.",
        page.locator(".asks"),
    )
    assert verdict.get_attribute("aria-live") == "polite" and verdict.text_content() == ""
    page.get_by_label("to the end").click()
    assert verdict.text_content() == f"C{first}"
    page.get_by_role("button", name="rank 3", exact=True).click()  # the wrong one, chosen afterward
    assert verdict.text_content() == f"✗ Not on rank 3: c{first}" and "wrong" in str(asked.get_attribute("class"))
    page.get_by_label("to the beginning").click()
    page.get_by_role("button", name="rank 0", exact=True).click()
    assert verdict.text_content() == f"✓ Right: c{first}" and "right" in str(asked.get_attribute("class"))
    assert page.locator(".key").inner_text().endswith("just arrivedyour choiceKeys: ← → Home End")
    rule = page.locator(".rule")
    assert rule.is_visible() and (rule.text_content() or "").startswith(
        "The rule: chunk 1 starts on rank 1 and moves to the next rank in each step."
    )
    assert "after 3 steps the chunk holds all 4 ranks' numbers" in (rule.text_content() or "")
    page.get_by_label("Ranks").select_option("5")
    assert rule.is_hidden() and "after 4 steps" in (rule.text_content() or ""), "no answer before the question"
    assert verdict.text_content() == "" and asked.get_attribute("class") == "row asks"
    page.get_by_label("Method").select_option("naive")  # no chunks
    assert asked.is_hidden() and "your choice" not in page.locator(".key").inner_text()


def test_a_step_moves_its_chunks_unless_motion_is_unwanted(browser: Any, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(Stepper().page(), encoding="utf-8")
    watch = """() => { window.flown = []; new MutationObserver((all) => all.forEach((one) => one.addedNodes.forEach(
      (node) => node.classList?.contains("flies") && flown.push([...node.children].map((one) => Number(one.innerText))))))
      .observe(document.querySelector(".field"), { childList: true }) }"""
    for wish in ("no-preference", "reduce"):
        page = browser.new_page(reduced_motion=wish)
        page.goto(f"file://{tmp_path}/page.html")
        page.evaluate(watch)
        page.get_by_label("one step forward").click()
        page.locator("td.fresh").first.wait_for()
        own = all_reduce.brought(4, 8)
        sent = [own[move.sender][2 * move.chunk : 2 * move.chunk + 2] for move in all_reduce.ring(4).steps[0].moves]
        assert page.evaluate("flown") == (sent if wish == "no-preference" else [])
        page.wait_for_function("!document.querySelector('.ghost')")
        assert page.locator("path[marker-end]").count() == 4
        page.close()


def table(page: Any) -> list[list[int]]:
    """The numbers on the page, row by row."""
    rows = page.eval_on_selector_all(
        "tbody tr", "rows => rows.map(row => [...row.querySelectorAll('span')].map(s => s.innerText))"
    )
    return [[int(text) for text in row if text != "–"] for row in rows]


# The still pictures --------------------------------------------------------------------------------------------------


def test_the_still_pictures_are_up_to_date_and_each_is_shown_in_a_chapter() -> None:
    told = "\n".join(file.read_text(encoding="utf-8") for file in (ROOT / "chapters" / "source").glob("*.py"))
    for name, draw in pictures.PICTURES.items():
        stored = (ROOT / "chapters" / "pictures" / f"{name}.svg").read_text(encoding="utf-8")
        assert stored == draw(), "run: python -m lockstep.authoring.pictures chapters/pictures"
        ElementTree.fromstring(stored)
        assert re.search(rf"!\[[^\]]{{30,}}\]\(pictures/{name}\.svg\)", told), f"{name} is shown, and said in words"


def test_they_are_drawn_from_what_they_are_about() -> None:
    assert pictures.dealt(10, 4, shuffle=False) == [[0, 4, 8], [1, 5, 9], [2, 6, 0], [3, 7, 1]]
    ours, theirs = pictures.replicas()
    assert ours[:5] == theirs[:5] and all(one != other for one, other in zip(ours[5:], theirs[5:], strict=True))
    assert pictures.torn(pictures.in_place) == ["–"] * 10 + ["2"]
    assert pictures.torn(pictures.replace) == ["1"] * 10 + ["2"]
    assert pictures.sent([1, 2, 2], 0.5) == [(1, 1.5), (2, 2.5), (2.5, 3)]


def test_no_text_of_a_still_picture_is_cut_off_or_covers_another(browser: Any) -> None:
    boxes = """() => [...document.querySelectorAll("text")].map((text) => {
      const { left, right, top, bottom } = text.getBoundingClientRect();
      return [text.textContent, left, right, top + 3, bottom - 3] })"""
    page = browser.new_page(viewport={"width": 800, "height": 400})
    for name in pictures.PICTURES:
        page.set_content((ROOT / "chapters" / "pictures" / f"{name}.svg").read_text(encoding="utf-8"))
        left, right = page.evaluate(
            "(({ left, right }) => [left, right])(document.querySelector('svg').getBoundingClientRect())"
        )
        shown = page.evaluate(boxes)
        assert [one[0] for one in shown if one[1] < left or one[2] > right] == [], name
        over = [
            (one[0], two[0])
            for one, two in itertools.combinations(shown, 2)
            if one[1] < two[2] and two[1] < one[2] and one[3] < two[4] and two[3] < one[4]
        ]
        assert over == [], name


def test_before_and_after_are_beside_each_other_on_a_phone() -> None:
    """`PHONE` is how wide a picture may be that the book shrinks to a phone's width."""
    drawn = [text for file in (ROOT / "chapters/pictures").glob("*.svg") if ">before<" in (text := file.read_text())]
    assert len(drawn) == 5 and all(int(books.WIDE.findall(text)[0]) <= books.PHONE for text in drawn)


def test_no_chapter_tells_by_dark_and_light_what_a_dark_theme_turns_round() -> None:
    for file in (ROOT / "chapters/source").glob("*.py"):
        assert not re.findall(r"\b(?:dark|light|pale|bright)(?:er)?\b", file.read_text(encoding="utf-8")), file.name


# The timeline --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run() -> ranks.Run:
    return ranks.run(ranks.Script(str(ROOT / "chapters" / "four_ranks.py")), world_size=2, timeline=True)


def test_a_real_run_has_the_right_order(run: ranks.Run) -> None:
    panel = timeline(run).panels[0]
    assert [len(step) for step in panel.steps] == [2, 2]
    for number, step in enumerate(panel.steps):
        for one in step:
            assert [phase.name for phase in one.phases] == ["forward", "backward"]
            assert [name for name, _ in one.gradients][:2] == ["11.bias", "11.weight"] and len(one.gradients) == 24
            assert [bucket.nbytes for bucket in one.buckets] == ([3158016], [1052672, 2105344])[number]
            assert [bucket.early for bucket in one.buckets] == ([False], [True, False])[number]
            for bucket in one.buckets:
                assert bucket.ready is not None and bucket.ready <= bucket.launch <= bucket.end
            assert one.gradients[-1][1] <= one.buckets[-1].launch, "the last bucket is never hidden"


def test_its_text_carries_no_times_and_its_picture_is_well_formed(run: ranks.Run) -> None:
    picture = timeline(run, run, titles=("one", "two <&>"), step=-1)
    assert repr(picture).splitlines()[0] == (
        "Timeline(one, 2 ranks; step 1: 2 all-reduces, 1 launched before the last gradient was ready)"
    )
    drawn = ElementTree.fromstring(timeline_picture.picture(picture))
    said = [bar.get("aria-label") or "" for bar in drawn.iter(f"{SVG}g") if bar.get("tabindex") == "0"]
    assert sum("(all_reduce)" in one for one in said) == 2 * 2 * 2  # panels, ranks, buckets
    edge = float((drawn.get("viewBox") or "").split()[2])
    for rect in drawn.iter(f"{SVG}rect"):
        left, width = float(rect.get("x") or 0), float(rect.get("width") or 0)
        assert left >= 0 and left + width <= edge + 0.2


def test_two_runs_compare_as_equal_and_another_schedule_does_not(run: ranks.Run) -> None:
    again = ranks.run(ranks.Script(str(ROOT / "chapters" / "four_ranks.py")), world_size=2, timeline=True)
    same = chapters.rules()
    first, second = timeline(run)._repr_mimebundle_(), timeline(again)._repr_mimebundle_()
    assert first["text/html"] != second["text/html"]
    assert {key: same(text) for key, text in first.items()} == {key: same(text) for key, text in second.items()}
    assert repr(timeline(run, step=0)) != repr(timeline(run, step=1))


def test_the_trace_is_what_perfetto_reads(run: ranks.Run, tmp_path: Path) -> None:
    timeline(run, run, titles=("a", "b")).save_trace(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert check_trace(trace) == []
    events = trace["traceEvents"]
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {
        "a rank 0", "a rank 1", "b rank 0", "b rank 1"
    }  # fmt: skip
    assert sum(event["name"] == "all_reduce" for event in events) == 2 * 2 * 3
    assert sum(event["name"].startswith("ready ") for event in events) == 2 * 2 * 2 * 24


def test_a_collective_that_lasts_into_the_next_step_has_a_line_for_itself(run: ranks.Run) -> None:
    """Under load, the end of a step's last all-reduce is noticed after the next step's first collective has begun."""
    panel = timeline(run).panels[0]
    (first, other), (second, another) = panel.steps
    late = replace(first.collectives[-1], end=second.collectives[0].end + 1.0)
    first = replace(first, collectives=(*first.collectives[:-1], late))
    panel = replace(panel, steps=((first, other), (second, another)))
    assert check_trace(Timeline((panel,)).trace()) == []
    assert panel.lanes(0)[1][0] != panel.lanes(0)[0][-1]


def check_trace(trace: dict[str, Any]) -> list[str]:
    """What is wrong with a trace, by the fields that the format asks for."""
    faults = []
    for event in trace["traceEvents"]:
        for field, kinds in (("ph", str), ("name", str), ("pid", int), ("tid", int), ("ts", (int, float))):
            if not isinstance(event.get(field), kinds):
                faults.append(f"{field} of {event}")
        if event.get("ph") not in ("X", "i", "M") or event.get("ts", 0) < 0:
            faults.append(f"ph or ts of {event}")
        if event.get("ph") == "X" and not event.get("dur", -1) >= 0:
            faults.append(f"dur of {event}")
        if event.get("ph") == "i" and event.get("s") not in ("t", "p", "g"):
            faults.append(f"scope of {event}")
    busy: dict[tuple[Any, Any], float] = {}
    for event in sorted((e for e in trace["traceEvents"] if e.get("ph") == "X"), key=lambda e: e.get("ts", 0)):
        line = event.get("pid"), event.get("tid")
        if event.get("ts", 0) < busy.get(line, 0) - 0.01:
            faults.append(f"overlaps on its own line: {event}")
        busy[line] = max(busy.get(line, 0), event.get("ts", 0) + event.get("dur", 0))
    return faults


def test_the_check_of_traces_notices_what_is_missing(run: ranks.Run) -> None:
    for field in ("ph", "ts", "pid", "tid", "dur"):
        trace = timeline(run).trace()
        del next(event for event in trace["traceEvents"] if event["ph"] == "X")[field]
        assert check_trace(trace) != []


def test_what_cannot_be_drawn_says_what_is_missing(run: ranks.Run) -> None:
    body = 'import torch.distributed as d, torch\nfrom lockstep.ranks import mark\nd.init_process_group("gloo")\n{}'
    step = 'mark("forward"); d.all_reduce(torch.ones(2)); {}'

    def ran(text: str, ends: bool = True) -> Any:
        return ranks.run(ranks.Source(body.format(text)), 2, timeline=ends)

    with pytest.raises(ValueError, match="no step to draw"):
        timeline(ran("d.barrier()"))
    with pytest.raises(ValueError, match='no mark\\("end"\\)'):
        timeline(ran(step.format("")))
    with pytest.raises(ValueError, match="--timeline"):
        timeline(ran(step.format('mark("end")'), ends=False))
    with pytest.raises(ValueError, match="no run to draw"):
        timeline(None)
    assert [panel.title for panel in timeline(run, None, titles=("made", "not made")).panels] == ["made"]
    with pytest.raises(ValueError, match="titles"):
        timeline(run, run, titles=("one",))
    after = timeline(ran(step.format('mark("end"); d.all_reduce(torch.ones(2))')))
    assert (
        isinstance(after, Timeline) and len(after.panels[0].steps[0][0].buckets) == 1
    )  # what comes after is no step's


def test_bars_are_as_long_as_their_values_and_take_no_markup() -> None:
    from lockstep.notebook.bars import bars

    html = bars({"one": 1.0, "half <b>": 0.5, "none": 0.0}, unit="s", title="a & b").body
    one, half, none = (float(width) for width in re.findall(r'<i style="width: ([\d.]+)%', html))
    assert (one, half, none) == (100, 50, 0)
    assert "<b>" not in html and "half &lt;b&gt;" in html and "a &amp; b" in html
    assert 'data-measured=""' in html  # what comparisons of outputs look past
    assert "nan" not in bars({"nothing": 0.0}).body
    shown = re.findall(r"<span>([\d.]+) ", bars({"a": 62.31, "b": 3.734, "c": 56.0}, unit="MB/s").body)
    assert shown == ["62.3", "3.7", "56.0"], "all with as many decimals"
    for wrong in ({}, {"x": -1.0}):
        with pytest.raises(ValueError):
            bars(wrong)


def test_stacked_bars_have_a_part_for_each_value_and_a_table_as_text() -> None:
    from lockstep.notebook.bars import stacked

    picture = stacked({"DDP": {"a <b>": 2.0, "c": 1.0}, "half": {"c": 0.5}}, unit="MB", title="each rank")
    html = picture.body
    parts = re.findall(r'<i style="width: ([\d.]+)%; background-color: (#\w+)" title="(.*?): ([\d.]+) MB"', html)
    assert [(float(width), name, number) for width, _, name, number in parts] == [
        (66.67, "a &lt;b&gt;", "2.00"), (33.33, "c", "1.00"), (16.67, "c", "0.50"),
    ]  # fmt: skip
    assert parts[1][1] == parts[2][1], "a part has one color"
    keys = re.findall(r'<i style="background-color: (#\w+)"></i>(.*?)</span>', html)
    assert keys == [(color, name) for _, color, name, _ in parts[:2]] and keys[0][0] != keys[1][0]
    assert re.findall(r"<span>(<span class=\"ls-parts\">.*?</span>)?([\d.]+) MB</span>", html) == [
        ('<span class="ls-parts">2.00 + 1.00 = </span>', "3.00"), ("", "0.50"),
    ], "no number is left out for want of room"  # fmt: skip
    assert 'data-measured=""' in html
    assert [line.split() for line in repr(picture).splitlines()[1:]] == [
        ["DDP", "2.0", "1.0", "MB"],
        ["half", "0.0", "0.5", "MB"],
    ]
    assert repr(stacked({"DDP": {"a": 2.0}}, timed=True)) == "Stacked(DDP)"
    for wrong in ({}, {"x": {}}, {"x": {"a": -1.0}}, {"x": dict.fromkeys("abcdefg", 1.0)}):
        with pytest.raises(ValueError):
            stacked(wrong)


def test_what_was_predicted_is_a_tick_over_the_bar_of_what_was_measured() -> None:
    from lockstep.notebook.bars import compared

    html = compared({"one <b>": (80.0, 100.0), "two": (33.3, 30.0)}, unit="ms", title="a step").body
    assert re.findall(r'<i style="width: ([\d.]+)%', html) == ["80.00", "33.30"]
    assert re.findall(r'<u style="left: ([\d.]+)%', html) == ["100.00", "30.00"]
    cells = re.findall(r'<td data-name="(\w+)">(.*?)</td>', html)
    assert cells == [("measured", "80 ms"), ("predicted", "100 ms"), ("error", "-20%"),
                     ("measured", "33 ms"), ("predicted", "30 ms"), ("error", "+11%")]  # fmt: skip
    assert "<b>" not in html and 'data-measured=""' in html
    assert "never" in compared({"never": (1.0, 0.0)}).body
    for wrong in ({}, {"x": (-1.0, 1.0)}):
        with pytest.raises(ValueError):
            compared(wrong)
