"""`grade`: a class at the terminal. `grading.bulk` does the work; here it is shown, interrupted and summed up."""

from __future__ import annotations

import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from ..course import Course, CourseError, short
from ..grading import bulk, policy_file, slurm_array, writers
from ..grading.classroom import GradingOutcome, Learner
from ..grading.exports.pages import plural
from ..grading.forecast import Forecast, about
from ..grading.text import visible
from . import class_table
from .console import width

ENDS = {"hang": "hung", "crashed": "crashed", "timed-out": "no end", "out-of-memory": "out of memory"}
"""Diagnoses to count while a class is graded: they take most of the time."""
COLUMNS = 80  # The first line is no wider, also in a pipe
SHORT = 60  # Seconds: what ends sooner needs no forecast
APART = {"sandbox": "isolated by bubblewrap", "user": "run as another user, without a sandbox", "none": "not isolated"}


def grade(
    course: Course,
    source: Path,
    out: Path,
    request: bulk.ClassRequest,
    jobs: int | None,
    slurm: bool,
    policy: Path | None = None,
) -> int:
    """Grade a class, show its progress, write its files; returns the exit code.

    0 everybody is graded, 1 a grading broke on our side or the array ended too early, 130 interrupted. Raises
    CourseError as `bulk.opened` does, and for a policy that cannot be read.
    """
    rules = policy_file.load(course, policy)  # so that a mistake in it shows before an hour of grading
    job = slurm_array.at_work(out)
    if job and not slurm:
        raise CourseError(
            f"SLURM job {job} is at work on this grading: wait for it with --slurm, or end it: scancel {job}"
        )
    if job and (request.again or request.only):
        slurm_array.cancel(job)
        job = ""
    with bulk.opened(course, source, out, request, taken=bool(job)) as grading, _terminated():
        pending = [one for one in grading.pending() if not request.only or one.id in request.only]
        jobs = jobs or (slurm_array.TASKS if slurm else bulk.default_jobs())
        done = len(grading.roster) - len(pending)
        forecast = Forecast.of(grading, pending, jobs)
        expected = f" · {about(forecast.left)}, {min(jobs, len(pending))} at a time" if pending else ""
        first = [
            f"{plural(len(grading.roster), 'submission')}{expected}",
            APART[grading.tier.name],
            f"seed {grading.plan.seed}",
            *([f"{done} graded before"] if done and not request.only else []),
        ]
        _say(_packed(first, min(width(), COLUMNS)))
        try:
            if pending:
                with _shown(len(grading.roster), done, forecast) as listen:
                    if slurm:
                        slurm_array.carry_out(grading, pending, jobs, listen)
                    else:
                        bulk.carry_out(grading, pending, jobs, listen)
        except KeyboardInterrupt:
            left = len(grading.pending())
            done = len(grading.roster) - left
            _say(
                f"Interrupted: {done} of {len(grading.roster)} are graded and kept. "
                "The same command goes on from there."
            )
            return 130
        except slurm_array.Unfinished as error:
            print(f"lockstep: {error}", file=sys.stderr)
            return 1
        graded = grading.result()
        if request.only:
            _tell_of(grading, request.only)
        if graded is None:
            left = sum(grading.known(one) is None for one in grading.roster)
            _say(f"{left} of {len(grading.roster)} are not graded yet: the same command without --only goes on.")
            return 0
        marked = writers.mark(graded, course, rules)
        for remark in marked.grades.remarks:
            _say(f"Mind: {remark}" + ("" if remark.endswith("?") else "."))
        aside = sum(bool(one.handed.notes) for one in graded.learners)
        if aside:
            _say(
                f"Some files of {plural(aside, 'learner')} were set aside: "
                "the remarks in grades.csv say which, and why."
            )
        _sum_up(marked, writers.write_all(graded, out, course, rules), grading)
        return graded.exit_code


def grade_slice(course: Course, out: Path, part: str, jobs: int | None, allow_unisolated: bool) -> int:
    """Grade a slice `i/n` of a class that another process has taken in: one task of a job array."""
    grading = bulk.reopened(course, out, allow_unisolated)
    pending = slurm_array.slice_of(grading, part)
    faults = 0

    def listen(learner: Learner) -> None:
        nonlocal faults
        faults += learner.faulty
        print(line(learner), flush=True)

    with _terminated():
        bulk.carry_out(grading, pending, jobs or 1, listen)
    return 1 if faults else 0


