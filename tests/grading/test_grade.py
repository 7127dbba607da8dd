"""A class is graded: what comes out, that it is the same each time, and that no kill, fault or change spoils it."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO
from xml.etree import ElementTree

import pytest
from support.tiny_course import CLASS, IDS, RIGHT, SECONDS, WAITING, WRONG, files, make_course, moodle
from support.tiny_course import command as grade_command

from lockstep.course import Course, CourseError
from lockstep.grading import bulk, isolation, store
from lockstep.grading.bulk import ClassRequest
from lockstep.grading.classroom import NOT_HANDED_IN, ClassResult, GradingOutcome, Learner, seed_of
from lockstep.grading.worker import Worker
from lockstep.grading.writers import write_all
from lockstep.ranks.client import SOURCE
from lockstep.ranks.processes import descendants, kill


class Kept(Worker):
    """A worker that outlives the engine, so that torch is imported once for all of these tests. One that has died is
    ended as ever: until it is reaped, `poll` may still call it alive."""

    def stop(self) -> None:
        if self._process is not None and has_hung_up(self._process.stdout):
            super().stop()


def has_hung_up(pipe: IO[str] | None) -> bool:
    """Whether nobody can write into it any more."""
    assert pipe is not None
    poll = select.poll()
    poll.register(pipe, 0)  # POLLHUP is always told
    return bool(poll.poll(0))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Course:
    return make_course(tmp_path_factory.mktemp("course"))


@pytest.fixture(scope="module")
def warm(tiny: Course) -> Iterator[Kept]:
    kept = Kept()
    yield kept
    Worker.stop(kept)


@pytest.fixture(autouse=True)
def not_apart(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A sandbox takes a second a learner; these tests are about what is around it. One of them has it."""
    monkeypatch.setenv("LOCKSTEP_ISOLATION", "none")
    isolation.tier.cache_clear()
    yield
    isolation.tier.cache_clear()


@pytest.fixture(autouse=True)
def traps(tiny: Course) -> Iterator[Path]:
    """Where a check of ours looks whether it breaks; empty for every test."""
    yield tiny.root / "traps"
    for trap in (tiny.root / "traps").iterdir():
        trap.unlink()


Grade = Callable[..., tuple[ClassResult, list[str]]]


@pytest.fixture
def grade(tiny: Course, warm: Kept, tmp_path: Path) -> Grade:
    """Grade `source` into `out`; returns the class and who was graded now, in this order."""

    def call(
        source: Path, out: Path, order: ClassRequest | None = None, **more: float
    ) -> tuple[ClassResult, list[str]]:
        told: list[Learner] = []
        order = order or ClassRequest(seed=7, allow_unisolated=True)
        with bulk.opened(tiny, source, out, order) as grading:
            pending = [one for one in grading.pending() if not order.only or one.id in order.only]
            bulk.carry_out(grading, pending, 1, told.append, worker=lambda: warm, **more)
            graded = grading.result()
            assert graded is not None
            write_all(graded, out, tiny)
        return graded, [one.id for one in told]

    return call


def order(**more: object) -> ClassRequest:
    return ClassRequest(**{"seed": 7, "allow_unisolated": True, **more})  # type: ignore[arg-type]


def command(course: Course, *arguments: object) -> subprocess.Popen[str]:
    """One at a time, so that it is known who is being graded."""
    return grade_command(course, "--jobs", 1, *arguments, "--allow-unisolated")


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=SECONDS)
    return process.returncode, out, err


# What comes out ------------------------------------------------------------------------------------------------------


