"""The clinic is whole: every case has all its parts, they agree with each other, and its page shows what a run shows.

What a learner writes in `exercises/` is never read here: a case's stub is made anew from its solution.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from msgspec import toml

from lockstep import ranks
from lockstep.course import Course
from lockstep.course.stubs import make_stub
from lockstep.ranks import text

ROOT = Path(__file__).resolve().parents[1]
AUTOGRADER, SOLUTIONS, EXERCISES = ROOT / "autograder", ROOT / "solutions" / "clinic", ROOT / "exercises" / "clinic"
CLINIC_DATA = AUTOGRADER / "clinic" / "support" / "clinic_data.py"
CASES: dict[str, dict[str, Any]] = toml.decode((AUTOGRADER / "clinic" / "cases.toml").read_text(encoding="utf-8"))
CAUSES: dict[str, str] = toml.decode((AUTOGRADER / "clinic" / "causes.toml").read_text(encoding="utf-8"))
LOUD = ("hang", "raised", "crashed", "mismatch", "exited")
SHOWS = (*LOUD, "drift", "same-data", "nothing")
HEADINGS = ["Symptom", "How to look", "The tool that shows it", "Cause", "Fix", "Never again"]
HINTS = 3
TICKET = 1  # solutions/clinic/ticket.txt: the one for which solutions and pages are right
every_case = pytest.mark.parametrize("name", CASES)


def loaded(file: Path, name: str) -> ModuleType:
    """A module from this file, under a name of its own."""
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


case = loaded(AUTOGRADER / "clinic" / "case.py", "clinic_case_under_test")


def stub(name: str) -> str:
    """The broken job, as a learner gets it."""
    return make_stub((SOLUTIONS / f"{name}.py").read_text(encoding="utf-8"), f"clinic/{name}")


def page(name: str) -> str:
    """What the course says of a case when it is solved."""
    return (SOLUTIONS / f"{name}.md").read_text(encoding="utf-8")


# Its parts -------------------------------------------------------------------------------------------------------


@every_case
def test_a_case_has_all_its_files(name: str) -> None:
    wanted = [
        SOLUTIONS / f"{name}.py",
        SOLUTIONS / f"{name}.md",
        EXERCISES / f"{name}.py",
        AUTOGRADER / "clinic" / f"test_{name}.py",
        AUTOGRADER / "hints" / "clinic" / f"{name}.md",
    ]
    assert [str(file.relative_to(ROOT)) for file in wanted if not file.is_file()] == []
    assert f"clinic/{name}" in Course(ROOT).names, "it is not in autograder/course.toml"


def test_no_part_is_left_over() -> None:
    def stems(folder: Path, pattern: str, prefix: str = "") -> set[str]:
        return {file.stem.removeprefix(prefix) for file in folder.glob(pattern)} - {"clinic_data", "ticket", "README"}

    assert stems(SOLUTIONS, "*.py") == stems(SOLUTIONS, "*.md") == set(CASES)
    assert stems(AUTOGRADER / "clinic", "test_*.py", "test_") == set(CASES)
    assert stems(AUTOGRADER / "hints" / "clinic", "*.md") == set(CASES)
    in_course = {one.removeprefix("clinic/") for one in Course(ROOT).names if one.startswith("clinic/")}
    assert in_course == set(CASES)


@every_case
def test_its_committed_stub_is_the_one_that_the_solution_gives(name: str) -> None:
    shown = subprocess.run(
        ["git", "show", f"HEAD:exercises/clinic/{name}.py"], cwd=ROOT, capture_output=True, text=True, timeout=30
    )
    if shown.returncode:
        pytest.skip("no such file in git's HEAD (a copy without git, or a new case)")
    assert shown.stdout == stub(name), (
        f"solutions/clinic/{name}.py gives another stub: `lockstep author stubs`, commit both"
    )


@every_case
def test_its_stub_gives_no_answer_away(name: str) -> None:
    broken = stub(name)
    assert [cause for cause in CAUSES if cause in broken] == []
    assert case.answers(broken) == {"CAUSE": case.UNANSWERED, "RANK": case.UNANSWERED}
    assert "mended" not in broken and "--- " not in broken
    complaint = ast.get_docstring(ast.parse(broken)) or ""
    assert complaint.startswith(f"Case: {CASES[name]['title'][0].lower()}{CASES[name]['title'][1:]}.")
    assert f"./lockstep run -n {CASES[name]['ranks']} " in complaint and f"exercises/clinic/{name}.py" in complaint


@every_case
def test_it_has_hints_and_a_page(name: str) -> None:
    hints = (AUTOGRADER / "hints" / "clinic" / f"{name}.md").read_text(encoding="utf-8").split("\n---\n")
    assert len([hint for hint in hints if hint.strip()]) >= HINTS
    said = page(name)
    title = CASES[name]["title"]
    assert said.splitlines()[0] == f"# {name}: {title[0].lower()}{title[1:]}"
    sections = re.split(r"^## (.+)$", said, flags=re.MULTILINE)
    assert sections[1::2] == HEADINGS
    assert all(body.strip() for body in sections[2::2])
    assert f"`{CASES[name]['cause']}`" in said


# What is right ---------------------------------------------------------------------------------------------------


@every_case
def test_its_answer_is_one_of_the_list(name: str) -> None:
    item = CASES[name]
    assert item["cause"] in CAUSES and item["shows"] in SHOWS
    assert item["guilty"] in ("drawn", "all") or item["guilty"] in range(item["ranks"])


@every_case
def test_its_solution_has_the_right_answer(name: str) -> None:
    assert int((SOLUTIONS / "ticket.txt").read_text()) == TICKET
    given = case.answers((SOLUTIONS / f"{name}.py").read_text(encoding="utf-8"))
    assert given == {"CAUSE": CASES[name]["cause"], "RANK": case.cases()[name].rank(TICKET)}


def test_the_learners_list_has_every_cause() -> None:
    listed = re.findall(r"^- `([a-z-]+)`: (.+)$", (EXERCISES / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert listed == list(CAUSES.items())


def test_some_causes_fit_no_case() -> None:
    """So that crossing off does not answer the last one."""
    assert set(CAUSES) - {item["cause"] for item in CASES.values()}


# The ticket --------------------------------------------------------------------------------------------------------


def test_every_ward_is_the_same() -> None:
    for folder in (EXERCISES, SOLUTIONS):
        assert (folder / "clinic_data.py").read_bytes() == CLINIC_DATA.read_bytes(), f"copy {CLINIC_DATA} to {folder}"


def test_grader_and_ward_draw_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    clinic_data = loaded(CLINIC_DATA, "clinic_data_under_test")
    numbers = random.Random(3)
    for ticket in [0, TICKET, 999_999, *(numbers.randrange(1_000_000) for _ in range(200))]:
        monkeypatch.setenv("CLINIC_TICKET", str(ticket))
        for name, item in CASES.items():
            assert clinic_data.draw(name, item["ranks"]) == case.draw(ticket, name, item["ranks"])
            assert 0 <= clinic_data.draw(name, item["ranks"]) < item["ranks"]


def test_every_rank_can_be_guilty() -> None:
    for name, item in CASES.items():
        assert {case.draw(ticket, name, item["ranks"]) for ticket in range(200)} == set(range(item["ranks"]))


def line(process: subprocess.Popen[str]) -> str:
    """The next line that it prints."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def go_on(process: subprocess.Popen[str]) -> None:
    """Let it read a line."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def test_ranks_that_come_at_once_draw_one_ticket(tmp_path: Path) -> None:
    shutil.copyfile(CLINIC_DATA, tmp_path / "clinic_data.py")
    # Torch is not needed for the ticket, and eight of it would be slow. Each stops with a number of its own in hand, so that
    # all have found no ticket before any has written one.
    code = (
        "import sys, types, importlib\n"
        "for name in ('torch', 'torch.utils', 'torch.utils.data'): sys.modules[name] = types.ModuleType(name)\n"
        "sys.modules['torch'].Tensor = int\n"
        "sys.modules['torch.utils.data'].Dataset = list\n"
        "import clinic_data\n"
        "draw = clinic_data.secrets.randbelow\n"
        "def held(below):\n"
        "    drawn = draw(below); print('drawn', flush=True); sys.stdin.readline(); return drawn\n"
        "clinic_data.secrets.randbelow = held\n"
        "print(clinic_data.ticket(), clinic_data.ticket(), flush=True); sys.stdin.readline()\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != "CLINIC_TICKET"}
    started = [
        subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, env=environment, text=True,
                         stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(8)
    ]  # fmt: skip
    try:
        assert [line(process) for process in started] == ["drawn"] * 8
        drawn = []
        for process in started[:4]:  # one after the other, each to its end
            go_on(process)
            drawn.append(line(process))
        for process in started[4:]:  # at once
            go_on(process)
        drawn += [line(process) for process in started[4:]]
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
                process.wait()
    kept = (tmp_path / "ticket.txt").read_text().strip()
    assert drawn == [f"{kept} {kept}"] * 8
    assert [one.name for one in tmp_path.glob(".ticket*")] == []


# What a run shows --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stopped() -> Iterator[None]:
    """No warm process of this file's environment is left for the next one."""
    yield
    ranks.stop()


