"""What a terminal shows: as wide as it is, never broken in a word, colored where it is one; and a stub in one line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support import ROOT, one_of
from support.command_line import at_terminal, call, plain, screen, warm
from support.tiny_course import make_course

from lockstep import bootstrap
from lockstep.commands import lab
from lockstep.commands.check import _Shower
from lockstep.commands.terminal import next_text, show_score
from lockstep.course import Course, CourseError, progress
from lockstep.course.standing import NextUp
from lockstep.course.stubs import make_stub
from lockstep.grading import diagnose
from lockstep.grading.submission import Submission
from lockstep.grading.text import Worth, check_text, report_text
from lockstep.grading.verdict import UNWRITTEN, CheckOutcome, CheckResult, Diagnosis, ExerciseResult, Report
from lockstep.ranks import places, text, words
from lockstep.ranks.report import Error, Frame, Outcome, RankReport, Stack, Waiting

HANG = """import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if dist.get_rank() != 2:
    dist.all_reduce(torch.ones(9, 9))
dist.barrier()
"""
ROWS = (
    Waiting(0, "all_reduce #2", "1000×1000 float32", 1.25, Frame("/x/train.py", 7)),
    Waiting(1, "all_reduce #2", "1000×1000 float32", 1.25, Frame("/x/train.py", 7)),
    Waiting(2, "barrier #1", "", 11.25, Frame("/x/train.py", 8), differs=True),
)


@pytest.fixture(scope="module")
def hanging(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a script of which one rank takes another way."""
    folder = tmp_path_factory.mktemp("hanging")
    (folder / "train.py").write_text(HANG)
    return folder


@pytest.fixture(scope="module")
def piped(hanging: Path) -> str:
    """What its run says in a pipe."""
    done = call("run", "-n", "3", "train.py", cwd=hanging, NO_COLOR="", FORCE_COLOR="")
    assert "\x1b" not in done.stdout
    return done.stderr


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """An environment in which torch is imported once for all checks, which is what a terminal has."""
    with warm(tmp_path_factory.mktemp("w")) as environment:
        yield environment


def widest(shown: str) -> int:
    return max(len(line) for line in plain(shown).splitlines())


# Many ranks -----------------------------------------------------------------------------------------------------------


def test_of_many_ranks_those_that_wait_alike_share_a_line() -> None:
    rows = [replace(ROWS[0], rank=rank, since=1.0 + rank / 100) for rank in range(120)]
    rows[7] = replace(rows[7], what="broadcast #1", differs=True)
    rows[8] = replace(rows[8], frame=Frame("/x/train.py", 9))
    shown = text.table(text.rows(rows)).splitlines()
    assert [line.split("   ")[0].strip() for line in shown] == ["rank", "0–6, 9–119", "7 ←", "8"]
    assert "1.0–2.2 s" in shown[1] and "1.1 s" in shown[2] and "train.py:9" in shown[3]
    stacked = text.table(text.rows(rows), 40)
    assert "ranks 0–6, 9–119  wait in" in stacked and "rank 8  waits in" in stacked and widest(stacked) <= 40
    assert len(text.table(text.rows(rows[:8])).splitlines()) == 9, "a few ranks have a line each"


def test_many_ranks_are_named_by_the_first_and_the_last() -> None:
    assert words.names([3, 1, 0]) == "ranks 0, 1 and 3"
    assert words.names([*range(7), *range(8, 120)]) == "ranks 0 to 6 and 8 to 119"
    assert words.names([0, 1, *range(3, 12), 20]) == "ranks 0, 1, 3 to 11 and 20"
    assert (words.names(range(120)), words.names([5]), words.names([])) == ("ranks 0 to 119", "rank 5", "no rank")