def test_a_class_from_download_to_grades(tiny: Course, tmp_path: Path) -> None:
    """The command, as a teacher types it."""
    out = tmp_path / "graded"
    code, said, err = finish(command(tiny, moodle(tmp_path / "all.zip", CLASS), "--out", out, "--seed", 7))
    assert (code, err) == (0, "")
    lines = said.splitlines()
    assert lines[0].startswith("4 submissions · less than a minute, ") and lines[0].endswith(" · seed 7")
    assert [line.split("  ")[0] for line in lines[1:5]] == ["1/4", "2/4", "3/4", "4/4"]
    assert "hank-1003: 0 of 2" in said and "hang" in said and "3 graded · 1 nothing to grade" in said
    table = lines[lines.index("3 graded · 1 nothing to grade") + 1 :][:6]
    assert [row.split() for row in table] == [
        ["learner", "points", "add", "times"],
        ["ada-lovelace-1001", "4", "of", "4", "2", "of", "2", "2", "of", "2"],
        ["hank-1003", "0", "of", "2", "0", "of", "2", "–"],
        ["nobody-1004", "nothing", "to", "grade"],
        ["zoe-1-1-1002", "2", "of", "4", "1", "of", "2", "1", "of", "2"],
        ["–", "not", "handed", "in"],
    ]
    flat = " ".join(said.split())  # a long path has a line of its own
    assert f"Class page {out / 'index.html'} · open" in flat and f"Gradebook {out / 'grades.csv'} " in flat
    text = (out / "grades.csv").read_bytes().decode("utf-8")
    assert text.startswith("\ufeff")
    rows = {row["learner"]: row for row in csv.DictReader(io.StringIO(text[1:]))}
    assert list(rows) == IDS
    assert [rows[id]["score"] for id in IDS] == ["4", "0", "0", "2"]
    assert [rows[id]["times"] for id in IDS] == ["2", "", "", "1"]
    assert rows["zoe-1-1-1002"]["name"] == "Zoë =1+1" and rows["nobody-1004"]["remarks"].startswith("nothing to grade")
    ada = json.loads((out / "results" / "ada-lovelace-1001.json").read_bytes())
    assert (ada["schema"], ada["outcome"], ada["score"], ada["max_score"]) == (1, "graded", 4, 4)
    assert ada["seed"] == seed_of(7, "ada-lovelace-1001", ada["digest"]) == int(rows["ada-lovelace-1001"]["seed"])
    zoe = json.loads((out / "results" / "zoe-1-1-1002.json").read_bytes())
    found = {(e["name"], c["id"]): c["diagnosis"] for e in zoe["exercises"] for c in e["checks"]}
    assert found["add", "test_agrees_on_both_ranks"] == {"id": "raised", "line": 1, "read": found["add", "test_agrees_on_both_ranks"]["read"]}  # fmt: skip
    assert found["times", "test_is_quiet"]["id"] == "raised" and found["times", "test_agrees_on_both_ranks"] is None
    suites = {suite.get("name"): suite for suite in ElementTree.parse(out / "junit.xml").getroot()}
    assert suites["zoe-1-1-1002: times"].get("failures") == "1"
    assert suites["nobody-1004: nothing to grade"].get("skipped") == "1"
    assert sorted(path.stem for path in (out / "gradescope").iterdir()) == IDS
    scope = json.loads((out / "gradescope" / "nobody-1004.json").read_bytes())
    assert scope["score"] == 0 and scope["output"].startswith("nothing to grade")
    scope = json.loads((out / "gradescope" / "ada-lovelace-1001.json").read_bytes())
    assert scope["score"] == 4 and "4 of 4 points" in scope["output"]
    assert "ada&#45;lovelace&#45;1001" in (out / "summary.md").read_text()


def test_what_was_asked_for_and_is_missing_says_so(grade: Grade, tmp_path: Path) -> None:
    """It costs all its points, which are there to be had; without being asked for it costs nothing."""
    source, out = moodle(tmp_path / "all.zip", CLASS), tmp_path / "graded"
    graded, _ = grade(source, out, order(exercises=("times",)))
    hank = graded.learners[1]
    assert hank.missing == ("times",) and [result.name for result in hank.exercises] == ["times"]
    assert (hank.outcome, hank.score, hank.max_score) == (GradingOutcome.GRADED, 0, 2)
    assert [check.name for check in hank.exercises[0].checks] == ["Both ranks get the same", "Nothing is printed"]
    assert {check.reason for check in hank.exercises[0].checks} == {NOT_HANDED_IN}
    result = json.loads((out / "results" / "hank-1003.json").read_bytes())
    assert result["exercises"][0]["handed_in"] is False and result["max_score"] == 2
    rows = list(csv.DictReader(io.StringIO((out / "grades.csv").read_text("utf-8-sig"))))
    assert [(row["score"], row["max_score"], row["remarks"]) for row in rows[:2]] == [("2", "2", ""), ("0", "2", "not handed in: times")]  # fmt: skip
    assert graded.learners[2].outcome is GradingOutcome.NOTHING, "who handed in nothing is told that"


