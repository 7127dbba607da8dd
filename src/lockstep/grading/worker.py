"""A process that grades on request and stays warm: torch and the checks are imported once, not for every check.

`Worker` starts one for itself and ends with it (a notebook's `%check`). `shared` finds one that earlier commands of the
same user left waiting, or starts it: it serves `./lockstep check` at a terminal, and leaves after ten idle minutes, or
as soon as the machinery's files have changed.

One JSON object a line: `{"names": […], "submission": …, "device": …, "seed": …}` in; `{"progress": …}` for each check
that concludes, then `{"report": …}` or `{"error": …}` out. With `{"outline": […]}` for names alone, the checks that these
exercises have come back, and nothing runs.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import IO, Any

from ..ranks.client import SOURCE, child_environment
from .course import Course, CourseError, find
from .run import Progress, grade, outline
from .verdict import Report, check_from_json, check_json, from_json

IDLE_SECONDS = 600.0
START_SECONDS = 60.0


class Worker:
    """The client's side: a process of its own, started at the first request, and again when it was ended."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def grade(
        self,
        course: Course,
        names: list[str],
        submission: Path | None = None,
        *,
        device: str = "cpu",
        seed: int | None = None,
        checks: str = "",
        isolation: str | None = None,
        progress: Progress | None = None,
        directory: Path | None = None,
    ) -> Report:
        """As `run.grade`, in this folder (default: the current one), from which a submission's path is told. A
        KeyboardInterrupt ends the grading and whatever it had started."""
        process = self._started(course)
        assert process.stdin is not None and process.stdout is not None
        try:
            order = _order(names, submission, device, seed, isolation, directory, checks)
            return _ask(process.stdin, process.stdout, order, progress)
        except (OSError, EOFError):
            self.stop()
            return Report(0, (), device, ("the process that grades ended without a word: ./lockstep doctor",))
        except KeyboardInterrupt:
            self.stop()
            raise

    def outline(self, course: Course, names: list[str]) -> dict[str, tuple[tuple[str, str], ...]]:
        """As `run.outline`. Raises CourseError when the checks cannot be collected."""
        process = self._started(course)
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps({"outline": names}) + "\n")
            process.stdin.flush()
            answer = json.loads(process.stdout.readline() or "{}")
        except (OSError, ValueError):
            answer = {}
        if "outline" not in answer:
            self.stop()
            raise CourseError(answer.get("error") or "the process that grades ended without a word: ./lockstep doctor")
        return {name: tuple((id, title) for id, title in checks) for name, checks in answer["outline"].items()}

    def kill(self) -> None:
        """End the process from another thread: whoever waits for its answer gets a report with a fault."""
        process = self._process
        if process is not None:
            process.kill()

    def _started(self, course: Course) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "lockstep.grading.worker"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=child_environment(), cwd=course.root,
                start_new_session=True,
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


def shared(
    course: Course, names: list[str], submission: Path | None, device: str, seed: int | None, progress: Progress | None
) -> Report | None:
    """Grade in the process that waits for this course, starting it when there is none; None where that cannot be."""
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
                return _ask(write, read, _order(names, submission, device, seed), progress)
        except (OSError, EOFError):
            continue
    return None


def _order(
    names: list[str],
    submission: Path | None,
    device: str,
    seed: int | None,
    isolation: str | None = None,
    directory: Path | None = None,
    checks: str = "",
) -> dict[str, Any]:
    return {
        "names": names,
        "submission": str(submission.resolve()) if submission else None,
        "device": device,
        "seed": seed,
        "isolation": isolation,
        "checks": checks,
        "default": os.environ.get("LOCKSTEP_SUBMISSION"),
        "directory": str(directory or os.getcwd()),
    }


def _ask(write: IO[str], read: IO[str], order: dict[str, Any], progress: Progress | None) -> Report:
    write.write(json.dumps(order) + "\n")
    write.flush()
    while (line := read.readline()).endswith("\n"):
        answer = json.loads(line)
        if "report" in answer:
            return from_json(answer["report"])
        if "error" in answer:
            raise CourseError(answer["error"])
        if progress is not None:
            progress(answer["progress"], check_from_json(answer["check"]))
    raise EOFError("the process that grades is gone")