# As wide as the terminal ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", one_of([60, 80, 100]))
def test_a_hang_is_as_wide_as_the_terminal(columns: int, hanging: Path, piped: str) -> None:
    shown = at_terminal(columns, "run", "-n", "3", "train.py", cwd=hanging)
    said = plain(shown).partition("\n\n")[2]
    assert widest(said) <= columns
    assert {word for word in piped.split() if word.isalpha()} >= {word for word in said.split() if word.isalpha()} - {
        "rank",
        "ranks",
        "wait",
    }, "no word is broken"
    assert "HANG after" in said and ("rank 2 ←  waits in barrier #1" in said) is (columns < 100)
    assert "\x1b[1;31mHANG after" in shown and re.search(r"\x1b\[33m *(rank )?2 ←", shown), "what matters is colored"


@pytest.mark.parametrize("columns", ["60", "120", ""])
def test_a_pipe_is_as_wide_as_columns_asks(columns: str, hanging: Path, piped: str) -> None:
    said = call("run", "-n", "3", "train.py", cwd=hanging, COLUMNS=columns).stderr.partition("\n\n")[2]
    assert "HANG after" in said
    if columns == "60":
        assert widest(said) <= 60 and "rank 2 ←  waits in barrier #1" in said
    else:
        assert widest(said) == widest(piped.partition("\n\n")[2]), "a pipe has room"


def test_a_run_that_ends_well_says_so_to_a_person_only(tmp_path: Path) -> None:
    (tmp_path / "fine.py").write_text("import torch.distributed as dist\ndist.init_process_group('gloo')\n")
    shown = screen(at_terminal(80, "run", "-n", "2", "fine.py", cwd=tmp_path))
    found = re.search(
        r"^Both ranks ended well after ([\d.]+) s: ([\d.]+) s to load torch, ([\d.]+) s in the script\.$",
        shown,
        re.MULTILINE,
    )
    assert found is not None, shown
    whole, start, script = (round(10 * float(one)) for one in found.groups())
    assert abs(whole - start - script) <= 1, "in tenths, each rounded"
    piped = call("run", "-n", "2", "fine.py", cwd=tmp_path)
    assert piped.returncode == 0 and "ended well" not in piped.stdout + piped.stderr
    (tmp_path / "mixed.py").write_text(
        "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\n"
        "dist.all_reduce(torch.ones(1, dtype=[torch.int32, torch.float32][dist.get_rank()]))\n"
    )
    shown = screen(at_terminal(80, "run", "-n", "2", "mixed.py", cwd=tmp_path))
    assert "MIXED UP" in shown and "ended well" not in shown


def test_a_check_is_as_wide_as_the_terminal(home: dict[str, str]) -> None:
    words = set(call("check", "--submission", "setup_ddp/waits_on_rank_0", **home).stdout.split())
    shown = screen(at_terminal(60, "check", "--submission", "setup_ddp/waits_on_rank_0", **home))
    outside = [line for line in shown.splitlines() if len(line) > 60 and "/" not in line]
    assert outside == [] and "rank 0 ←  waits in barrier #1" in shown
    own = {word for word in shown.split() if word.isalpha()}
    assert own <= words | {"wait"}, "no word is broken"


def test_the_command_of_what_comes_next_is_never_broken() -> None:
    coming = NextUp(2, "Sharding", "train_ddp", is_there=False, here=False)
    said = 'Next: chapter 2, "Sharding" · then train_ddp:'
    command = "./lockstep check train_ddp"
    assert next_text(coming, 80) == f"{said} {command}"
    assert next_text(coming, 60).splitlines() == [said, f"    {command}"]
    there = NextUp(2, "Exercise: implement train_ddp", "train_ddp", is_there=True, here=False)
    lines = next_text(there, 70).splitlines()
    assert lines == ['Next: train_ddp, chapter 2, "Exercise: implement train_ddp"', f"    {command}"]