def test_checks_that_cannot_be_imported_are_a_fault_even_if_nobody_handed_in_their_exercise(tmp_path: Path) -> None:
    course = make_course(tmp_path / "course")
    contents = course.autograder / "course.toml"
    contents.write_text(contents.read_text(encoding="utf-8").replace('"times"', '"times", "third"'), encoding="utf-8")
    course.checks("third").write_text(
        "import nothing_of_this_name\n\n\ndef test_a(grader):\n    pass\n", encoding="utf-8"
    )
    source, told = moodle(tmp_path / "all.zip", CLASS), list[Learner]()
    with bulk.opened(Course(course.root), source, tmp_path / "graded", order(exercises=("add", "third"))) as grading:
        bulk.carry_out(grading, [one for one in grading.pending() if one.files][:1], 1, told.append)
    (learner,) = told
    assert learner.missing == ("third",) and learner.faulty and learner.score is None
    assert learner.report is not None and "nothing_of_this_name" in learner.report.faults[0]


def test_what_counts_holds_nothing_that_changes(grade: Grade, tmp_path: Path) -> None:
    """No time, path, port or number of a process in `results`, though a hang's evidence has them; sorted, and small."""
    source = moodle(tmp_path / "all.zip", CLASS)
    grade(source, tmp_path / "graded")
    for path in (tmp_path / "graded" / "results").iterdir():
        raw = path.read_bytes()
        assert raw == store.pretty(json.loads(raw))
        assert not re.search(rb"seconds|/tmp|/home|waits in|pid|127\.0\.0\.1|unfinished", raw), path
        assert os.fsencode(tmp_path) not in raw
    details = (tmp_path / "graded" / "details" / "hank-1003.json").read_text()
    assert re.search(r'"seconds": "[\d.–]+ s"', details) and str(tmp_path) not in details


@pytest.mark.slow
def test_the_same_class_gives_the_same_bytes_in_any_order(grade: Grade, tiny: Course, tmp_path: Path) -> None:
    """However many at once, in another folder, with others in the class: what counts is the same."""
    source = moodle(tmp_path / "all.zip", CLASS)
    grade(source, tmp_path / "one")
    code, said, _ = finish(command(tiny, source, "--out", tmp_path / "three", "--seed", 7, "-j", 3))
    assert code == 0 and files(tmp_path / "one") == files(tmp_path / "three"), said
    grade(source, tmp_path / "other", order(seed=8))
    one, other = files(tmp_path / "one"), files(tmp_path / "other")
    assert [name for name in one if one[name] == other[name]] == [], "another seed draws other numbers"
    few = moodle(tmp_path / "few.zip", {name: CLASS[name] for name in ("Ada Lovelace", "Zoë =1+1")})
    graded, _ = grade(few, tmp_path / "few")
    assert (tmp_path / "few" / "results" / IDS[0]).with_suffix(".json").read_bytes() == one[f"{IDS[0]}.json"]
    assert [learner.seed for learner in graded.learners] == [
        seed_of(7, learner.id, learner.digest) for learner in graded.learners
    ]


def test_no_report_tells_the_next_seed(grade: Grade, tmp_path: Path) -> None:
    """A new file draws other inputs, in the same class; and the class's seed cannot be found by trying."""
    graded, _ = grade(
        moodle(tmp_path / "one.zip", {"Ada Lovelace": CLASS["Ada Lovelace"]}), tmp_path / "out", order(seed=None)
    )
    more = {name: content + "\n" for name, content in CLASS["Ada Lovelace"].items()}
    again, _ = grade(moodle(tmp_path / "two.zip", {"Ada Lovelace": more}), tmp_path / "out", order(seed=None))
    first, second = graded.learners[0], again.learners[0]
    assert graded.seed == again.seed and graded.seed.bit_length() > 40
    assert first.digest != second.digest and first.seed != second.seed


@pytest.mark.slow
def test_a_terminal_gets_a_bar(tiny: Course, tmp_path: Path) -> None:
    """With how many of how many, and what was refused; no line for each learner."""
    source = moodle(tmp_path / "all.zip", {name: CLASS[name] for name in ("Ada Lovelace", "Nobody")})
    ours, theirs = os.openpty()
    environment = {
        **os.environ,
        "LOCKSTEP_COURSE": str(tiny.root),
        "PYTHONPATH": SOURCE,
        "COLUMNS": "120",
        "TERM": "xterm",
        "LOCKSTEP_ISOLATION": "none",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "lockstep", "grade", str(source), "--out", str(tmp_path / "graded"), "--allow-unisolated"],
        stdout=theirs, stdin=subprocess.DEVNULL, env=environment, start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    said = b""
    try:
        while chunk := os.read(ours, 65536):
            said += chunk
    except OSError:  # Linux's way to say that nobody is at the other end
        pass
    os.close(ours)
    assert process.wait(SECONDS) == 0
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", said.decode())
    assert "2/2" in text and "━" in text and "1 with nothing to grade" in text and "ada-lovelace-1001: " not in text
    assert "-:--" not in text and "0/2 less than a minute left" in text and re.search(r"2/2 in \d+ s", text)
    assert re.search(r"ada-lovelace-1001 +4 of 4 +2 of 2 +2 of 2\n", text.replace("\r", ""))