def _address(course: Course) -> Path:
    """The socket of the process that fits this course, this Python and the machinery as it is now."""
    folder = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()) / f"lockstep-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise OSError("somebody else's folder")
    return folder / f"{stamp(course)}.sock"


def stamp(course: Course) -> str:
    """Changes with any file of the machinery or the checks, with the Python and with the course's place."""
    digest = hashlib.sha256(f"{sys.executable} {course.root}".encode())
    for folder in (Path(SOURCE) / "lockstep", course.autograder, course.solutions):
        for path in sorted(folder.rglob("*.[pt][yo]*")):
            if path.suffix in (".py", ".toml"):
                status = path.stat()
                digest.update(f"{path} {status.st_mtime_ns} {status.st_size}".encode())
    return digest.hexdigest()[:24]


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
                [sys.executable, "-m", "lockstep.grading.worker", str(address)],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                env=child_environment(), cwd=course.root, start_new_session=True,
            )  # fmt: skip
        time.sleep(0.02)


# The process itself --------------------------------------------------------------------------------------------------


def serve(requests: IO[str], answers: IO[str], course: Course) -> None:
    """Answer one client until it is gone."""

    def send(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    for line in requests:
        order: dict[str, Any] = json.loads(line)
        if "outline" in order:
            try:
                send({"outline": outline(course, order["outline"])})
            except CourseError as error:
                send({"error": str(error)})
            continue
        os.environ.pop("LOCKSTEP_SUBMISSION", None)
        if order["default"]:
            os.environ["LOCKSTEP_SUBMISSION"] = order["default"]
        with contextlib.suppress(OSError):
            os.chdir(order["directory"])
        _busy.set()
        try:
            given = Path(order["submission"]) if order["submission"] else None
            report = grade(
                course,
                order["names"],
                given,
                device=order["device"],
                seed=order["seed"],
                checks=order["checks"],
                isolation=order["isolation"],
                progress=lambda exercise, check: send({"progress": exercise, "check": check_json(check)}),
            )
            answer: dict[str, Any] = {"report": report.to_json()}
        except CourseError as error:
            answer = {"error": str(error)}
        _busy.clear()  # before the client has what it came for, and may go
        send(answer)


def listen(address: Path, course: Course) -> None:
    """Serve one client after the other, until nobody has come for a while or the machinery has changed."""
    began = stamp(course)
    door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with contextlib.suppress(FileNotFoundError):
        address.unlink()
    door.bind(str(address))
    door.listen(8)
    try:
        while select.select([door], [], [], IDLE_SECONDS)[0]:
            connection, _ = door.accept()
            gone = threading.Thread(target=_leave_with, args=(connection,), daemon=True)
            with connection, connection.makefile("r") as read, connection.makefile("w") as write:
                gone.start()
                serve(read, write, course)
            if stamp(course) != began:
                return
    finally:
        with contextlib.suppress(OSError):
            address.unlink()


_busy = threading.Event()


def _leave_with(connection: socket.socket | IO[str]) -> None:
    """A client that goes away in the middle of a grading (Ctrl-C) takes the process with it, and so all its ranks."""
    poll = select.poll()
    with contextlib.suppress(OSError, ValueError):
        poll.register(connection.fileno(), select.POLLHUP | getattr(select, "POLLRDHUP", 0))
        poll.poll()
        if _busy.is_set():
            os._exit(1)


def main() -> None:
    """`python -m lockstep.grading.worker [SOCKET]`."""
    from .. import ranks

    ranks.warm()
    course = find()
    if len(sys.argv) > 1:
        listen(Path(sys.argv[1]), course)
        return
    said = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what checks or torch print must not reach the answers
    threading.Thread(target=_leave_with, args=(sys.stdin,), daemon=True).start()
    serve(sys.stdin, said, course)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        main()
