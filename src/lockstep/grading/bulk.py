"""Grading a class: take in everybody's work, grade each learner in a warm process, keep every result as it comes.

Theory of operation. The engine, this process, imports no torch and runs no submission. It has N threads, each with a
`Worker`: a process that has imported torch and the checks once and grades one submission after another. No code of a
submission runs in a worker either: it runs in ranks, forked for every run, and what comes back from them is data.

- A grading that breaks on our side (a worker that dies or outlives the deadline, a check that raises) is a fault. Its
  worker is replaced, and it is tried twice more. Then it is reported as a fault, which costs no points.
- Every result is in its file before the next grading begins. The engine may be killed at any instant: its workers see
  their pipe close and end, and their ranks with them. The same command continues from there (`store`).
- A learner's inputs are drawn from the class's seed, the learner's id and what was handed in, so results depend neither
  on the order of gradings nor on how many run at once.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..course import Course, CourseError, nearest
from ..ranks.processes import cores
from . import isolation
from .classroom import ClassResult, Learner, digest_of, draw_class_seed, seed_of
from .intake import Handed, take_in
from .isolation import Tier
from .pool import Pool, deadline
from .request import GradeRequest
from .stamp import stamp, versions
from .store import Plan, Store
from .verdict import Report
from .worker import Worker

TRIES = 3
SECONDS = 600.0
SECONDS_AN_EXERCISE = 120.0
WORKER_BYTES = 2 << 30
"""Memory for a worker and what it grades: 0.6 GiB without the submission's (`benchmarks/grading.py --parts memory`)."""

OnLearner = Callable[[Learner], None]  # Called with each learner whose grading has ended


class Unisolated(CourseError):
    """Strangers' code is to be graded where nothing keeps it apart from this machine."""


@dataclass(frozen=True)
class ClassRequest:
    """What a teacher asks for. `only` are learners to grade again, whatever results there are; `again` is for all."""

    exercises: tuple[str, ...] | None = None
    seed: int | None = None
    device: str = "cpu"
    only: tuple[str, ...] = ()
    again: bool = False
    allow_unisolated: bool = False


@dataclass(frozen=True)
class Grading:
    """A class that has been taken in: what it is graded with, and who is in it."""

    course: Course
    store: Store
    plan: Plan
    roster: tuple[Handed, ...]
    tier: Tier

    def exercises(self, handed: Handed) -> tuple[str, ...]:
        """What this learner handed in of what was asked for, in the course's request."""
        there = (name for name in self.course.names if f"{name}.py" in handed.files)
        return tuple(name for name in there if self.plan.exercises is None or name in self.plan.exercises)

    def missing(self, handed: Handed) -> tuple[str, ...]:
        """What was asked for and not handed in; nothing for a learner who has nothing that can be graded at all."""
        if self.plan.exercises is None or not handed.files:
            return ()
        there = self.exercises(handed)
        return tuple(name for name in self.plan.exercises if name not in there)

    def pending(self) -> list[Handed]:
        """Those still to be graded, including those whose grading ended in a fault of ours."""
        return [handed for handed in self.roster if (known := self.known(handed)) is None or known.faulty]

    def known(self, handed: Handed) -> Learner | None:
        """This learner's grading, if there is one that still counts."""
        return self.store.get(self.plan, handed)

    def result(self) -> ClassResult | None:
        """The class, once everybody is graded."""
        learners = [self.known(handed) for handed in self.roster]
        graded = tuple(learner for learner in learners if learner is not None)
        if len(graded) < len(learners):
            return None
        most = {result.name: result.max_score for learner in graded for result in learner.exercises}
        names = self.plan.exercises or tuple(name for name in self.course.names if name in most)
        return ClassResult(self.plan.seed, names, graded, self.plan.versions, self.tier.said, self.plan.device, most)