def test_a_failures_name_is_below_it_and_the_hint_is_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    """At each width; between two failures is a blank line, in a report and while it is graded."""
    found = Diagnosis("missing-set-epoch", "Rank 0 saw one order.", read='chapter 2, "Sharding"')
    check = CheckResult("every epoch has a new order", "test_a", CheckOutcome.FAILED, found)
    for width in (60, 100):
        lines = check_text(check, "train_ddp", width).splitlines()
        assert lines == [
            "  ✗ every epoch has a new order",
            "      missing-set-epoch",
            "      Rank 0 saw one order.",
            '      Read: chapter 2, "Sharding"',
        ]
    passed = CheckResult("is quiet", "q", CheckOutcome.PASSED)
    result = ExerciseResult("train_ddp", (passed, check, check, passed), 1.0)
    _, *shown = report_text(Report(0, (result,))).splitlines()
    assert shown == [
        "",
        "  ✓ is quiet",
        *lines,
        "",
        *lines,
        "",
        "  ✓ is quiet",
        "",
        "  For a hint: ./lockstep hint train_ddp",
    ]
    shower = _Shower(4)
    for one in result.checks:
        shower("train_ddp", one)
    assert capsys.readouterr().out.splitlines() == ["", "train_ddp", *shown[1:-2]]
    show_score(result)
    assert capsys.readouterr().out.splitlines()[1:] == ["For a hint: ./lockstep hint train_ddp"]


@pytest.mark.slow
def test_a_check_says_that_it_goes_on_and_leaves_no_trace_of_it(tmp_path: Path, home: dict[str, str]) -> None:
    """At a terminal a line counts the checks; in a pipe, even a colored one, there is none."""
    course = make_course(tmp_path)
    where = {"LOCKSTEP_COURSE": str(course.root), **home}
    arguments = ("check", "add", "--submission", str(course.solutions))
    said = at_terminal(60, *arguments, **where)
    counted = [int(number) for number in re.findall(r"(\d) of 2 checks · \d+ s · Ctrl-C stops", said)]
    assert counted == sorted(counted) and counted[0] == 0
    assert said.index("0 of 2 checks") < said.index("✓ Both ranks") < said.index("✓ Nothing is printed")
    piped = call(*arguments, **where, FORCE_COLOR="").stdout
    seconds = re.compile(r"\d+\.\d s")
    assert seconds.sub("", screen(said)).strip() == seconds.sub("", piped).strip()
    assert "\x1b[?25h" in said, "the cursor is back"
    colored = call(*arguments, **where, FORCE_COLOR="1", NO_COLOR="").stdout
    assert "Ctrl-C" not in colored and "\r" not in colored and "\x1b[32m" in colored


@pytest.mark.parametrize("width", [60, 72, 80, 96])
def test_a_table_that_fits_stays_and_one_that_does_not_is_stacked(width: int) -> None:
    table = text.table(text.rows(ROWS))
    fitted = text.table(text.rows(ROWS), width)
    assert widest(fitted) <= width
    assert (fitted == table) is (widest(table) <= width)
    if fitted != table:
        assert fitted.splitlines()[0] == "  ranks 0, 1  wait in all_reduce #2"
        assert fitted.splitlines()[1] == "      1000×1000 float32 · for 1.2 s"
        assert fitted.splitlines()[-3:] == ["  rank 2 ←  waits in barrier #1", "      for 11.2 s", "      train.py:8"]


@pytest.mark.parametrize("width", [60, 100])
def test_of_many_ranks_those_in_the_same_place_are_one_row(width: int) -> None:
    there, other = Frame("train.py", 10), Frame("train.py", 8)
    rows = [Waiting(rank, "barrier #1", since=rank / 10, frame=there) for rank in range(120)]
    rows[2] = Waiting(2, "all_reduce #3", "4 × float32", 0.7, other, differs=True)
    shown = text.table(text.rows(rows), width).splitlines()
    assert len(shown) <= 6 and any("0, 1, 3–119" in line and "barrier #1" in line for line in shown)
    assert any(re.search(r"\b2 ← .*all_reduce #3", line) for line in shown) and any(
        "0.0–11.9 s" in line for line in shown
    )
    assert width > 60 or shown[0] == "  ranks 0, 1, 3–119  wait in barrier #1"
    apart = [Waiting(rank, f"barrier #{rank % 2}", since=0.1) for rank in range(120)]
    assert [line.split()[:2] for line in text.table(text.rows(apart)).splitlines()[1:]] == [["60", "ranks"]] * 2


