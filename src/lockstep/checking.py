"""`check` and `watch`: grade in the terminal, and remember what came out."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from . import ranks
from .grading import progress as records
from .grading.course import Course, CourseError
from .grading.isolation import tier
from .grading.run import Progress, grade
from .grading.side_by_side import grade_side_by_side, worthwhile
from .grading.submission import locate
from .grading.verdict import CheckResult, Report


def check(
    course: Course,
    names: list[str],
    submission: Path | None,
    device: str,
    seed: int | None,
    as_json: bool,
    isolated: bool = False,
) -> int:
    """Grade, show, record; returns the exit code. `isolated` keeps the submission apart as far as this machine can."""
    for name in names:
        locate(course, name, submission)  # say what is missing before anything runs
    shower = None if as_json else _Shower()
    if isolated:
        apart = tier()
        print(f"{apart.said} {apart.remedy}".strip(), file=sys.stderr)
        report = grade(course, names, submission, device=device, seed=seed, isolation=apart.name, progress=shower)
    else:
        report = _grade(course, names, submission, device, seed, shower)
    if submission is None and device == "cpu":
        for result in report.exercises:
            records.record(course, result)
    if as_json:
        sys.stdout.write(json.dumps(report.to_json(), ensure_ascii=False) + "\n")
    else:
        _conclude(report)
    return report.exit_code


def _grade(
    course: Course, names: list[str], submission: Path | None, device: str, seed: int | None, progress: Progress | None
) -> Report:
    """Many exercises by two processes at once. Fewer, at a terminal, in the process that stays warm, elsewhere (CI, a pipe)
    in this one: LOCKSTEP_WARM=0 or 1 decides.
    """
    if worthwhile(names):
        return grade_side_by_side(course, names, submission, device=device, seed=seed, progress=progress)
    if os.environ.get("LOCKSTEP_WARM", "1" if sys.stdout.isatty() else "0") == "1":
        from .grading.worker import shared

        report = shared(course, names, submission, device, seed, progress)
        if report is not None:
            return report
    ranks.warm()
    return grade(course, names, submission, device=device, seed=seed, progress=progress)


class _Shower:
    """Shows checks as they conclude, under their exercise's name, until whoever reads has seen enough."""

    def __init__(self) -> None:
        self.exercise = ""
        self.closed = False

    def __call__(self, exercise: str, result: CheckResult) -> None:
        from .terminal import console, show_check

        if self.closed:
            return
        try:
            if exercise != self.exercise:
                console().print(f"\n[bold]{exercise}[/bold]")
                self.exercise = exercise
            show_check(result, exercise)
        except BrokenPipeError:
            self.closed = True
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _conclude(report: Report) -> None:
    from .terminal import show_score

    for result in report.exercises:
        show_score(result)
    for fault in report.faults:
        print(
            f"A check broke. That is Lockstep's fault, not yours, and costs nothing. Please report it:\n{fault}",
            file=sys.stderr,
        )


def watch(course: Course, names: list[str]) -> int:
    """Grade once, and again each time one of the files is saved, until Ctrl-C."""
    from watchfiles import watch as changes

    from .terminal import console

    ranks.warm()
    files = {str((course.exercises / f"{name}.py").resolve()): name for name in names}
    pending = names if len(names) == 1 else []
    try:
        while True:
            for name in pending:
                console().clear()
                try:
                    check(course, [name], None, "cpu", None, False)
                except CourseError as error:
                    print(f"lockstep: {error}", file=sys.stderr)
            console().print(f"\n[dim]watching {', '.join(names)}: save a file to check it, Ctrl-C to stop[/dim]")
            for batch in changes(course.exercises, debounce=150, raise_interrupt=True):
                pending = sorted({files[path] for _, path in batch if path in files})
                if pending:
                    break
            else:
                return 0
    except KeyboardInterrupt:
        return 0