# Taking in ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def opened(course: Course, source: Path, out: Path, request: ClassRequest, taken: bool = False) -> Iterator[Grading]:
    """Take in the submissions and hold `out` for this grading, which may have been started earlier. With `taken`, what
    was taken in then is left as it is, for the processes that are reading it.

    Raises CourseError for an exercise or learner that does not exist, a download that cannot be read, and a folder with
    other things in it or a grading that was started differently; and Unisolated.
    """
    asked = tuple(course.require(request.exercises)) if request.exercises is not None else None
    found = isolation.tier()
    refuse_unisolated(found, request.allow_unisolated)
    _refuse_nested(source, out)
    store = Store(out.resolve())
    with store.locked():
        known = store.plan()
        seed = request.seed if request.seed is not None else known.seed if known else draw_class_seed()
        plan = Plan(seed, asked, request.device, stamp(course), versions())
        if known is not None and not request.again:
            _refuse_mixing(known, plan, out)
        if known != plan:
            store.begin(plan)
        store.make_folders()
        try:
            there = store.roster() if taken else take_in(source, store.submissions, course, asked)
            roster = tuple(_explained(handed, course) for handed in there)
            if not roster:
                raise CourseError(f"nobody's work was found in {source}")
        except CourseError:
            if known is None:
                store.withdraw()
            raise
        if not request.again:
            _refuse_losing(store, roster, source, out)
        store.put_roster(roster)
        ids = {handed.id for handed in roster}
        for id in request.only:
            if id not in ids:
                near = nearest(id, ids)
                hint = f"did you mean {near}?" if near else f"roster.json in {out} has them all"
                raise CourseError(f"there is no learner {id!r}: {hint}")
        store.forget(None if request.again and not request.only else request.only)
        yield Grading(course, store, plan, roster, found)


def reopened(course: Course, out: Path, allow_unisolated: bool) -> Grading:
    """The grading that another process has started in `out` and holds.

    Raises CourseError when there is none, or when this machine's checks or versions differ from those of the grading.
    """
    store = Store(out.resolve())
    plan = store.plan()
    if plan is None:
        raise CourseError(f"there is no grading in {out}")
    found = isolation.tier()
    refuse_unisolated(found, allow_unisolated)
    _refuse_mixing(plan, replace(plan, checks=stamp(course), versions=versions()), out)
    return Grading(course, store, plan, tuple(store.roster()), found)


def refuse_unisolated(found: Tier, allowed: bool) -> None:
    """Raise Unisolated on the lowest tier, unless it was allowed."""
    if found.keeps_apart or allowed:
        return
    what, remedy = isolation.missing() or (found.said.rstrip("."), found.remedy.rstrip("."))
    raise Unisolated(
        f"{what}, so these submissions could read and change whatever you can: {remedy}, "
        "or say --allow-unisolated if you trust their writers"
    )


def _refuse_nested(source: Path, out: Path) -> None:
    inner, outer = out.resolve(), source.resolve()
    if source.is_dir() and (inner == outer or outer in inner.parents or inner in outer.parents):
        raise CourseError(f"{out} and {source} lie in each other: give --out a folder beside the submissions")


def _refuse_mixing(known: Plan, plan: Plan, out: Path) -> None:
    differs = []
    if known.seed != plan.seed:
        differs.append(f"with seed {known.seed}")
    if known.exercises != plan.exercises:
        differs.append(f"for {', '.join(known.exercises) if known.exercises is not None else 'whatever was handed in'}")
    if known.device != plan.device:
        differs.append(f"on {known.device}")
    for name in sorted({*known.versions, *plan.versions}):
        if known.versions.get(name) != plan.versions.get(name):
            differs.append(f"with {name} {known.versions.get(name)}, and this is {plan.versions.get(name)}")
    if known.checks != plan.checks and not differs:
        differs.append("with other checks than these")
    if differs:
        raise CourseError(
            f"the grading in {out} was begun {'; '.join(differs)}: grades from both cannot stand side by side. "
            "Go on as it was begun, give another --out, or grade everybody again with --again"
        )


