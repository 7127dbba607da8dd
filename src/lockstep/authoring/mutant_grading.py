"""Which mutants the checks notice: `author mutants`.

Theory of operation. Each of `jobs` threads has a `Worker`, a process that stays warm and grades one mutant after
another as it would a learner's file, up to the first check that fails. First every solution itself is graded, and has
to pass. A grading that outlives its deadline is ended with its process; it counts as noticed only when a check had said
so before.

What came out is kept in `.lockstep/mutants/NAME.json`, under a hash of the mutant's code (without docstrings and
comments) and of every file of the course that its checks import or read. So a second run grades only what has changed.
The machinery in `src` isn't part of that hash: `--again` grades everything again.
"""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path

import msgspec

from ..course import Course, CourseError, leaf
from ..course.files import write
from ..grading.pool import Pool, deadline
from ..grading.request import GradeRequest
from ..grading.verdict import CheckResult, Report
from ..grading.worker import Worker
from . import bank
from .mutants import Mutant, code_of, imported, mutants

SECONDS = 120.0
TIMES = 5  # A mutant has `SECONDS`, and as many times as long as the solution took
THE_SOLUTION = "the solution"


@dataclass(frozen=True)
class Verdict:
    """How the grading of one text ended. `by` is the check that failed and its diagnosis, or what else happened."""

    id: str
    noticed: bool
    by: str = ""
    seconds: float = 0.0


@dataclass
class Examined:
    """An exercise whose mutants have been graded."""

    name: str
    mutants: list[Mutant]
    verdicts: dict[str, Verdict] = field(default_factory=dict)

    @property
    def survivors(self) -> list[Mutant]:
        """The mutants that no check notices."""
        return [mutant for mutant in self.mutants if not self.verdicts[mutant.id].noticed]


@dataclass(frozen=True)
class _Task:
    name: str
    id: str
    text: str
    key: str
    seconds: float = SECONDS


def examine(
    course: Course,
    names: Sequence[str],
    jobs: int,
    again: bool = False,
    on_exercise: Callable[[Examined], None] | None = None,
) -> list[Examined]:
    """Grade all mutants of these exercises, `jobs` at once. `on_exercise` hears of each exercise when it is done.

    Raises CourseError when a solution is missing or does not pass. A KeyboardInterrupt ends all of it; what has been
    graded by then is kept.
    """
    found = {name: Examined(name, mutants(solution(course, name))) for name in names}
    kept = {name: _Kept(course, name) for name in names}
    if again:
        for one in kept.values():
            one.verdicts.clear()
    plain = [_task(name, THE_SOLUTION, solution(course, name), kept[name]) for name in names]
    with Pool(jobs, Worker) as pool:
        grade = partial(_graded, course)
        for task, verdict in pool.each([one for one in plain if not kept[one.name].passed(one.key)], grade):
            kept[task.name].put(task.key, verdict)
            if verdict.by:
                raise CourseError(f"{task.name}: the solution does not pass: {verdict.by}")
        took = {task.name: kept[task.name].verdicts[task.key].seconds for task in plain}
        tasks = [
            _task(name, mutant.id, mutant.text, kept[name], SECONDS + TIMES * took[name])
            for name in names
            for mutant in found[name].mutants
        ]
        left = dict.fromkeys(names, 0)
        missing = []
        for task in tasks:
            known = kept[task.name].known(task.key)
            if known is None:
                missing.append(task)
                left[task.name] += 1
            else:
                found[task.name].verdicts[task.id] = known
        for name in names:
            if on_exercise and not left[name]:
                on_exercise(found[name])
        for task, verdict in pool.each(missing, grade):
            kept[task.name].put(task.key, verdict)
            found[task.name].verdicts[task.id] = verdict
            left[task.name] -= 1
            if on_exercise and not left[task.name]:
                on_exercise(found[task.name])
    for name in names:
        kept[name].keep_only({task.key for task in (*plain, *tasks) if task.name == name})
    return list(found.values())


def solution(course: Course, name: str) -> str:
    """The text of the reference. Raises CourseError when there is none, as in a learner's copy."""
    file = course.solutions / f"{name}.py"
    if not file.is_file():
        raise CourseError(f"there is no solution of {name}: mutants are made in the authors' copy of the course")
    return file.read_text(encoding="utf-8")


