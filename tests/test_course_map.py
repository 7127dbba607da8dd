"""Where a learner stands: what counts, where "here" is, and that a chapter is complete when its reader says so."""

from __future__ import annotations

import asyncio
import html
import json
import re
import shutil
import subprocess
import threading
from pathlib import Path

import nbformat
import pytest
from IPython.core.error import UsageError

from lockstep.commands.lab import first_page, start_page
from lockstep.commands.terminal import show_next, show_status
from lockstep.course import Course, CourseError, hints, progress
from lockstep.course.copies import chapter_file, set_aside
from lockstep.course.outline import outlines
from lockstep.course.standing import mark, next_up, standing
from lockstep.grading.verdict import CheckOutcome, CheckResult, ExerciseResult, Report
from lockstep.notebook.course_map import CourseMap, course_map
from lockstep.notebook.exercise import ExerciseMagics

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def course(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Course:
    """A learner's copy: contents, checks, chapters."""
    shutil.copytree(ROOT / "autograder", tmp_path / "autograder")
    (tmp_path / "chapters").mkdir()
    for notebook in (ROOT / "chapters").glob("*.ipynb"):
        shutil.copy(notebook, tmp_path / "chapters")
    monkeypatch.setenv("LOCKSTEP_COURSE", str(tmp_path))
    return Course(tmp_path)


def shown(box: CourseMap) -> str:
    """The map's words."""
    (output,) = box._map.outputs
    text = re.sub(r"<[^>]+>", " ", re.sub(r"<style>.*?</style>", "", output["data"]["text/html"], flags=re.DOTALL))
    return " ".join(text.split())


def targets(box: CourseMap) -> dict[str, str]:
    """The map's links, by their words."""
    return {words: html.unescape(target) for target, words in re.findall(r'<a href="([^"]+)">([^<]+)</a>', box.html)}


def test_every_question_and_exercise_has_one_place_in_the_course(course: Course) -> None:
    for chapter, outline in zip(course.chapters, outlines(course), strict=True):
        placed = [name for section in outline.sections for name in section.exercises]
        assert sorted(placed) == sorted(chapter.exercises), "each once"
        asked = re.findall(r'"quiz\(\\"(.+?)\\"\)', course.root.joinpath(f"chapters/{chapter.name}.ipynb").read_text())
        assert list(outline.quizzes) == asked and len(set(asked)) == len(asked) > 3


def answer(course: Course, question: str, given: str) -> None:
    """As a learner answers a quiz."""
    with progress.change(course) as known:
        known.quizzes[question] = given


def test_the_next_chapter_has_one_link(course: Course) -> None:
    mark(course, "01_internals", complete=True)
    assert [words for words in targets(course_map("01_internals")) if "chapter" in words] == [
        "Next: chapter 2, “Setting up: from one process to many”"
    ]


def test_the_best_try_of_an_exercise_is_on_the_map(course: Course) -> None:
    progress.record(course, "setup_ddp", 3, 8)
    progress.record(course, "setup_ddp", 1, 8)
    assert ";3 of 8 checks passed " in shown(course_map("02_setup"))
    progress.record(course, "setup_ddp", 8, 8)
    assert "checks passed" not in shown(course_map("02_setup"))


def test_a_section_is_done_when_all_it_asks_is(course: Course) -> None:
    assert standing(course).here is None
    answer(course, "02_setup/local_rank", "right")
    answer(course, "02_setup/environment", "wrong")
    now = standing(course)
    launchers = next(one for one in now.chapters[1].sections if one.section.title == "Launchers and the environment")
    assert (launchers.done, launchers.of, launchers.is_done) == (1, 2, False)
    assert now.here == ("02_setup", "Launchers and the environment")
    answer(course, "02_setup/environment", "right")
    now = standing(course)
    assert (now.chapters[1].answered, now.chapters[1].passed, now.chapters[0].answered) == (2, 0, 0)
    assert now.here == ("02_setup", "The process group")


def test_an_exercise_counts_when_it_has_passed(course: Course) -> None:
    progress.record(course, "setup_ddp", 5, 8)
    assert standing(course).here == ("02_setup", "Exercise: implement setup_ddp")
    progress.record(course, "setup_ddp", 8, 8)
    now = standing(course)
    assert now.chapters[1].passed == 1 and now.here == ("02_setup", "Sharding")


def coming(course: Course, after: str) -> str:
    """What is said to come next."""
    up = next_up(course, after)
    return up.said("%check") if up else ""


def test_a_pass_says_what_is_next(course: Course) -> None:
    """In reading order, what is not done; at the end, what was left out before."""
    progress.record(course, "setup_ddp", 8, 8)
    assert coming(course, "setup_ddp") == 'Next: chapter 2, "Sharding" · then train_ddp: %check train_ddp'
    for question in outlines(course)[1].quizzes:
        answer(course, question, "right")
    train = 'Next: train_ddp, chapter 2, "Exercise: implement train_ddp" · %check train_ddp'
    assert coming(course, "setup_ddp") == train
    progress.record(course, "train_ddp", 3, 4)
    assert coming(course, "setup_ddp") == train, "a try is no pass"
    answer(course, "02_setup/set_epoch", "wrong")
    assert coming(course, "setup_ddp").startswith('Next: chapter 2, "Sharding" · then train_ddp')
    mark(course, "02_setup", complete=True)
    assert coming(course, "setup_ddp").startswith("Next: chapter 3, ")
    for chapter in course.chapters[1:]:
        mark(course, chapter.name, complete=True)
    first = outlines(course)[0]
    assert coming(course, "setup_ddp").startswith('Next: chapter 1, "')
    mark(course, first.name, complete=True)
    assert coming(course, "setup_ddp") == "" and coming(course, "nothing") == ""


def test_the_question_of_the_same_section_is_called_so(course: Course) -> None:
    section = next(one for one in outlines(course)[0].sections if one.exercises and one.quizzes)
    for name in section.exercises:
        progress.record(course, name, 1, 1)
    said = coming(course, section.exercises[-1])
    assert said.startswith(f'Next: the question in chapter 1, "{section.title}" · then ')


def test_a_terminal_says_what_is_next_after_a_pass_alone(course: Course, capsys: pytest.CaptureFixture[str]) -> None:
    for outcome in (CheckOutcome.FAILED, CheckOutcome.PASSED):
        result = ExerciseResult("setup_ddp", (CheckResult("joins", "joins", outcome),))
        show_next(course, Report(0, (result,)))
        said = " ".join(capsys.readouterr().out.split())
        after = 'Next: chapter 2, "Sharding" · then train_ddp: ./lockstep check train_ddp'
        assert said == ("" if outcome is CheckOutcome.FAILED else after)
    (course.root / "solutions").mkdir()
    (course.root / "solutions" / "setup_ddp.py").touch()
    show_next(course, Report(0, (result,)))
    assert capsys.readouterr().out.endswith("\nTo compare: ./lockstep solution setup_ddp\n")


def test_a_chapter_marked_as_complete_is_behind_the_reader(course: Course) -> None:
    answer(course, "01_internals/dp_or_ddp", "wrong")
    mark(course, "01_internals", complete=True)
    assert standing(course).here == ("02_setup", "Where we start")
    mark(course, "01_internals", complete=False)
    assert standing(course).here == ("01_internals", "Two ways to use several GPUs")
    for chapter in course.chapters:
        mark(course, chapter.name, complete=True)
    assert standing(course).here is None
    with pytest.raises(CourseError, match=r"no chapter '06_more'.*01_internals"):
        mark(course, "06_more", complete=True)


def test_the_box_marks_refreshes_and_keeps(course: Course) -> None:
    box = course_map("02_setup")
    assert "exercises 0 of 3" in shown(box)
    box._complete.value = True
    assert progress.load(course).chapters == {"02_setup": "complete"} and "complete" in shown(box)
    answer(course, "01_internals/dp_or_ddp", "wrong")
    box._refresh.click()
    assert re.search(r"How DDP works inside about \d+ minutes · questions 0 of \d+ ", shown(box))
    assert course_map("02_setup")._complete.value is True
    box._complete.value = False
    assert course_map("02_setup")._complete.value is False
    assert "you are here" in shown(course_map()) and "Two ways to use several GPUs" in shown(course_map())
    with pytest.raises(CourseError, match="no chapter '2'"):
        course_map("2")


def test_its_marks_are_explained(course: Course) -> None:
    told = shown(course_map()).replace("\xa0", " ").replace("&nbsp;", " ")
    assert "✓ all questions answered and exercises passed · ◐ some · ○ none yet" in told


def test_a_refresh_without_news_leaves_what_is_unfolded(course: Course) -> None:
    box = course_map()
    before = box._map.outputs
    box._refresh.click()
    assert box._map.outputs is before
    answer(course, "01_internals/dp_or_ddp", "wrong")
    box._refresh.click()
    assert box._map.outputs is not before and "Continue" in shown(box)


def test_one_chapter_is_unfolded(course: Course) -> None:
    answer(course, "01_internals/dp_or_ddp", "wrong")
    for box, title in ((course_map("02_setup"), course.chapters[1].title), (course_map(), course.chapters[0].title)):
        (opened,) = re.findall(r"<details open>.*?</summary>", box.html)
        assert title in opened and box.html.count("<details>") == len(course.chapters) - 1


def test_its_links_lead_to_every_section_and_exercise_as_seen_from_here(
    course: Course, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(course.root / "chapters")
    (course.root / "exercises").mkdir()
    (course.root / "exercises" / "setup_ddp.py").touch()
    found = targets(course_map())
    assert found["Is it the gradient of the joined batch?"] == (
        "01_internals.ipynb#Is-it-the-gradient-of-the-joined-batch?"
    )
    assert found["setup_ddp.py"] == "../exercises/setup_ddp.py" and "train_ddp.py" not in found, "it is not there"
    headings = {
        chapter.name: {
            re.sub(r"^#+ +", "", line).strip().replace("`", "").replace(" ", "-")
            for cell in json.loads((course.root / "chapters" / f"{chapter.name}.ipynb").read_text())["cells"]
            for line in "".join(cell["source"]).splitlines()
            if cell["cell_type"] == "markdown" and line.startswith("#")
        }
        for chapter in course.chapters
    }
    led = [target.split("#") for target in found.values() if "#" in target]
    assert len(led) > 50
    for page, anchor in led:
        assert anchor in headings[page.removesuffix(".ipynb")], (page, anchor)


def test_chapters_and_exercises_say_how_long_they_take(course: Course) -> None:
    chapter = standing(course).chapters[0].outline
    efforts = {section.title: section.effort for section in chapter.sections if section.effort}
    assert chapter.minutes and len(efforts) >= 3
    page = course_map().html
    assert f"<small>about {chapter.minutes} · questions 0 of " in page
    for effort in efforts.values():
        assert f"<small>{effort.lower()}" in page, effort


def test_the_first_link_says_where_to_go_on(course: Course) -> None:
    assert shown(course_map()).startswith(f"Begin: chapter 1, “{course.chapters[0].title}”")
    answer(course, "02_setup/set_epoch", "right")
    assert shown(course_map("03_debugging")).split(" Continue: ")[1].startswith("chapter 2, “Sharding”")
    for chapter in course.chapters:
        mark(course, chapter.name, complete=True)
    assert shown(course_map()).startswith("1 How DDP works inside")


def test_a_chapters_end_leads_to_the_next_chapter(course: Course, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a kernel and after a run, from the folder of the chapters and from that of the learner's copies."""
    chapters = course.root / "chapters"
    (chapters / "mine").mkdir()
    title = f"Next: chapter 2, “{course.chapters[1].title}”"
    for folder, path in ((chapters, "02_setup.ipynb"), (chapters / "mine", "../02_setup.ipynb")):
        monkeypatch.chdir(folder)
        first = course_map("01_internals")
        link = f'<div class="ls-map"><p><a href="{path}">{title}</a></p>'
        assert link in first.html and link in first.stored_html()
        assert first.stored_markdown().startswith(f"[{title}]({path})\n\n1. How DDP")
    answer(course, "01_internals/dp_or_ddp", "wrong")
    said = shown(course_map("01_internals"))
    assert said.startswith("Continue: chapter 1, “Two ways") and said.partition("”")[2].startswith(f" {title}")
    last = course_map("06_beyond_ddp")
    assert shown(last).startswith("Continue: chapter 1") and last.stored_markdown().startswith("1. How DDP")


def test_a_map_of_another_page_hides_no_chapters_end(course: Course) -> None:
    """All pages of JupyterLab are one document: what hides a stored map is the same map, alive."""
    hiding = [
        re.findall(r"body:has\((\S+?)\)", course_map(one)._repr_mimebundle_()["text/html"])
        for one in ("", "01_internals")
    ]
    assert hiding == [[".lockstep-live-map-"], [".lockstep-live-map-01_internals"]]


def test_a_chapters_bar_says_how_much_is_done(course: Course) -> None:
    answer(course, "02_setup/set_epoch", "right")
    progress.record(course, "setup_ddp", 8, 8)
    bars = re.findall(r'<progress value="(\d+)" max="(\d+)" aria-label="([^"]+)"', course_map().html)
    of = standing(course).chapters[1].questions + len(course.chapters[1].exercises)
    assert bars[1] == ("2", str(of), f"done in this chapter: 2 of {of}") and bars[0][0] == "0"


def test_a_section_says_of_what_it_counts(course: Course) -> None:
    course.exercises.mkdir()
    (course.exercises / "mini_ddp.py").touch()
    said = course_map().html
    assert re.search(r'Build it yourself</a><small>[^·]*? ·&nbsp;0 of 2[^·]* ·&nbsp;<a href="[^"]*mini_ddp.py"', said)
    assert re.search(r"Build it yourself</a><small>.*? ·&nbsp;0 of 2 questions and exercises done", said)
    assert re.search(r"Two ways to use several GPUs</a><small>0 of 3 questions answered</small>", said)


def test_what_is_stored_is_the_same_for_every_learner(course: Course) -> None:
    def stored() -> dict[str, str]:
        bundle = course_map("02_setup")._repr_mimebundle_()
        return {kind: bundle[kind] for kind in ("text/plain", "text/markdown")}

    before = stored()
    assert before["text/plain"] == "CourseMap(02_setup)" and "1. How DDP works inside" in before["text/markdown"]
    mark(course, "02_setup", complete=True)
    assert stored() == before


def test_a_terminal_shows_the_same(course: Course, capsys: pytest.CaptureFixture[str]) -> None:
    mark(course, "01_internals", complete=True)
    show_status(course)
    lines = capsys.readouterr().out.splitlines()
    of = len(course.chapters[0].exercises)
    assert lines[0] == "You are in chapter 2, “Where we start”."
    assert re.match(rf"✓ 1 How DDP works inside +questions 0/\d+  exercises 0/{of}", lines[2])
    assert lines[3] == "      ○  average_gradients, ring_all_reduce, mini_ddp"
    cases = sum("/" in name for name in course.names)
    assert f"      ○  find_divergence, device_report, preflight, clinic ({cases})" in lines, "not a line for each"
    joined = " ".join(lines[-2:]).strip()
    assert joined.startswith('Next: chapter 2, "Where we start"'), "it goes on from that chapter"
    assert joined.endswith("then setup_ddp: ./lockstep check setup_ddp")
    assert hints.take_hint(course, "average_gradients")[0][-1].startswith("**Where to start**"), "it is no heading"
    here = standing(course).here
    hints.take_hint(course, "checkpoint")
    assert here is not None and standing(course).here == here, "a hint is no try: who takes one may be looking ahead"


def test_a_terminal_says_how_to_start(course: Course, capsys: pytest.CaptureFixture[str]) -> None:
    show_status(course)
    assert capsys.readouterr().out.splitlines()[-1] == "Start with ./lockstep lab: it opens the first chapter."


def test_a_broken_chapter_is_named(course: Course) -> None:
    (course.root / "chapters" / "02_setup.ipynb").write_text(json.dumps({"no": "cells"}))
    assert next_up(course, "setup_ddp") is None
    with pytest.raises(CourseError, match=r"02_setup\.ipynb cannot be read.*git checkout"):
        standing(course)


def test_the_lab_opens_where_the_learner_goes_on(course: Course) -> None:
    for given, chapter in ((None, "01_internals"), ("02_setup/set_epoch", "02_setup")):
        if given:
            answer(course, given, "right")
        assert first_page(course) == course.root / "chapters" / f"{chapter}.ipynb"
    for chapter in [one.name for one in course.chapters]:
        mark(course, chapter, complete=True)
    assert first_page(course) == course.root / "chapters" / "01_internals.ipynb", "all is done"
    (course.root / "chapters" / "02_setup.ipynb").write_text(json.dumps({"no": "cells"}))
    assert first_page(course) == course.root / "chapters" / "01_internals.ipynb", "one cannot be read"


def test_the_start_page_has_the_map_of_now_before_a_kernel_runs(course: Course) -> None:
    def page() -> tuple[str, list[str]]:
        file = start_page(course)
        assert file == course.root / "start.ipynb"
        notebook = nbformat.read(file, as_version=4)
        nbformat.validate(notebook)
        told = notebook.cells[1].outputs[0].data["text/html"]
        return told, [html.unescape(link).partition("#")[0] for link in re.findall(r'<a href="([^"]+)"', told)]

    told, links = page()
    assert f"Begin: chapter 1, “{course.chapters[0].title}”" in told
    assert all((course.root / link).is_file() for link in links) and "chapters/06_beyond_ddp.ipynb" in links
    answer(course, "02_setup/set_epoch", "right")
    assert "Continue: chapter 2, “" in page()[0]
    (course.root / "chapters" / "02_setup.ipynb").write_text(json.dumps({"no": "cells"}))
    assert "02_setup.ipynb cannot be read" in page()[0]
    shutil.rmtree(course.root / "chapters")
    assert "Begin" not in page()[0]


def test_the_file_browser_lists_what_a_learner_works_with(tmp_path: Path) -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if tracked.returncode:
        pytest.skip("not run: not a clone")
    files = [name for name in tracked.stdout.splitlines() if not name.startswith(("tests/", "src/"))]
    for name in [
        *files,
        "src/a.py",
        "tests/a.py",
        "start.ipynb",
        "notes.md",
        "chapters/mine.ipynb",
        "chapters/drift.py",
    ]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("/drift.py" if name == "chapters/.gitignore" else "")

    def listed(folder: str) -> set[str]:
        return {one["name"] for one in asyncio.run(manager.get(folder))["content"]}

    pytest.importorskip("jupyter_server", reason="not run: no JupyterLab here")
    from lockstep.commands.contents import CourseFiles

    manager = CourseFiles(root_dir=str(tmp_path))
    assert listed("") == {"chapters", "exercises", "start.ipynb", "notes.md"}
    assert listed("chapters") == {f"{one.name}.ipynb" for one in Course(ROOT).chapters} | {"mine.ipynb"}
    assert {"setup_ddp.py", "train.sbatch", "clinic"} <= listed("exercises")
    assert asyncio.run(manager.get("chapters/drift.py"))["content"] == "", "it opens by its link"


def test_what_is_saved_of_a_chapter_goes_to_the_learners_copy(course: Course) -> None:
    """The course's own notebook stays as it came; when it changes, it is shown, and the copy is kept beside it."""
    pytest.importorskip("jupyter_server", reason="not run: no JupyterLab here")
    from lockstep.commands.contents import CourseFiles

    manager = CourseFiles(root_dir=str(course.root))
    path, own = "chapters/02_setup.ipynb", course.root / "chapters" / "02_setup.ipynb"
    came = own.read_bytes()

    def shown() -> list[str]:
        return [cell["source"] for cell in asyncio.run(manager.get(path))["content"]["cells"]]

    first = shown()
    model = asyncio.run(manager.get(path))
    model["content"]["cells"][0]["source"] = "mine"
    asyncio.run(manager.save(model, path))
    assert own.read_bytes() == came and shown() == ["mine", *first[1:]]
    assert json.loads(chapter_file(course, "02_setup").read_text(encoding="utf-8"))["cells"][0]["source"] == ["mine"]
    assert set_aside(course) == [], "nothing has changed since"
    own.write_bytes(came + b"\n")
    assert shown() == first and chapter_file(course, "02_setup") == own
    ((name, kept),) = set_aside(course)
    assert name == "02_setup" and re.fullmatch(r"02_setup\.\d{4}-\d\d-\d\d-\d{4}\.ipynb", kept.name)
    assert kept.parent == own.parent and b'"mine"' in kept.read_bytes()
    asyncio.run(manager.save({"type": "notebook", "content": model["content"]}, "chapters/own.ipynb"))
    assert (own.parent / "own.ipynb").is_file(), "a learner's own notebook is where they put it"


def test_a_chapter_that_is_being_saved_is_waited_for(course: Course) -> None:
    chapter = course.root / "chapters" / "02_setup.ipynb"
    whole = chapter.read_text(encoding="utf-8")
    chapter.write_text("")
    saved = threading.Timer(0.3, chapter.write_text, (whole,))
    saved.start()
    try:
        assert standing(course).chapters[1].outline.name == "02_setup"
    finally:
        saved.join()


def test_a_map_is_asked_for_in_a_learners_words(course: Course) -> None:
    magics = ExerciseMagics(shell=None)
    for said, chapter in (("", ""), ("map", ""), ("2", "02_setup"), ("02_setup", "02_setup")):
        assert magics.course(said).chapter == chapter
    with pytest.raises(UsageError, match=r"no chapter '9'.*01_internals"):
        magics.course("9")


def test_the_stored_map_is_that_of_the_moment_and_of_nobody_where_chapters_are_made(
    course: Course, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(course, "02_setup/set_epoch", "right")
    box = course_map("02_setup")
    for known in (True, False):
        if not known:
            monkeypatch.setenv("LOCKSTEP_SUBMISSION", str(course.solutions))
        stored = box.stored_html()
        assert "Sharding" in stored and stored.index("bring the map up to date") < stored.index("Sharding")
        assert bool(re.search(r"questions 1 of|[✓◐○]|<progress|\d of \d|Begin|Continue", stored)) is known
        assert bool(re.search(r"· 14 questions · 3 exercises<", stored)) is not known, "what it asks is always true"
    assert progress.load(course).quizzes, "nothing is forgotten"
