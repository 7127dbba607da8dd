"""A learner's walk: a fresh copy of the course, from the first stub to the last exercise, by the commands of the README alone.

In each chapter the stubs are checked as they are, the hints are asked for until there are none, the exercises are written,
and the chapter is checked again. `status` has to say the truth in between. What is written are the solutions as a reader
would have them: without markers and canaries, which a learner's copy does not hold.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from msgspec import toml
from support.command_line import warm

from lockstep import cluster
from lockstep.authoring.release import release
from lockstep.course import Course, find
from lockstep.course.stubs import SCRIPT, without_markers

ROOT = Path(__file__).resolve().parents[1]
COURSE = find(ROOT)
CHAPTERS = COURSE.chapters
SECONDS = 420


@dataclass
class Learner:
    """Somebody who has nothing but the copy."""

    copy: Path
    runtime: Path

    def lockstep(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """`./lockstep …`, at a terminal 200 characters wide."""
        dropped = ("PYTHONPATH", "LOCKSTEP_COURSE", "LOCKSTEP_SUBMISSION", "CLINIC_TICKET")
        environment = {key: value for key, value in os.environ.items() if key not in dropped}
        environment |= {"LOCKSTEP_PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "COLUMNS": "200",
                        "LOCKSTEP_WARM": "1", "XDG_RUNTIME_DIR": str(self.runtime)}  # fmt: skip
        command = ["./lockstep", *arguments]
        return subprocess.run(
            command, cwd=self.copy, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
        )

    def check(self, names: tuple[str, ...]) -> dict[str, list[dict[str, Any]]]:
        """The checks of each exercise, as `--json` tells them."""
        done = self.lockstep("check", *names, "--json")
        assert done.returncode in (0, 1), (done.returncode, done.stdout[-2000:], done.stderr[-2000:])
        return {one["name"]: one["checks"] for one in json.loads(done.stdout)["exercises"]}

    def status(self) -> str:
        """What `status` shows."""
        done = self.lockstep("status")
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def learner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Learner]:
    """With a copy of the course that is as new; the process that stays warm for it is ended at the end."""
    copy = tmp_path_factory.mktemp("walk") / "course"
    release(COURSE, folder=copy)
    with tempfile.TemporaryDirectory(prefix="walk-") as runtime, warm(Path(runtime)):  # a short path: it holds a socket
        yield Learner(copy, Path(runtime))


def outcomes(checks: list[dict[str, Any]]) -> set[str]:
    """Which outcomes there are."""
    return {check["outcome"] for check in checks}


def line_of(title: str, status: str) -> str:
    """The first line of `status` that names this chapter."""
    return next(line for line in status.splitlines() if title in line)


def answered(text: str, case: str, copy: Path) -> str:
    """A clinic's file with the rank that is to blame under the ticket that this learner drew: as `clinic_data.draw` has it."""
    known = toml.decode((copy / "autograder" / "clinic" / "cases.toml").read_text(encoding="utf-8"))[case]
    if known["guilty"] != "drawn":
        return text
    ticket = (copy / "exercises" / "clinic" / "ticket.txt").read_text(encoding="utf-8").strip()
    rank = int.from_bytes(hashlib.sha256(f"{ticket}/{case}".encode()).digest()[:4], "big") % known["ranks"]
    changed, count = re.subn(r"^RANK = .*$", f"RANK = {rank}", text, flags=re.MULTILINE)
    assert count == 1, case
    return changed


def written(course: Course, name: str, copy: Path) -> None:
    """The exercise, done."""
    for suffix in (".py", SCRIPT):
        solution = course.solutions / f"{name}{suffix}"
        if solution.is_file():
            text = without_markers(solution.read_text(encoding="utf-8"))
            if name.startswith("clinic/"):
                text = answered(text, name.partition("/")[2], copy)
            (copy / "exercises" / f"{name}{suffix}").write_text(text, encoding="utf-8")


def test_the_chapters_have_all_exercises() -> None:
    """So that the walk grades each reference."""
    assert sorted(name for chapter in CHAPTERS for name in chapter.exercises) == sorted(COURSE.names)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="not run: finds the warm process in /proc")
@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(CHAPTERS)), ids=[chapter.name for chapter in CHAPTERS])
def test_from_the_stubs_to_the_end_of_the_chapter(learner: Learner, number: int) -> None:
    chapter = CHAPTERS[number]
    of = len(chapter.exercises)
    assert f"exercises 0/{of}" in line_of(chapter.title, learner.status())

    for name, checks in learner.check(chapter.exercises).items():
        assert "failed" in outcomes(checks), f"the stub of {name} passes"
        first = next(check for check in checks if check["outcome"] == "failed")
        if not name.startswith("clinic/"):
            assert first["diagnosis"]["id"] == "not-implemented", (name, first)
        assert first["diagnosis"]["message"], name

    for name in chapter.exercises:
        asked = learner.lockstep("hint", name)
        assert asked.returncode == 0, (name, asked.stderr)
        found = re.search(r"Hint 1 of (\d+)", asked.stdout)
        assert found and int(found[1]) >= 2, (name, asked.stdout)
        for nth in range(2, int(found[1]) + 1) if not name.startswith("clinic/") else ():
            assert f"Hint {nth} of {found[1]}" in learner.lockstep("hint", name).stdout, name

    for name in chapter.exercises:
        written(COURSE, name, learner.copy)
    lacking = set() if cluster.available("slurm") is None else {"not run"}
    solved = learner.check(chapter.exercises)
    for name, checks in solved.items():
        told = [(check["id"], check["diagnosis"]) for check in checks if check["outcome"] != "passed"]
        assert outcomes(checks) - lacking == {"passed"}, (name, told)

    after = learner.status()
    complete = of if not lacking else of - sum("not run" in outcomes(checks) for checks in solved.values())
    assert f"exercises {complete}/{of}" in line_of(chapter.title, after)
    assert learner.lockstep("solution", "-y", chapter.exercises[0]).returncode == 2, "a learner's copy has solutions"