# What is kept --------------------------------------------------------------------------------------------------------


class _Kept:
    """The verdicts of one exercise, by the hash of everything that they depend on."""

    def __init__(self, course: Course, name: str) -> None:
        self.file = course.workspace / "mutants" / f"{name}.json"
        self.inputs = _digest(course, name)
        self.verdicts: dict[str, Verdict] = {}
        with contextlib.suppress(OSError, ValueError):
            self.verdicts = msgspec.json.decode(self.file.read_bytes(), type=dict[str, Verdict])

    def known(self, key: str) -> Verdict | None:
        """What came out for this text; nothing when it ran out of time or a check broke: then it is tried again."""
        verdict = self.verdicts.get(key)
        return verdict if verdict is not None and (verdict.noticed or not verdict.by) else None

    def passed(self, key: str) -> bool:
        """Whether this text has passed every check."""
        return key in self.verdicts and not self.verdicts[key].by

    def put(self, key: str, verdict: Verdict) -> None:
        """Keep it, on the disk too, where every instant has a whole file."""
        self.verdicts[key] = verdict
        self._write()

    def keep_only(self, keys: set[str]) -> None:
        """Forget the mutants that no longer exist."""
        self.verdicts = {key: verdict for key, verdict in self.verdicts.items() if key in keys}
        self._write()

    def _write(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        write(self.file, msgspec.json.format(msgspec.json.encode(self.verdicts), indent=1))


def _task(name: str, id: str, text: str, kept: _Kept, seconds: float = SECONDS) -> _Task:
    key = hashlib.sha256(f"{kept.inputs} {code_of(text)}".encode()).hexdigest()
    return _Task(name, id, text, key, seconds)


def _digest(course: Course, name: str) -> str:
    """Changes with any file of the course that decides how this exercise is graded, and with torch."""
    group = name.rpartition("/")[0]
    found = dict.fromkeys((course.autograder / group).glob("*.toml")) if group else {}
    pending = [course.checks(name), course.scenario(name), course.solutions / f"{name}.py"]
    places = [course.autograder, course.autograder / group, course.autograder / group / "support", course.solutions]
    while pending:
        path = pending.pop()
        if path in found or not path.is_file():
            continue
        found[path] = None
        for module in imported(path):
            pending += [place / f"{module.replace('.', '/')}.py" for place in places]
    digest = hashlib.sha256(version("torch").encode())
    for path in sorted(set(found) - {course.solutions / f"{name}.py"}):
        digest.update(f"\n{path.relative_to(course.root).as_posix()}\n".encode() + path.read_bytes())
    return digest.hexdigest()


# Grading -------------------------------------------------------------------------------------------------------------


def _graded(course: Course, worker: Worker, task: _Task) -> Verdict:
    """Grade one text. A seed of its own, drawn from its code, makes a second grading the same as the first."""
    failed: list[str] = []
    began = time.monotonic()

    def on_check(_: str, check: CheckResult) -> None:
        if check.diagnosis is not None:
            failed.append(f"{check.id}: {check.diagnosis.id}")

    with tempfile.TemporaryDirectory(prefix="lockstep-mutant-") as folder:
        submission = bank.Entry(task.name, leaf(task.name), False, task.text, Path()).hand_in(course, Path(folder))
        request = GradeRequest((task.name,), submission, int(task.key[:7], 16), until_failure=True)
        with deadline(worker, task.seconds) as late:
            report = worker.grade(course, request, on_check)
    seconds = round(time.monotonic() - began, 1)
    if failed:
        return Verdict(task.id, True, failed[0], seconds)
    if late.is_set():
        return Verdict(task.id, False, f"no check came to an end in {task.seconds:.0f} s", seconds)
    return Verdict(task.id, False, _otherwise(report), seconds)


def _otherwise(report: Report) -> str:
    """What went wrong though no check failed; empty when all of them passed that this machine can run."""
    if report.faults:
        return f"a check broke: {report.faults[0].strip().splitlines()[-1]}"
    check = bank.shortfall(report, without_script=True)
    return f"{check.id} was not run: {check.reason}" if check is not None else ""