def symptom(name: str) -> str:
    """The first code block of the page's symptom: what `./lockstep run` shows under ticket 1."""
    body = page(name).split("## Symptom", 1)[1].split("\n## ", 1)[0]
    block = re.search(r"^```\w*\n(.*?)^```$", body, re.MULTILINE | re.DOTALL)
    assert block, "the symptom has no code block"
    return block.group(1)


def plain(shown: str) -> str:
    """Without what no two runs share: times and other fractions, addresses and ports, and where lines were wrapped."""
    shown = re.sub(r"0x[0-9a-f]+|\d+\.\d+(e-?\d+)?|\d{4,}", "#", shown)
    return re.sub(r"\s+", "", shown)


def missing(block: str, shown: str) -> list[str]:
    """The lines of a page's block that a run did not show. An ellipsis stands for anything."""
    flat = plain(shown)
    lines = [line for line in block.splitlines() if line.strip()]
    return [
        line for line in lines if not re.search(".*?".join(map(re.escape, re.split(r"…|\.\.\.", plain(line)))), flat)
    ]


def shown_by(name: str, folder: Path) -> str:
    """Everything that `./lockstep run` prints of the broken job under ticket 1."""
    shutil.copyfile(CLINIC_DATA, folder / "clinic_data.py")
    file = folder / f"{name}.py"
    file.write_text(stub(name), encoding="utf-8")
    run = ranks.run(
        ranks.Script(str(file)),
        CASES[name]["ranks"],
        environment={**os.environ, "CLINIC_TICKET": str(TICKET)},
        directory=folder,
        idle_limit=None,
        watch_replicas=CASES[name]["shows"] not in LOUD,
    )
    printed = [
        f"[rank {report.rank}] {line}"
        for report in run.ranks
        for stream in (report.stdout, report.stderr)
        for line in stream.splitlines()
    ]
    found = "" if CASES[name]["shows"] in LOUD else text.replicas(run)
    return "\n".join([*printed, found, text.describe(run) if run.cause else ""])


@every_case
def test_its_page_shows_what_a_run_shows(name: str, tmp_path: Path, stopped: None) -> None:
    """Now and then gloo ends a rank while another is still connecting, and the run shows other ranks than the page."""
    for attempt in range(3):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        shown = shown_by(name, folder)
        if not missing(symptom(name), shown):
            return
    assert missing(symptom(name), shown) == [], shown


def test_a_line_that_no_run_shows_is_noticed() -> None:
    shown = "HANG after 1.3 s at job.py:47: rank 0 never joined backward (DDP's gradient all-\nreduce #7)"
    assert missing("HANG after 0.9 s at job.py:47: rank 0 never …\nreduce #7\n", shown) == []
    assert missing("HANG after 1.3 s at job.py:47: rank 1 never\n", shown) != []
    assert missing("HANG after 1.3 s at job.py:48: rank 0 never\n", shown) != []
    assert missing("all is well\n", shown) == ["all is well"]
