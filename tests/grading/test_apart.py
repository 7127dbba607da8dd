"""What reads strangers' texts may die or be slow, and the next text is read all the same."""

import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path

from lockstep.grading.apart import read_apart
from lockstep.grading.similar import stream_of

ROOT = Path(__file__).resolve().parents[2]


def test_it_is_read_in_another_process() -> None:
    assert read_apart(os.getpid, otherwise=0) not in (0, os.getpid())
    assert read_apart(stream_of, "x = 1", otherwise=()) == stream_of("x = 1") != ()


def test_what_dies_raises_or_takes_too_long_costs_only_itself() -> None:
    first = read_apart(os.getpid, otherwise=0)
    assert read_apart(int, "none", otherwise=7) == 7
    assert read_apart(os.getpid, otherwise=0) == first
    assert read_apart(ctypes.string_at, 0, otherwise=b"died") == b"died"
    second = read_apart(os.getpid, otherwise=0)
    assert read_apart(time.sleep, 600, otherwise=None, seconds=0.2) is None
    third = read_apart(os.getpid, otherwise=0)
    assert len({first, second, third, 0}) == 4
    assert read_apart(bytes, 3 << 30, otherwise=b"too much") == b"too much"
    assert read_apart(os.getpid, otherwise=0) == third


def test_it_ends_with_who_asked() -> None:
    code = "import os; from lockstep.grading.apart import read_apart; print(read_apart(os.getpid, otherwise=0))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert not Path(f"/proc/{int(done.stdout)}").exists()