# Kills ---------------------------------------------------------------------------------------------------------------

TWO = {"Ada Lovelace": RIGHT, "Zoë =1+1": {"times": WRONG["times"]}}
TWO = {name: {f"{f}.py": text for f, text in work.items()} for name, work in TWO.items()}


def begun(process: subprocess.Popen[str], out: Path, results: Sequence[str]) -> list[int]:
    """Wait until these are graded and the next is at it; the processes at work then."""
    give_up = time.monotonic() + SECONDS
    while True:
        there = sorted(path.stem for path in (out / "results").glob("[!.]*.json"))
        theirs = descendants(process.pid)
        if there == sorted(results) and len(theirs) >= 2:
            return theirs
        assert time.monotonic() < give_up and process.poll() is None, (there, theirs, process.poll())
        time.sleep(0.02)


def wait_until_gone(pids: Sequence[int], seconds: float) -> list[int]:
    """Those that are still there after so long."""
    give_up = time.monotonic() + seconds
    while (left := [pid for pid in pids if running(pid)]) and time.monotonic() < give_up:
        time.sleep(0.02)
    return left


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, *(pytest.param(one, marks=pytest.mark.slow) for one in (signal.SIGINT, signal.SIGTERM))]
)
def test_ended_in_the_middle_it_goes_on_and_gives_the_same(
    number: signal.Signals, tiny: Course, grade: Grade, traps: Path, tmp_path: Path
) -> None:
    """SIGKILL, Ctrl-C and SIGTERM while the third of five is graded. Nothing of it stays; the first two are not done again."""
    source, out = moodle(tmp_path / "all.zip", WAITING), tmp_path / "graded"
    (traps / "go").touch()
    grade(source, tmp_path / "undisturbed")
    (traps / "go").unlink()
    process = command(tiny, source, "--out", out, "--seed", 7)
    theirs = begun(process, out, IDS[:2])
    time.sleep(0.3)  # the third is at it, or about to be: either way it is not done
    kept = {path: path.stat().st_mtime_ns for path in (out / "results").iterdir()}
    process.send_signal(number)
    left = wait_until_gone(theirs, 10.0)  # before the pipes are read to their end, which whoever stays would hold
    kill(left)
    code, said, err = finish(process)
    assert left == []
    if number == signal.SIGKILL:
        assert code == -9
    else:
        assert (code, err) == (130, "")
        assert said.splitlines()[-1] == "Interrupted: 2 of 5 are graded and kept. The same command goes on from there."
    assert not (out / "grades.csv").exists()
    (traps / "go").touch()
    graded, now = grade(source, out, ClassRequest(allow_unisolated=True))  # the seed is the one that was begun with
    assert now == [id for id in (learner.id for learner in graded.learners) if id not in IDS[:2]]
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert files(out) == files(tmp_path / "undisturbed")


class Killed(BaseException):
    """Stands for a SIGKILL, after which nothing of this process runs."""