def test_in_a_narrow_place_ranks_that_wait_alike_are_told_together() -> None:
    there = Frame("a/file/with/a/long/name/for/a/narrow/place/train.py", 10)
    rows = [Waiting(rank, "barrier #1", since=rank / 10, frame=there, differs=rank == 1) for rank in range(4)]
    shown = text.table(text.rows([*rows, replace(rows[0], rank=4, what="send #1")]), 40).splitlines()
    assert shown == [
        "  ranks 0, 2, 3  wait in barrier #1", "      for 0.0–0.3 s", "      train.py:10",
        "  rank 1 ←  waits in barrier #1", "      for 0.1 s", "      train.py:10",
        "  rank 4  waits in send #1", "      for 0.0 s", "      train.py:10",
    ]  # fmt: skip


IN_A_CALL = Stack(None, "barrier")


@pytest.mark.parametrize(
    "report, waits",
    [
        (RankReport(0, Outcome.RETURNED), False),
        (RankReport(0, Outcome.RAISED, stack=IN_A_CALL), False),
        (RankReport(0, Outcome.TIMED_OUT), False),
        (RankReport(0, Outcome.TIMED_OUT, stack=IN_A_CALL, stopped=True), False),
        (RankReport(0, Outcome.HUNG, stack=IN_A_CALL), True),
    ],
)
def test_only_a_rank_in_a_call_waits_in_something(report: RankReport, waits: bool) -> None:
    row, *_ = text.rows(places.rows([report], differs=[0]))
    first, *_ = text.table([row, *text.rows(ROWS[1:])], 60).splitlines()
    assert first == f"  rank 0 ←  {'waits in ' if waits else ''}{row.what}"


def test_a_sentence_that_was_broken_for_a_wider_place_is_joined_first() -> None:
    words = " ".join(["the", "group's", "timeout,", "which", "is", "long"] * 8)
    wide = text._wrapped(words, text.WIDTH)
    assert len(wide.splitlines()) > 2
    narrow = text.fit(wide, 60)
    assert " ".join(narrow.split()) == words
    assert all(len(line) > 45 for line in narrow.splitlines()[:-1]), "no line is left half full"
    assert text.fit(wide, text.WIDTH) == wide


def test_the_marks_of_a_traceback_go_with_the_line_that_they_mark() -> None:
    source = "    total = " + "value + " * 12 + "last"
    fitted = text.fit(f"{source}\n            ~~~~~~^^^^\nTypeError: no", 60)
    assert "^" not in fitted and fitted.endswith("TypeError: no")
    assert text.fit("    a + b\n    ~~^~~", 60) == "    a + b\n    ~~^~~"


# Color ---------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_there_is_no_color_in_a_pipe_nor_with_no_color(hanging: Path, piped: str) -> None:
    assert "HANG after" in piped and "\x1b" not in piped
    assert "\x1b" not in at_terminal(80, "run", "-n", "3", "train.py", cwd=hanging, NO_COLOR="1")
    show = "import sys; from lockstep.commands.console import show_text; show_text(sys.stdin.read())"
    environment = {**os.environ, "NO_COLOR": "", "FORCE_COLOR": "1"}
    forced = subprocess.run(
        [sys.executable, "-c", show], env=environment, input=piped, capture_output=True, text=True, timeout=60
    )
    assert "\x1b[1;31mHANG after" in forced.stdout


# Nothing written yet --------------------------------------------------------------------------------------------------


def unwritten(name: str, line: int, message: str = "Nothing is written here yet.\nTo do: add.") -> CheckResult:
    found = Diagnosis(UNWRITTEN, message, file="exercises/add.py", line=line, why="Because.", source="raise …")
    return CheckResult(name, name, CheckOutcome.FAILED, found)


def not_run(name: str, reason: str) -> CheckResult:
    return CheckResult(name, name, CheckOutcome.NOT_RUN, reason=reason)


