"""The grader's exam in security: no hostile submission gains a point, breaks a grading or leaves anything behind.

Each file of `tests/submissions/hostile` says in its first lines:

    # exercise: train_ddp
    # family: faking ddp
    # verdict: different-weights         the diagnoses, all of them and in order; `… or …`, where chance decides
    # without: wrong/train_ddp/x         the same without the trick, which must not score less; `stub` scores nothing
    # protection: judge                  what stops it: `judge`, the grader's design alone; `sandbox`, isolation only;
    #                                    `not defended`, nothing (SECURITY.md says so, and the case is expected to fail)
    # why: one sentence

They are graded by a process of its own, in a copy of the course, with a home and a temporary folder of its own, so that
what is left can be counted.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from support.one_learner import class_of

from lockstep.authoring.bank import find
from lockstep.course import Course
from lockstep.grading import isolation
from lockstep.grading.exports import csv_grades, gradescope, junit, summary_md
from lockstep.grading.policy import Policy, apply
from lockstep.grading.request import GradeRequest
from lockstep.grading.text import report_text
from lockstep.grading.verdict import CheckOutcome, Report, from_json
from lockstep.grading.worker import Worker
from lockstep.ranks import processes
from lockstep.ranks.folder import remove_folder

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
BANK = ROOT / "tests" / "submissions"
HOSTILE = sorted((BANK / "hostile").glob("*/*.py"))
FAMILIES = ("leaving early", "forging results", "fooling comparisons", "patching", "hunting for answers", "faking ddp",
            "exhausting", "presenting")  # fmt: skip
CHEAP, CHEAPEST = "average_gradients", "device_report"
PATIENCE = 200.0
MOST_HELD = 1 << 20  # KiB that the process that grades may ever hold: with torch in it, it begins with 300,000
SHARED = [Path(place) for place in ("/tmp", "/var/tmp", "/dev/shm") if os.path.isdir(place)]
LEFT = re.compile(r"hostile-left|pickle-bomb")


def said(path: Path) -> dict[str, str]:
    """What the file's head says."""
    head = path.read_text(encoding="utf-8").split("\n\n")[0]
    return dict(re.findall(r"^# (exercise|family|verdict|without|protection|why): *(.+)$", head, re.MULTILINE))


def label(path: Path) -> str:
    """`patching/builtins`."""
    return f"{path.parent.name}/{path.stem}"


def isolated() -> bool:
    """True where gradings can run in a sandbox on this machine."""
    return isolation.works(isolation.TIERS[0])


