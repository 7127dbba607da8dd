"""A process that grades on request and stays warm: torch and the checks are imported once, not for every `%check`.

One JSON object a line: `{"names": […], "submission": …, "device": …, "seed": …}` in, a report or `{"error": …}` out.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

from ..ranks.client import child_environment
from .course import Course, CourseError
from .verdict import Report, from_json


class Worker:
    """The client's side. Started at the first request, and again when it was ended."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def grade(self, course: Course, names: list[str], submission: Path | None = None, *, device: str = "cpu",
              seed: int | None = None) -> Report:
        """As `run.grade`. A KeyboardInterrupt ends the grading and whatever it had started."""
        process = self._started(course)
        assert process.stdin is not None and process.stdout is not None
        order = {"names": names, "submission": str(submission) if submission else None, "device": device, "seed": seed,
                 "default": os.environ.get("LOCKSTEP_SUBMISSION")}  # fmt: skip
        try:
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        except KeyboardInterrupt:
            self.stop()
            raise
        if not answer:
            self.stop()
            return Report(0, (), device, ("the process that grades ended without a word: ./lockstep doctor",))
        raw = json.loads(answer)
        if "error" in raw:
            raise CourseError(raw["error"])
        return from_json(raw)

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


def serve(requests: IO[str], answers: IO[str]) -> None:
    """Answer until the other side is gone."""
    from .. import ranks
    from .course import find
    from .run import grade

    ranks.warm()
    course = find()
    for line in requests:
        order: dict[str, Any] = json.loads(line)
        os.environ.pop("LOCKSTEP_SUBMISSION", None)
        if order["default"]:
            os.environ["LOCKSTEP_SUBMISSION"] = order["default"]
        try:
            given = Path(order["submission"]) if order["submission"] else None
            report = grade(course, order["names"], given, device=order["device"], seed=order["seed"])
            answer: dict[str, Any] = report.to_json()
        except CourseError as error:
            answer = {"error": str(error)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    # What checks or torch print must not reach the answers.
    said = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        serve(sys.stdin, said)
