"""The client of a process that grades on request and stays warm (`worker_process`): torch and the checks are imported
once, not for every check.

`Worker` starts a process of its own, which ends with it: for a notebook's `%check`, or to grade a class. `shared` finds
one that earlier commands of the same user left waiting, or starts it, for `./lockstep check` at a terminal.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any

import msgspec

from ..course import Course, CourseError
from ..ranks.client import child_environment
from .request import GradeRequest, OnCheck
from .stamp import stamp
from .verdict import CheckResult, Report

START_SECONDS = 60.0
COMMAND = (sys.executable, "-m", "lockstep.grading.worker_process")
GONE = "the process that grades ended without a word: ./lockstep doctor"


# What they say to each other, one JSON object a line: a GradeRequest is answered with a `Concluded` for each check, and
# then with `Graded` or `Problem`.


class Concluded(msgspec.Struct, tag=True):
    exercise: str
    check: CheckResult


class Graded(msgspec.Struct, tag=True):
    report: Report


class Problem(msgspec.Struct, tag=True):
    """The message of a CourseError."""

    message: str


Answer = Concluded | Graded | Problem


def to_line(message: GradeRequest | Answer) -> str:
    """A message as a line. (json's escapes keep text that is no valid Unicode, which msgspec's encoder refuses.)"""
    return json.dumps(msgspec.to_builtins(message, enc_hook=lambda path: str(path.resolve()))) + "\n"


def from_line(line: str, kind: Any) -> Any:
    """A message of this kind. Raises ValueError for anything else."""
    return msgspec.convert(json.loads(line), kind, dec_hook=lambda path, text: path(text))


# The client -------------------------------------------------------------------------------------------------------


class Worker:
    """A process of its own, started at the first request, and again after it was ended."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def grade(self, course: Course, request: GradeRequest, on_check: OnCheck | None = None) -> Report:
        """As `grade.grade`, in that process. A KeyboardInterrupt ends the grading and all that it had started."""
        process = self._started(course)
        assert process.stdin is not None and process.stdout is not None
        try:
            return _grade(process.stdin, process.stdout, request, on_check)
        except (OSError, EOFError):
            self.stop()
            return Report(0, (), request.device, (GONE,))
        except KeyboardInterrupt:
            self.stop()
            raise

    def kill(self) -> None:
        """End the process from another thread. The thread that waits for its answer gets a report with a fault."""
        process = self._process
        if process is not None:
            process.kill()

    def _started(self, course: Course) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=child_environment(),
                cwd=course.root, start_new_session=True,
            )  # fmt: skip
        return self._process

    def stop(self) -> None:
        """End the process; its ranks end with it."""
        process, self._process = self._process, None
        if process is None:
            return
        for stream in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.close()
        process.kill()
        process.wait()


def shared(course: Course, request: GradeRequest, on_check: OnCheck | None = None) -> Report | None:
    """Grade in the process that waits for this course, starting it when there is none; None when that fails."""
    try:
        address = _address(course)
    except OSError:
        return None
    for attempt in range(2):
        try:
            with (
                contextlib.closing(_connect(address, course, start=attempt == 0)) as connection,
                connection.makefile("w") as write,
                connection.makefile("r") as read,
            ):
                return _grade(write, read, request, on_check)
        except (OSError, EOFError):
            continue
    return None


def _grade(write: IO[str], read: IO[str], request: GradeRequest, on_check: OnCheck | None) -> Report:
    """Raises CourseError when the request is refused, EOFError when the process ends first."""
    write.write(to_line(request))
    write.flush()
    while (line := read.readline()).endswith("\n"):
        answer: Answer = from_line(line, Answer)
        if isinstance(answer, Graded):
            return answer.report
        if isinstance(answer, Problem):
            raise CourseError(answer.message)
        if on_check is not None:
            on_check(answer.exercise, answer.check)
    raise EOFError(GONE)


def _address(course: Course) -> Path:
    """The socket of the process that fits this course, this Python and the machinery as it is now."""
    folder = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()) / f"lockstep-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise OSError("another user's folder")
    place = hashlib.sha256(f"{sys.executable} {course.root} {stamp(course)}".encode()).hexdigest()[:24]
    return folder / f"{place}.sock"


def _connect(address: Path, course: Course, start: bool) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    give_up = time.monotonic() + START_SECONDS
    process = None
    while True:
        try:
            connection.connect(str(address))
            return connection
        except OSError:
            if not start or time.monotonic() > give_up or (process is not None and process.poll() is not None):
                connection.close()
                raise
        if process is None:
            process = subprocess.Popen(
                [*COMMAND, str(address)], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL, env=child_environment(), cwd=course.root, start_new_session=True,
            )  # fmt: skip
        time.sleep(0.02)
