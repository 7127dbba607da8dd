"""The process that stays warm between commands at a terminal: found again, private, and gone when it should be."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import ROOT
from support.command_line import CommandLine, only, waiting, warm

from lockstep.course import Course


def gone(pid: int, seconds: float = 10.0) -> bool:
    """True when the process has ended within so long."""
    give_up = time.monotonic() + seconds
    while time.monotonic() < give_up:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


@pytest.fixture
def home(tmp_path: Path) -> Iterator[dict[str, str]]:
    """An environment in which commands stay warm, in a folder of their own."""
    with warm(tmp_path) as environment:
        yield environment


pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at /proc")


def test_second_command_finds_the_first_ones_process(
    lockstep: CommandLine, course: Course, home: dict[str, str], tmp_path: Path
) -> None:
    """One process serves both, in a folder that only its owner may enter, with the same answers as without it."""
    arguments = ("check", "average_gradients", "--submission", str(course.solutions), "--json", "--seed", "5")
    first = lockstep(*arguments, **home)
    (pid,) = waiting(tmp_path)
    second = lockstep(*arguments, **home)
    assert waiting(tmp_path) == [pid]
    plain = lockstep(*arguments, LOCKSTEP_WARM="0")
    for done in (first, second, plain):
        assert done.returncode == 0, done.stderr
        assert [check["outcome"] for check in only(done.stdout)["exercises"][0]["checks"]].count("passed") > 3
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_usage_errors_come_back(lockstep: CommandLine, home: dict[str, str], tmp_path: Path) -> None:
    """A submission that is not there is said before any process is started."""
    done = lockstep("check", "setup_ddp", "--submission", str(tmp_path / "nothing.py"), **home)
    assert done.returncode == 2 and "there is no" in done.stderr
    assert waiting(tmp_path) == []


@pytest.mark.slow
def test_ctrl_c_ends_the_grading(course: Course, home: dict[str, str], tmp_path: Path) -> None:
    """An interrupted command leaves no grading and no rank behind."""
    endless = tmp_path / "setup_ddp.py"
    up = tmp_path / "up"
    endless.write_text(f"import time\nopen({str(up)!r}, 'w').close()\nwhile True:\n    time.sleep(0.01)\n")
    command = [sys.executable, "-m", "lockstep", "check", "setup_ddp", "--submission", str(endless)]
    environment = {**os.environ, **home, "PYTHONPATH": str(ROOT / "src")}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    give_up = time.monotonic() + 60
    while time.monotonic() < give_up and not up.exists():
        time.sleep(0.05)
    pids = waiting(tmp_path)
    assert pids and up.exists()
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130, process.stdout and process.stdout.read()
    assert all(gone(pid) for pid in pids)
