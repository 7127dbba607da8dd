"""`grade_side_by_side`: many exercises of one submission, by several processes at once, told in the order of the course.

Most checks wait: for a hang to be proved, for a rank that is killed, for SLURM. Two processes on two cores make use of that.
"""

from __future__ import annotations

import secrets
import threading
from collections import deque
from pathlib import Path

from ..ranks.processes import cores
from .course import Course
from .run import Progress
from .verdict import CheckResult, Report
from .worker import Worker

MANY = 6
"""So many exercises are worth the second process, which takes some seconds to come up."""
AT_ONCE = 2
POLL_SECONDS = 0.2


def worthwhile(names: list[str]) -> bool:
    """Whether these exercises are graded sooner by several processes on this machine."""
    return len(names) >= MANY and cores() >= AT_ONCE


class _InOrder:
    """Passes on the checks of the exercise whose turn it is as they conclude, and keeps those of later ones until then."""

    def __init__(self, names: list[str], progress: Progress | None) -> None:
        self.progress = progress
        self.turns = deque(names)
        self.kept: dict[str, list[CheckResult]] = {name: [] for name in names}
        self.over: set[str] = set()
        self.lock = threading.Lock()

    def __call__(self, name: str, check: CheckResult) -> None:
        with self.lock:
            self.kept[name].append(check)
            self._tell()

    def done(self, name: str) -> None:
        """No more checks of this exercise will come."""
        with self.lock:
            self.over.add(name)
            self._tell()

    def _tell(self) -> None:
        while self.turns:
            name = self.turns[0]
            checks, self.kept[name] = self.kept[name], []
            for check in checks:
                if self.progress is not None:
                    self.progress(name, check)
            if name not in self.over:
                return
            self.turns.popleft()


def grade_side_by_side(
    course: Course,
    names: list[str],
    submission: Path | None = None,
    *,
    device: str = "cpu",
    seed: int | None = None,
    progress: Progress | None = None,
    at_once: int = AT_ONCE,
) -> Report:
    """As `run.grade`, `at_once` exercises at a time, each in a process that grades nothing else meanwhile.

    Raises CourseError as that does. A KeyboardInterrupt ends all of it.
    """
    seed = secrets.randbelow(1 << 31) if seed is None else seed
    names = course.require(names)
    longest_first = sorted(names, key=lambda name: not course.has_script(name))  # a SLURM cluster takes its time
    waiting, reports, errors = deque(longest_first), dict[str, Report](), list[Exception]()
    told = _InOrder(names, progress)
    workers = [Worker() for _ in range(max(1, min(at_once, len(names))))]

    def work(worker: Worker) -> None:
        while not errors:
            try:
                name = waiting.popleft()
            except IndexError:
                return
            try:
                reports[name] = worker.grade(course, [name], submission, device=device, seed=seed, progress=told)
            except Exception as error:
                errors.append(error)
            told.done(name)

    threads = [threading.Thread(target=work, args=(worker,), daemon=True) for worker in workers]
    try:
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            for thread in threads:
                thread.join(POLL_SECONDS)  # in short turns, so that Ctrl-C is heard
    finally:
        waiting.clear()
        for worker in workers:
            worker.stop()
    if errors:
        raise errors[0]
    ordered = [reports[name] for name in names]
    return Report(
        seed,
        tuple(exercise for report in ordered for exercise in report.exercises),
        device,
        tuple(fault for report in ordered for fault in report.faults),
        ordered[0].versions if ordered else {},
    )
