"""`grade_side_by_side`: many exercises of one submission, in several processes at once, told in the course's order.

Most checks wait: for proof of a hang, for a rank that is killed, for SLURM. Three processes on two cores use that time.
"""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from ..course import Course
from ..ranks.processes import cores
from .pool import Pool
from .request import GradeRequest, OnCheck
from .verdict import CheckResult, Report
from .worker import Worker

MANY = 6  # From this many exercises on, more processes are worth the seconds that they take to start
AT_ONCE = 3


def worthwhile(exercises: Sequence[str]) -> bool:
    """Whether these exercises are graded sooner by several processes on this machine."""
    return len(exercises) >= MANY and cores() > 1


class _InOrder:
    """Passes on the checks of the first unfinished exercise as they conclude, and keeps those of later ones."""

    def __init__(self, names: Sequence[str], on_check: OnCheck | None) -> None:
        self.on_check = on_check
        self.turns = deque(names)
        self.kept: dict[str, list[CheckResult]] = {name: [] for name in names}
        self.over: set[str] = set()
        self.lock = threading.Lock()

    def __call__(self, name: str, check: CheckResult) -> None:
        with self.lock:
            self.kept[name].append(check)
            self._tell()

    def done(self, name: str) -> None:
        with self.lock:
            self.over.add(name)
            self._tell()

    def _tell(self) -> None:
        while self.turns:
            name = self.turns[0]
            checks, self.kept[name] = self.kept[name], []
            for check in checks:
                if self.on_check is not None:
                    self.on_check(name, check)
            if name not in self.over:
                return
            self.turns.popleft()


def grade_side_by_side(course: Course, request: GradeRequest, on_check: OnCheck | None = None) -> Report:
    """As `grade.grade`, AT_ONCE exercises at a time, each in a process that grades nothing else meanwhile.

    Raises CourseError as that does. A KeyboardInterrupt ends all of it.
    """
    seed = secrets.randbelow(1 << 31) if request.seed is None else request.seed
    names = course.require(request.exercises)
    longest_first = sorted(names, key=lambda name: not course.has_script(name))  # a SLURM cluster takes its time
    in_order = _InOrder(names, on_check)

    def grade(worker: Worker, name: str) -> Report:
        return worker.grade(course, replace(request, exercises=(name,), seed=seed), in_order)

    reports = {}
    with Pool(min(AT_ONCE, len(names)), Worker) as pool:
        for name, report in pool.each(longest_first, grade):
            reports[name] = report
            in_order.done(name)
    ordered = [reports[name] for name in names]
    return Report(
        seed,
        tuple(exercise for report in ordered for exercise in report.exercises),
        request.device,
        tuple(fault for report in ordered for fault in report.faults),
        ordered[0].versions if ordered else {},
    )