def _refuse_losing(store: Store, roster: Sequence[Handed], source: Path, out: Path) -> None:
    lost = sorted({*store.graded()} - {handed.id for handed in roster})
    if lost:
        named = ", ".join(lost[:3]) + (f" and {len(lost) - 3} more" if len(lost) > 3 else "")
        raise CourseError(
            f"{out} has results of learners who are not in {source} ({named}): "
            "give another --out, or start over with --again"
        )


def _explained(handed: Handed, course: Course) -> Handed:
    """The same; where nothing can be graded, with a reason."""
    if handed.refused or any(f"{name}.py" in handed.files for name in course.names):
        return handed
    return replace(handed, refused=("nothing to grade: no exercise's file was handed in",))


# Grading -----------------------------------------------------------------------------------------------------------


def carry_out(
    grading: Grading,
    pending: Sequence[Handed],
    jobs: int,
    on_learner: OnLearner,
    *,
    worker: Callable[[], Worker] = Worker,
    seconds: float = SECONDS,
) -> None:
    """Grade these learners, `jobs` at once. Each result is in its file before `on_learner` is called.

    A KeyboardInterrupt ends the workers and whatever they run. `seconds` is the deadline of one grading; each of its
    exercises adds SECONDS_AN_EXERCISE to that.
    """
    grader = _Grader(grading, seconds)
    with Pool(min(jobs, len(pending)), worker) as pool:
        for _, learner in pool.each(pending, lambda worker, handed: grader.grade(pool, worker, handed)):
            on_learner(learner)


@dataclass(frozen=True)
class _Grader:
    """Grades one learner after another. `seconds` is the deadline of one, besides that of each exercise."""

    grading: Grading
    seconds: float

    def grade(self, pool: Pool, worker: Worker, handed: Handed) -> Learner:
        """A learner's grading, which is in its file then."""
        grading = self.grading
        names = grading.exercises(handed)
        digest = digest_of(handed)
        seed = seed_of(grading.plan.seed, handed.id, digest)
        missing = grading.missing(handed)
        learner = Learner(handed, None, seed, digest, isolation=grading.tier.name, missing=missing)
        for attempt in range(1, TRIES + 1) if names or missing else ():
            began = time.monotonic()
            report = self._report(worker, learner, names)
            learner = replace(learner, report=report, attempts=attempt, seconds=round(time.monotonic() - began, 3))
            if not report.faults or pool.ending:
                break
            worker.stop()
        if not pool.ending:
            grading.store.put(grading.plan, learner)
        return learner

    def _report(self, worker: Worker, learner: Learner, names: Sequence[str]) -> Report:
        course, plan, folder = self.grading.course, self.grading.plan, learner.handed.folder
        report = Report(learner.seed, (), plan.device, (), plan.versions)
        limit = self.seconds + SECONDS_AN_EXERCISE * len(names)
        try:
            with deadline(worker, limit) as late:
                tier, missing = self.grading.tier.name, learner.missing
                request = GradeRequest(
                    tuple(names), folder, learner.seed, plan.device, tier, missing=missing, directory=folder
                )
                report = worker.grade(course, request)
        except CourseError as error:
            return replace(report, faults=(str(error),))
        if late.is_set():
            return replace(report, faults=(f"the grading did not end within {limit:g} s",))
        if report.faults:
            return replace(report, seed=learner.seed, versions=plan.versions)
        results = {result.name: result for result in report.exercises}
        empty = [name for name in (*names, *learner.missing) if name not in results or not results[name].checks]
        if empty:
            return replace(report, faults=(f"no check came back of {', '.join(empty)}",))
        ordered = tuple(results[name] for name in course.names if name in results)
        return replace(report, exercises=ordered)


def default_jobs() -> int:
    """One worker for each core that this process may use, as far as the machine's memory allows."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(cores(), memory // WORKER_BYTES))