@pytest.mark.slow
def test_a_kill_at_any_write_is_made_good(grade: Grade, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before and after each file gets its name, one instant after the other."""
    source = moodle(tmp_path / "all.zip", TWO)
    grade(source, tmp_path / "undisturbed")
    wanted = files(tmp_path / "undisturbed")
    replace = os.replace
    instant = 0
    while True:
        left = [instant]

        def dying(source: object, target: object, left: list[int] = left) -> None:
            if left[0] == 0:
                raise Killed
            replace(source, target)  # type: ignore[arg-type]
            if left[0] == 1:
                raise Killed
            left[0] -= 2

        out = tmp_path / f"killed-{instant}"
        with monkeypatch.context() as patch:
            patch.setattr(store.os, "replace", dying)
            try:
                grade(source, out)
            except Killed:
                pass
            else:
                break
        grade(source, out)
        assert files(out) == wanted, f"instant {instant}"
        instant += 1
    assert instant == 2 * len(["grading", "roster", *2 * ["details", "result"], "index", *2 * ["report"], "csv", "junit", "summary", *2 * ["gradescope"], "scores", "checks", "items", "worksheet", "feedback", "left out"])  # fmt: skip


def test_a_file_that_is_torn_or_does_not_fit_is_graded_again(grade: Grade, tmp_path: Path) -> None:
    source, out = moodle(tmp_path / "all.zip", TWO), tmp_path / "graded"
    grade(source, out)
    wanted, (ada, zoe) = files(out), (IDS[0], IDS[3])
    result, details = out / "results" / f"{ada}.json", out / "details" / f"{ada}.json"

    def spoil(path: Path, data: bytes | None) -> None:
        path.unlink() if data is None else path.write_bytes(data)
        assert grade(source, out)[1] == [ada]
        assert files(out) == wanted

    spoil(result, None)
    spoil(details, None)
    spoil(result, result.read_bytes()[:-40])
    spoil(details, details.read_bytes()[:-40])
    spoil(result, result.read_bytes().replace(b'"score": 2', b'"score": 3'))
    spoil(details, (out / "details" / f"{zoe}.json").read_bytes())
    assert grade(source, out)[1] == []


# Again ---------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_only_who_handed_in_something_new_is_graded_again(grade: Grade, tmp_path: Path) -> None:
    out = tmp_path / "graded"
    grade(moodle(tmp_path / "all.zip", CLASS), out)
    before = files(out)
    newer = {**CLASS, "Hank": {"add.py": RIGHT["add"]}, "Late": {"add.py": WRONG["add"]}}
    graded, now = grade(moodle(tmp_path / "newer.zip", newer), out)
    assert now == ["hank-1003", "late-1005"] and graded.learners[1].score == 2
    after = files(out)
    assert [name for name in before if before[name] != after[name]] == ["hank-1003.json", "grades.csv"]


@pytest.mark.slow
def test_one_learner_again_gives_the_same_bytes(tiny: Course, grade: Grade, tmp_path: Path) -> None:
    source, out = moodle(tmp_path / "all.zip", CLASS), tmp_path / "graded"
    grade(source, out)
    before = files(out)
    times = {path.name: path.stat().st_mtime_ns for path in (out / "results").iterdir()}
    code, said, err = finish(command(tiny, source, "--out", out, "--only", "hank-1003"))
    assert (code, err) == (0, "") and files(out) == before and "hank-1003: 0 of 2" in said
    after = {path.name: path.stat().st_mtime_ns for path in (out / "results").iterdir()}
    assert [name for name in times if times[name] != after[name]] == ["hank-1003.json"]
    code, _, err = finish(command(tiny, source, "--out", out, "--only", "hank"))
    assert code == 2 and "there is no learner 'hank': did you mean hank-1003?" in err


def test_other_checks_or_another_order_do_not_mix(grade: Grade, tiny: Course, tmp_path: Path) -> None:
    """They are refused, and nothing is touched; `--again` grades everybody anew."""
    source, out = moodle(tmp_path / "all.zip", TWO), tmp_path / "graded"
    grade(source, out)
    before = files(out)
    for other, said in (
        (order(seed=8), "with seed 7"),
        (order(exercises=("add",)), "for whatever was handed in"),
    ):
        with pytest.raises(CourseError, match=f"was begun {said}: .*--again"):
            grade(source, out, other)
    checks = tiny.root / "autograder" / "test_add.py"
    text = checks.read_text()
    try:
        checks.write_text(text + "\n\ndef test_one_more(grader):\n    '''One more.'''\n")
        with pytest.raises(CourseError, match=r"was begun with other checks than these: .*--again"):
            grade(source, out)
        assert files(out) == before
        graded, now = grade(source, out, order(again=True))
        assert len(now) == 2 and graded.learners[0].max_score == 5
    finally:
        checks.write_text(text)
    plan = json.loads((out / "grading.json").read_text())
    (out / "grading.json").write_text(json.dumps({**plan, "versions": {**plan["versions"], "torch": "1.0"}}))
    with pytest.raises(CourseError, match=r"with torch 1\.0, and this is 2"):
        grade(source, out)
    assert len(grade(source, out, order(again=True))[1]) == 2 and files(out) == before


def test_a_download_that_is_not_there_begins_nothing(grade: Grade, tmp_path: Path) -> None:
    """The right path, with other options, then begins it."""
    out = tmp_path / "graded"
    with pytest.raises(CourseError, match="there is no"):
        grade(tmp_path / "typo.zip", out, order(seed=1, exercises=("add",)))
    graded, _ = grade(moodle(tmp_path / "all.zip", TWO), out)
    assert graded.seed == 7


@pytest.mark.slow
def test_files_set_aside_are_told_to_the_teacher(tiny: Course, tmp_path: Path) -> None:
    """In the remarks, and in a line of the command."""
    two = {"Ada": {"add.py": RIGHT["add"], "add (1).py": "raise ValueError\n", "notes.py": "x = 1\n"}}
    out = tmp_path / "graded"
    _, said, _ = finish(command(tiny, moodle(tmp_path / "all.zip", two), "--out", out, "--seed", 7))
    (row,) = csv.DictReader(io.StringIO((out / "grades.csv").read_text("utf-8-sig")))
    assert "several files for add.py: " in row["remarks"] and "ignored, no exercise in it: notes.py" in row["remarks"]
    assert "Some files of 1 learner were set aside" in said


def test_a_policy_shows_in_every_file(tiny: Course, tmp_path: Path) -> None:
    """Also in the summary; an accommodation for nobody is told."""
    out, policy = tmp_path / "graded", tmp_path / "policy.toml"
    policy.write_text("[points]\nadd = 20\n\n[learner.nobody]\nextra_days = 3\n")
    source = moodle(tmp_path / "all.zip", {"Ada": {"add.py": RIGHT["add"]}})
    _, said, err = finish(command(tiny, source, "--out", out, "--seed", 7, "--policy", policy))
    (row,) = csv.DictReader(io.StringIO((out / "grades.csv").read_text("utf-8-sig")))
    assert (row["score"], row["max_score"]) == ("20", "20"), said + err
    assert "20 of 20" in (out / "summary.md").read_text()
    assert "Mind: the policy has an accommodation for 'nobody'" in said


@pytest.mark.slow
def test_folders_that_are_not_for_it_are_refused(grade: Grade, tiny: Course, traps: Path, tmp_path: Path) -> None:
    source, out = moodle(tmp_path / "all.zip", TWO), tmp_path / "graded"
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("mine")
    with pytest.raises(CourseError, match="has other things in it"):
        grade(source, tmp_path / "full")
    (tmp_path / "work" / "ada").mkdir(parents=True)
    for nested in (tmp_path / "work", tmp_path / "work" / "graded", tmp_path):
        with pytest.raises(CourseError, match="lie in each other"):
            grade(tmp_path / "work", nested)
    grade(source, out)
    before = files(out)
    other = moodle(tmp_path / "group2.zip", {"Eve": {"add.py": RIGHT["add"]}})
    with pytest.raises(
        CourseError, match=r"has results of learners who are not in .*group2\.zip \(ada-lovelace-1001, zoe"
    ):
        grade(other, out)
    assert files(out) == before
    waiting = moodle(tmp_path / "waiting.zip", WAITING)
    process = command(tiny, waiting, "--out", tmp_path / "busy", "--seed", 7)
    begun(process, tmp_path / "busy", IDS[:2])
    with pytest.raises(CourseError, match="another grading is at work in"):
        grade(waiting, tmp_path / "busy")
    process.send_signal(signal.SIGINT)
    assert finish(process)[0] == 130


# Faults of ours ------------------------------------------------------------------------------------------------------


def trapped(trap: str) -> dict[str, dict[str, str]]:
    return {**TWO, "Mallory": {"add.py": f"# trap: {trap}\n{RIGHT['add']}"}}


def test_a_fault_that_passes_costs_nothing(grade: Grade, tmp_path: Path) -> None:
    graded, now = grade(moodle(tmp_path / "all.zip", trapped("dies once")), tmp_path / "graded")
    assert [(one.id, one.attempts, one.score) for one in graded.learners] == [(IDS[0], 1, 4), ("mallory-1003", 2, 2), (IDS[3], 1, 1)]  # fmt: skip
    assert graded.exit_code == 0 and len(now) == 3


@pytest.mark.slow
@pytest.mark.parametrize("trap", ["dies", "raises"])
def test_a_fault_that_stays_is_named_costs_nothing_and_is_tried_again(
    trap: str, grade: Grade, tiny: Course, tmp_path: Path
) -> None:
    source, out = moodle(tmp_path / "all.zip", trapped(trap)), tmp_path / "graded"
    code, said, err = finish(command(tiny, source, "--out", out, "--seed", 7))
    assert (code, err) == (1, "")
    assert "2 graded · 1 fault of the grader" in said and "broke on 1 submission (mallory-1003)" in said
    result = json.loads((out / "results" / "mallory-1003.json").read_bytes())
    assert (result["outcome"], result["score"], result["max_score"], result["exercises"]) == ("fault of the grader", None, None, [])  # fmt: skip
    details = json.loads((out / "details" / "mallory-1003.json").read_bytes())
    assert details["attempts"] == 3 and details["report"]["faults"]
    assert not (out / "gradescope" / "mallory-1003.json").exists()
    (row,) = (r for r in csv.DictReader(io.StringIO((out / "grades.csv").read_text("utf-8-sig"))) if r["learner"] == "mallory-1003")  # fmt: skip
    assert (row["outcome"], row["score"]) == ("fault of the grader", "")
    assert grade(source, out)[1] == ["mallory-1003"], "the same command tries those again, and nobody else"


@pytest.mark.slow
def test_a_grading_without_end_is_our_fault(grade: Grade, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its worker is ended at the deadline; the others get their grades."""
    monkeypatch.setattr(bulk, "SECONDS_AN_EXERCISE", 0.0)
    monkeypatch.setattr(bulk, "TRIES", 1)
    grade(moodle(tmp_path / "two.zip", TWO), tmp_path / "warm")
    graded, _ = grade(moodle(tmp_path / "all.zip", trapped("waits")), tmp_path / "graded", seconds=30.0)
    assert [one.outcome for one in graded.learners] == [
        GradingOutcome.GRADED,
        GradingOutcome.FAULT,
        GradingOutcome.GRADED,
    ]
    report = graded.learners[1].report
    assert report is not None and report.faults == ("the grading did not end within 30 s",)


# Apart ---------------------------------------------------------------------------------------------------------------


def test_strangers_code_without_isolation_asks_for_a_flag(grade: Grade, tiny: Course, tmp_path: Path) -> None:
    source, out = moodle(tmp_path / "all.zip", TWO), tmp_path / "graded"
    code, said, err = finish(grade_command(tiny, source, "--out", out))
    assert (code, said) == (2, "") and len(err.splitlines()) == 1
    assert "could read and change whatever you can" in err and "--allow-unisolated" in err
    assert not out.exists()
    assert {one.isolation for one in grade(source, out)[0].learners} == {"none"}


def test_what_keeps_apart_is_used_and_told(grade: Grade, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without being allowed anything; the points are the same."""
    monkeypatch.delenv("LOCKSTEP_ISOLATION")
    isolation.tier.cache_clear()
    if not isolation.tier().keeps_apart:
        pytest.skip(" ".join(("not run:", *(isolation.missing() or ()))))
    source = moodle(tmp_path / "all.zip", TWO)
    graded, _ = grade(source, tmp_path / "apart", order(allow_unisolated=False))
    assert {one.isolation for one in graded.learners} == {one.report.isolation for one in graded.learners if one.report} == {isolation.tier().name}  # fmt: skip
    assert graded.isolation == isolation.tier().said
    monkeypatch.setenv("LOCKSTEP_ISOLATION", "none")
    isolation.tier.cache_clear()
    grade(source, tmp_path / "here")
    assert files(tmp_path / "apart") == files(tmp_path / "here")


def test_a_regrade_of_all_can_take_a_new_seed(tmp_path: Path) -> None:
    """Without --again another seed is refused."""
    (tmp_path / "class" / "ada").mkdir(parents=True)
    (tmp_path / "class" / "ada" / "train_ddp.py").write_text("x = 1")

    def kept(**how: int) -> int:
        request = ClassRequest(("train_ddp",), how.get("seed"), again="again" in how, allow_unisolated=True)
        with bulk.opened(Course(Path(__file__).parents[2]), tmp_path / "class", tmp_path / "out", request) as grading:
            return grading.plan.seed

    assert kept(seed=1) == kept() == 1
    with pytest.raises(CourseError, match="with seed 1"):
        kept(seed=2)
    assert kept(seed=2, again=1) == kept() == 2
