"""Calling `lockstep …` as a learner or a teacher would."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from . import ROOT

CommandLine = Callable[..., "subprocess.CompletedProcess[str]"]


def call(
    *arguments: str, cwd: Path = ROOT, stdin: str | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """`lockstep ARGUMENTS` in a process of its own, with a deadline."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "200", **environment}
    if "LOCKSTEP_SUBMISSION" not in environment:
        env.pop("LOCKSTEP_SUBMISSION", None)
    command = [sys.executable, "-m", "lockstep", *arguments]
    return subprocess.run(command, cwd=cwd, env=env, input=stdin or "", capture_output=True, text=True, timeout=180)


def waiting(folder: Path) -> list[int]:
    """Process ids of the warm processes whose socket lies in this folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if "lockstep.grading.worker" in command and str(folder) in command:
                found.append(int(entry.name))
    return found


@contextlib.contextmanager
def warm(folder: Path) -> Iterator[dict[str, str]]:
    """An environment in which one process grades for all commands, as at a terminal, with its socket in this folder."""
    yield {"LOCKSTEP_WARM": "1", "XDG_RUNTIME_DIR": str(folder)}
    for pid in waiting(folder):
        os.kill(pid, signal.SIGKILL)


def at_terminal(columns: int, *arguments: str, cwd: Path = ROOT, **environment: str) -> str:
    """What `lockstep ARGUMENTS` shows in a real pseudo-terminal of so many columns, escape sequences and all."""
    unset = ("COLUMNS", "NO_COLOR", "FORCE_COLOR", "LOCKSTEP_SUBMISSION", "PYTEST_CURRENT_TEST")
    env = {key: value for key, value in os.environ.items() if key not in unset}
    env |= {"PYTHONPATH": str(ROOT / "src"), "TERM": "xterm-256color", "LOCKSTEP_WARM": "0", **environment}
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    command = ["timeout", "-k", "5", "180", sys.executable, "-m", "lockstep", *arguments]
    with subprocess.Popen(command, cwd=cwd, env=env, stdin=theirs, stdout=theirs, stderr=theirs):
        os.close(theirs)
        seen = b""
        with contextlib.suppress(OSError):  # Linux reports the end of a terminal as an error
            while chunk := os.read(ours, 65536):
                seen += chunk
    os.close(ours)
    return seen.decode().replace("\r\n", "\n")


def plain(text: str) -> str:
    """Without colors."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def screen(text: str) -> str:
    """What is left on the terminal: without colors, and without the line that was erased and written again."""
    lines, row, fresh = [""], 0, False
    for part in re.split(r"(\n|\r|\x1b\[[0-9;?]*[A-Za-z])", text):
        if part == "\n":
            row, fresh = row + 1, False
            lines += [""] * (row == len(lines))
        elif part == "\r":
            fresh = True  # what follows writes over what is there
        elif part == "\x1b[2K":
            lines[row] = ""
        elif part == "\x1b[1A":
            row -= 1
        elif part and not part.startswith("\x1b"):
            lines[row], fresh = (part if fresh else lines[row] + part), False
    return "\n".join(line.rstrip() for line in lines)


def only(text: str) -> dict[str, Any]:
    """The one JSON object that stdout holds, and nothing else."""
    lines = text.strip().splitlines()
    assert len(lines) == 1, f"stdout holds {len(lines)} lines: {text[:500]}"
    found = json.loads(lines[0])
    assert isinstance(found, dict)
    return found