def test_what_is_not_written_is_one_line_and_what_waits_for_it_none() -> None:
    checks = (
        unwritten("adds", 3),
        not_run("adds twice", "fails in the same place as above"),
        not_run("keeps", "needs “adds”"),
        not_run("keeps twice", "needs “keeps”"),
        unwritten("adds on three", 3),
        not_run("on a GPU", "there is no GPU"),
        CheckResult("is quiet", "q", CheckOutcome.PASSED),
        unwritten("takes away", 9),
    )
    shown = report_text(Report(0, (ExerciseResult("add", checks, 1.0),)), hint="%hint")
    head, blank, *lines = shown.splitlines()
    assert head.startswith("add ") and not blank
    assert lines == [
        "  ✗ Nothing is written here yet · exercises/add.py:3 · %hint add",
        "  – on a GPU".ljust(60) + "  not run: there is no GPU",
        "  ✓ is quiet",
        "  ✗ Nothing is written here yet · exercises/add.py:9 · %hint add",
    ]


@pytest.mark.parametrize("waiting", [1, 3])
def test_checks_that_wait_for_a_mistake_share_a_line_at_the_end(
    waiting: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """What went wrong is the last thing on the screen, not what was not run because of it."""
    wrong = CheckResult("adds", "a", CheckOutcome.FAILED, Diagnosis("raised", "It raised."))
    later = [not_run(f"keeps {number}", "needs “adds”") for number in range(waiting)]
    passed = CheckResult("is quiet", "q", CheckOutcome.PASSED)
    result = ExerciseResult("add", (wrong, *later, passed), 1.0)
    end = "  – keeps 0" if waiting == 1 else "  – 3 not run: each needs “adds”"
    shower = _Shower(5)
    for check in result.checks:
        shower("add", check)
    shower.finish()
    for shown in (capsys.readouterr().out, report_text(Report(0, (result,)))):
        lines = [line.rstrip() for line in shown.splitlines() if line.startswith("  ")]
        assert lines.index("  ✓ is quiet") < next(n for n, line in enumerate(lines) if line.startswith(end))
        assert ("keeps 1" in shown) is False


def test_what_waits_for_a_mistake_is_listed() -> None:
    worth = Worth()
    wrong = CheckResult("adds", "a", CheckOutcome.FAILED, Diagnosis("raised", "It raised."))
    assert (
        worth(wrong)
        and worth(not_run("keeps", "needs “adds”"))
        and worth(not_run("b", "needs a run that failed above"))
    )
    assert worth(unwritten("takes", 9)) and not worth(not_run("gives", "needs “takes”"))
    assert "It raised." in check_text(wrong, "add")


@pytest.mark.parametrize("name", ["setup_ddp", "train_ddp"])
def test_the_check_of_a_stub_is_one_line(name: str, tmp_path: Path, home: dict[str, str]) -> None:
    stub = tmp_path / f"{name}.py"
    stub.write_text(make_stub((ROOT / "solutions" / f"{name}.py").read_text(), name))
    shown = call("check", name, "--submission", str(stub), **home).stdout
    said = " ".join(shown.strip().partition("\n\n")[0].split())
    at = next(n for n, line in enumerate(stub.read_text().splitlines(), 1) if "raise NotImplementedError" in line)
    parts = f"{name} ✗ Nothing is written here yet", f"{stub}:{at}", f"./lockstep hint {name}"
    assert said.replace(" · ", " ") == " ".join(parts)  # the dot goes where a long path breaks the line


@pytest.mark.parametrize(
    ("checks", "line"),
    [
        ([unwritten("adds", 3), not_run("keeps", "needs “adds”")], "add: not begun; 2 checks wait for your code"),
        ([unwritten("adds", 3), CheckResult("is quiet", "q", CheckOutcome.PASSED)], "add: 1 of 2 checks passed · 1.0 s"),
        ([CheckResult("adds", "a", CheckOutcome.FAILED, Diagnosis("raised", "It raised."))], "add: 0 of 1 checks passed · 1.0 s"),
        ([not_run("on a GPU", "there is no GPU")], "add: 0 of 1 checks passed · 1.0 s"),
    ],
)  # fmt: skip
def test_a_stub_has_no_score(checks: list[CheckResult], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    show_score(ExerciseResult("add", tuple(checks), 1.0))
    assert capsys.readouterr().out.splitlines()[0] == line


def test_the_status_has_rows_for_what_is_begun_and_a_line_for_the_rest(tmp_path: Path) -> None:
    for part in ("autograder", "chapters", "exercises"):
        (tmp_path / part).symlink_to(ROOT / part)
    course = Course(tmp_path)

    def shown(columns: int) -> list[str]:
        return screen(at_terminal(columns, "status", LOCKSTEP_COURSE=str(tmp_path))).rstrip().splitlines()

    assert len(fresh := shown(80)) <= 24 and sum("not tried" in line for line in fresh) == 1, "for a newcomer"
    progress.record(course, "average_gradients", 7, 7)
    progress.record(course, "setup_ddp", 4, 10)
    progress.record(course, "clinic/odd_shapes", 0, 3)
    rows = [line.rstrip() for line in shown(80) if line.lstrip()[:1] in tuple("○◐✓") and "begun" not in line]
    assert rows[:6] == [
        "      ✓  average_gradients",
        "      ○  ring_all_reduce, mini_ddp",
        "      ◐  setup_ddp                 best 4 of 10   1 try",
        "      ○  train_ddp, launch_distributed",
        "      ◐  clinic/odd_shapes         best 0 of 3    1 try",
        "      ○  find_divergence, device_report, preflight, clinic (27 more)",
    ]
    narrow = shown(60)
    assert max(map(len, narrow)) <= 60 and "         clinic (27 more)" in narrow


def test_a_stub_that_an_exercise_uses_is_named(tmp_path: Path) -> None:
    """As in a learner's copy, which has no solutions to put in its place."""
    for name in ("train_ddp", "setup_ddp"):
        (tmp_path / f"{name}.py").touch()
    submission = Submission("train_ddp", tmp_path / "x.py", tmp_path / "train_ddp.py", "exercises/train_ddp.py")

    def read(message: str) -> tuple[str, str]:
        return diagnose._read_error(submission, Error("NotImplementedError", message), "other")

    assert read("train_ddp: train with DDP") == (UNWRITTEN, "Nothing is written here yet.\nTo do: train with DDP.")
    there = "train_ddp uses setup_ddp, where nothing is written yet.\nTo do there: choose a device."
    assert read("setup_ddp: choose a device") == (UNWRITTEN, there)
    assert read("aten: an operator is missing") == ("raised", "other")


# Root -----------------------------------------------------------------------------------------------------------------


def test_root_is_told_how_to_start_jupyterlab(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line, instead of Jupyter's own refusal; whoever says how is not asked again."""

    course = make_course(tmp_path)

    class Started(Exception):
        pass

    def start(*_: object, **__: object) -> None:
        raise Started

    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr(lab.subprocess, "Popen", start)
    with pytest.raises(CourseError, match=r"root.*\./lockstep lab --allow-root$"):
        lab.open_lab(course, ["--no-browser"])
    for option in ("--allow-root", "--ServerApp.allow_root=True", "--config=my.py"):
        with pytest.raises(Started):
            lab.open_lab(course, [option])
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(Started):
        lab.open_lab(course, [])


def test_root_is_told_before_there_is_an_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody waits a minute for the packages to read that root may not start them; other commands are root's too."""

    class Making(Exception):
        pass

    def make(*_: object) -> None:
        raise Making

    monkeypatch.setattr(bootstrap, "make", make)
    monkeypatch.setattr(bootstrap.signal, "signal", lambda *_: None)
    monkeypatch.setattr(bootstrap.os, "geteuid", lambda: 0)
    with pytest.raises(SystemExit, match="3"):
        bootstrap.main(["lab", "--no-browser"])
    assert re.fullmatch(r"lockstep: you are root.*\./lockstep lab --allow-root\n", capsys.readouterr().err)
    for arguments in (["lab", "--allow-root"], ["test"], []):
        with pytest.raises(Making):
            bootstrap.main(arguments)