class Arena:
    """A copy of the course, a process that grades in it, and a home and a temporary folder that only it uses."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.course = Course(folder / "course")
        self.home, self.temporary = folder / "home", folder / "tmp"
        for place in (self.course.root, self.home, self.temporary):
            place.mkdir()
        for name in ("autograder", "solutions", "exercises"):
            ignored = shutil.ignore_patterns("__pycache__", "*.pyc", ".*")
            shutil.copytree(ROOT / name, self.course.root / name, ignore=ignored)
        self.worker = Worker()
        self.scores: dict[str, int] = {}
        self.grade(CHEAP, self.course.solutions)
        self.clean = self.files()  # with what torch itself leaves in a temporary folder

    def grade(self, exercise: str, submission: Path, seed: int | None = None) -> Report:
        """Grade it; when that takes too long, the process is ended, and the report is a fault."""
        ours = {"HOME": str(self.home), "TMPDIR": str(self.temporary)}
        before = {name: os.environ.get(name) for name in ours}
        os.environ.update(ours)
        try:
            self.worker._started(self.course)  # takes the environment as it is now
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
        watchdog = threading.Timer(PATIENCE, self._give_up)
        watchdog.start()
        try:
            return self.worker.grade(self.course, GradeRequest((exercise,), submission, seed=seed))
        finally:
            watchdog.cancel()

    def grade_in_sandbox(self, exercise: str, submission: Path) -> Report:
        """The same in a sandbox, by a process that ends with the grading."""
        code = (
            "import json, sys; from pathlib import Path; from lockstep.course import Course; "
            "from lockstep.grading.grade import grade; from lockstep.grading.request import GradeRequest; "
            "root, name, file = sys.argv[1:]; request = GradeRequest((name,), Path(file), isolation='sandbox'); "
            "print(json.dumps(grade(Course(Path(root)), request).to_json()))"
        )
        command = [sys.executable, "-c", code, str(self.course.root), exercise, str(submission)]
        environment = {
            **os.environ,
            "HOME": str(self.home),
            "TMPDIR": str(self.temporary),
            "PYTHONPATH": str(ROOT / "src"),
        }
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=PATIENCE, cwd=self.course.root
        )
        assert done.returncode == 0, done.stderr
        return from_json(json.loads(done.stdout.splitlines()[-1]))

    def _give_up(self) -> None:
        if self.worker._process is not None:
            for pid in processes.descendants(self.worker._process.pid):
                os.kill(pid, signal.SIGKILL)
            self.worker._process.kill()

    def points_without(self, without: str, exercise: str) -> int:
        """What the same file scores without the trick."""
        if without == "stub":
            return 0
        if without not in self.scores:
            entry = find(ROOT, without.removeprefix("wrong/"))
            assert entry is not None, without
            with tempfile.TemporaryDirectory() as folder:
                (result,) = self.grade(exercise, entry.hand_in(self.course, Path(folder))).exercises
            self.scores[without] = result.score
        return self.scores[without]

    @property
    def pid(self) -> int:
        """The process that grades."""
        assert self.worker._process is not None
        return self.worker._process.pid

    def held(self) -> int:
        """KiB that the process that grades has held at most; 0 where the system doesn't tell."""
        try:
            found = re.search(r"VmHWM:\s*(\d+)", Path(f"/proc/{self.pid}/status").read_text())
        except OSError:
            return 0
        return int(found[1]) if found else 0

    def files(self) -> dict[str, tuple[int, int]]:
        """All that lies in the course's copy, at home and in the temporary folder, and what lies about elsewhere."""
        found = {}
        places = [place for place in self.folder.iterdir() if place != self.temporary]
        inside = [path for place in places for path in place.rglob("*")]
        shared = [path for place in SHARED for path in place.iterdir() if LEFT.search(path.name)]
        for path in (*inside, *self.temporary.iterdir(), *shared):
            if path.is_file():
                found[str(path)] = (path.stat().st_size, path.stat().st_mtime_ns)
            elif path.parent == self.temporary:
                found[str(path)] = (0, 0)
        return found

    def strangers(self) -> list[str]:
        """Processes of this arena that are neither the one that grades nor its warm server."""
        mark = f"HOME={self.home}\0".encode()
        found = set(processes.descendants(self.pid))
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                try:
                    if mark in Path(f"/proc/{entry}/environ").read_bytes():
                        found.add(int(entry))
                except OSError:
                    continue
        found.discard(self.pid)
        said = {pid: processes.command_line(pid) for pid in found}
        heads = {
            pid for pid, command in said.items() if "lockstep.ranks.server" in command and _parent(pid) == self.pid
        }
        return [f"{pid} {command}" for pid, command in said.items() if pid not in heads and command]

    def close(self) -> None:
        """End the process, and remove all."""
        self.worker.stop()
        remove_folder(str(self.folder))


def _parent(pid: int) -> int:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        return int(stat[stat.rindex(")") + 2 :].split()[1])
    except (OSError, ValueError):
        return 0


@pytest.fixture(scope="module")
def arena() -> Iterator[Arena]:
    """One for all cases: what one of them breaks, those after it meet."""
    one = Arena(Path(tempfile.mkdtemp(prefix="lh-")))
    yield one
    one.close()


def check_nothing_left(arena: Arena) -> None:
    """No process and no file; those that are dying are given time, which on a busy machine takes some."""
    patience = time.monotonic() + 30
    while (arena.strangers() or arena.files() != arena.clean) and time.monotonic() < patience:
        time.sleep(0.05)
    assert not arena.strangers()
    left, clean = arena.files(), arena.clean
    arena.clean = left  # so that one who leaves something does not fail those after it
    assert not [path for path in {*left, *clean} if left.get(path) != clean.get(path)]