def line(learner: Learner) -> str:
    """A learner's grading in a line."""
    if learner.outcome is GradingOutcome.GRADED:
        found = f" · {', '.join(learner.diagnoses)}" if learner.diagnoses else ""
        return f"{learner.id}: {learner.score} of {learner.max_score} points · {learner.seconds:.1f} s{found}"
    if learner.report is None:
        return f"{learner.id}: {visible('; '.join(learner.handed.refused[:2]))}"
    why = [fault.strip().splitlines()[-1] for fault in learner.report.faults if fault.strip()]
    return f"{learner.id}: {learner.outcome.value}: {visible('; '.join(why[:2]))}"


# Showing -----------------------------------------------------------------------------------------------------------


@contextmanager
def _shown(total: int, done: int, forecast: Forecast) -> Iterator[Callable[[Learner], None]]:
    """A bar with the time left at a terminal; elsewhere a line for each learner, and one in ten says when it ends."""
    if not sys.stdout.isatty():
        counter = [done]

        def print_line(learner: Learner) -> None:
            forecast.count(learner)
            counter[0] += 1
            print(f"{counter[0]}/{total}  {line(learner)}", flush=True)
            if 10 * counter[0] // total > 10 * (counter[0] - 1) // total and forecast.left >= SHORT:
                print(f"{about(forecast.left)} left, {until(forecast.left)}", flush=True)

        yield print_line
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
    from rich.text import Text

    class Left(ProgressColumn):
        """What the forecast says, less the time since a learner was counted; at the end how long it took."""

        def render(self, task: Task) -> Text:
            if task.finished:
                return Text(f"in {task.finished_time or 0:.0f} s")
            return Text(f"{about(forecast.left - (time.monotonic() - counted))} left")

    counted = time.monotonic()
    bar = 30 if width() >= COLUMNS else 10
    room = width() - bar - len(f" {total}/{total} less than a minute left ")
    with Progress(BarColumn(bar), MofNCompleteColumn(), Left(), TextColumn("{task.fields[tally]}")) as progress:
        task = progress.add_task("", total=total, completed=done, tally="")
        tally: Counter[str] = Counter()

        def advance(learner: Learner) -> None:
            nonlocal counted
            forecast.count(learner)
            counted = time.monotonic()
            if learner.outcome is not GradingOutcome.GRADED:
                tally["with nothing to grade" if learner.outcome is GradingOutcome.NOTHING else "our faults"] += 1
            tally.update({ENDS[id] for id in learner.diagnoses if id in ENDS})
            ends = [until(forecast.left)] if forecast.left >= SHORT else []
            points = [f"{learner.id} {learner.score} of {learner.max_score}"] if learner.exercises else []
            said = [*ends, *(f"{n} {what}" for what, n in tally.items()), *points]
            progress.update(task, advance=1, tally=_packed(said, room).partition("\n")[0] if said else "")

        yield advance


def until(seconds: float) -> str:
    """`until 15:40`, with the day's name on another day."""
    now = datetime.now()
    end = now + timedelta(seconds=seconds)
    return f"until {end:%H:%M}" if end.date() == now.date() else f"until {end:%A, %H:%M}"


def _sum_up(marked: writers.Marked, files: list[Path], grading: bulk.Grading) -> None:
    graded, columns = marked.graded, width()
    count = Counter(one.outcome for one in graded.learners)
    ends = " · ".join(f"{count[outcome]} {outcome.value}" for outcome in GradingOutcome if count[outcome])
    parts = [
        [ends, *class_table.points(marked, columns)],
        class_table.frequent(marked, columns),
        class_table.files(files, columns),
    ]
    _say("\n\n".join("\n".join(part) for part in parts if part))
    if graded.faults:
        named = ", ".join(one.id for one in graded.faults[:8]) + (" …" if len(graded.faults) > 8 else "")
        _say(
            f"The grader itself broke on {plural(len(graded.faults), 'submission')} ({named}). It costs them no points;"
        )
        _say(f"{short(grading.store.details)} says why. The same command tries them again.")


def _tell_of(grading: bulk.Grading, ids: tuple[str, ...]) -> None:
    for handed in grading.roster:
        if handed.id in ids and (learner := grading.known(handed)) is not None:
            _say(f"{line(learner)}   {short(grading.store.results / f'{handed.id}.json')}")


def _packed(parts: list[str], columns: int) -> str:
    """The parts with dots between them, in as many lines as they need."""
    lines = [parts[0]]
    for part in parts[1:]:
        line = f"{lines[-1]} · {part}"
        lines = [*lines[:-1], line] if len(line) <= columns else [*lines, part]
    return "\n".join(lines)


def _say(text: str) -> None:
    print(text, flush=True)


@contextmanager
def _terminated() -> Iterator[None]:
    """SIGTERM, which SLURM and shutdowns send, ends a grading as Ctrl-C does."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
