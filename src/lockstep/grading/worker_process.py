"""The process that grades on request and stays warm; `worker` is its client.

python -m lockstep.grading.worker_process            one client, over stdin and stdout
python -m lockstep.grading.worker_process SOCKET     one client after another; leaves after ten idle minutes, or as
                                                     soon as the machinery's files have changed
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import threading
from pathlib import Path
from typing import IO

from .. import ranks
from ..course import Course, CourseError, find
from ..course.runs import PRELOADED
from . import compiler
from .grade import grade
from .request import GradeRequest
from .stamp import stamp
from .worker import Answer, Concluded, Graded, Problem, from_line, to_line

IDLE_SECONDS = 600.0


def main() -> None:
    course = find()
    compiler.leave_out()
    if len(sys.argv) > 1:
        ranks.warm(PRELOADED)  # whatever its clients will ask for
        listen(Path(sys.argv[1]), course)
        return
    said = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what checks or torch print must not reach the answers
    threading.Thread(target=_leave_with, args=(sys.stdin,), daemon=True).start()
    serve(sys.stdin, said, course)


def serve(requests: IO[str], answers: IO[str], course: Course) -> None:
    """Answer one client until it is gone."""

    def send(answer: Answer) -> None:
        answers.write(to_line(answer))
        answers.flush()

    for line in requests:
        request: GradeRequest = from_line(line, GradeRequest)
        _busy.set()
        try:
            answer: Answer = Graded(grade(course, request, lambda name, check: send(Concluded(name, check))))
        except CourseError as error:
            answer = Problem(str(error))
        _busy.clear()  # before the client has its answer and may go
        send(answer)


def listen(address: Path, course: Course) -> None:
    """Serve one client after another, until none has come for a while or the machinery has changed."""
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


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        main()