def check_texts(report: Report) -> None:
    """Whatever the submission said: every form of the report can be written and read, and holds no active character."""
    texts = list(_texts(report.to_json()))
    for text in texts:
        assert len(text) < 300_000
        hidden = {c for c in text if unicodedata.category(c) in ("Cc", "Cs") and c not in "\n\t"}
        assert not hidden, (hidden, text[:200])
        text.encode()
    report_text(report).encode()
    graded = class_of(report, "=HYPERLINK(1)")
    grades = apply(Policy(), graded)
    ElementTree.fromstring(junit.junit(graded).encode())
    json.dumps(gradescope.results(report), ensure_ascii=False).encode()
    summary = summary_md.class_md(graded, grades)
    assert "<script" not in summary and "\n# passed" not in summary and "::error" not in summary
    assert '"=' not in csv_grades.grades_csv(graded, grades)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)


@pytest.mark.parametrize("path", HOSTILE, ids=label)
def test_hostile_gains_nothing(path: Path, arena: Arena, request: pytest.FixtureRequest) -> None:
    """The expected verdict, no point gained, nothing left, the grader alive."""
    head = said(path)
    if head["protection"] == "sandbox" and not isolated():
        pytest.skip("only a sandbox stops this one, and there is none here")
    if head["protection"] == "not defended":
        request.applymarker(pytest.mark.xfail(strict=True, reason="not defended, as SECURITY.md says"))
    before = arena.pid
    grade = arena.grade_in_sandbox if head["protection"] == "sandbox" else arena.grade
    report = grade(head["exercise"], path)
    shown = report_text(report)
    assert not report.faults, report.faults
    assert arena.pid == before, "the process that grades was ended"
    (result,) = report.exercises
    found = [diagnosis.id for diagnosis in result.diagnoses]
    assert ", ".join(found) in head["verdict"].split(" or "), shown
    assert result.score <= arena.points_without(head["without"], head["exercise"]), shown
    assert len(result.checks) == len(arena_checks(arena, head["exercise"])), shown
    check_nothing_left(arena)
    check_texts(report)
    assert arena.held() < MOST_HELD
    if set(found) & {"broke-the-run", "unreadable"} or head["family"] == "exhausting":
        check_grades_others(arena)


def check_grades_others(arena: Arena) -> None:
    """A right submission gets all its points."""
    (right,) = arena.grade(CHEAPEST, arena.course.solutions).exercises
    assert right.passed, report_text(Report(0, (right,)))


_known: dict[str, list[str]] = {}


def arena_checks(arena: Arena, exercise: str) -> list[str]:
    """The checks that there are: none may be lost on the way."""
    if exercise not in _known:
        text = arena.course.checks(exercise).read_text(encoding="utf-8")
        _known[exercise] = re.findall(r"^def (test_\w+)", text, re.MULTILINE)
    return _known[exercise]


def test_right_submission_after_them(arena: Arena) -> None:
    """After all of them the grader gives a right submission its full points, and a stub none."""
    check_grades_others(arena)
    (right,) = arena.grade(CHEAP, arena.course.solutions).exercises
    assert right.passed, report_text(Report(0, (right,)))
    (stub,) = arena.grade(CHEAP, arena.course.exercises).exercises
    assert stub.score == 0 and stub.checks[0].outcome is CheckOutcome.FAILED


def test_bank_is_large_enough() -> None:
    """150 cases and more, ten or more of each family, each with a complete head."""
    heads = {path: said(path) for path in HOSTILE}
    assert len(heads) >= 150
    for path, head in heads.items():
        assert len(head) == 6, path
        assert head["family"].replace(" ", "_") == path.parent.name, path
        assert head["protection"] in ("judge", "sandbox", "not defended"), path
    for family in FAMILIES:
        assert sum(head["family"] == family for head in heads.values()) >= 10, family
