"""`check` and `watch`: grade in the terminal, and remember what came out."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from rich.console import RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from ..course import Course, CourseError, progress
from ..course.runs import warm
from ..grading.isolation import tier
from ..grading.request import GradeRequest, OnCheck
from ..grading.side_by_side import grade_side_by_side, worthwhile
from ..grading.submission import locate
from ..grading.text import BROKE, Worth, is_explained, waits
from ..grading.untouched import untouched, with_stubs
from ..grading.verdict import CheckResult, Report
from ..grading.worker import shared
from .console import console
from .terminal import show_check, show_next, show_score, show_section, show_waiting


def check(course: Course, request: GradeRequest, as_json: bool = False) -> int:
    """Grade, show, record; returns the exit code."""
    for name in request.exercises:
        locate(course, name, request)  # say what is missing before anything runs
    stubs = untouched(course, request)
    shower = None if as_json else _Shower(sum(map(course.count_checks, request.exercises)))
    with shower.live() if shower else nullcontext():
        report = with_stubs(request, stubs, lambda rest: _grade(course, rest, shower), shower)
        if shower:
            shower.finish()
    own = request.submission is None and request.device == "cpu"
    for result in [one for one in report.exercises if one.name not in stubs] if own else ():
        progress.record(course, result.name, result.score, result.max_score, result.wrong)
    if as_json:
        sys.stdout.write(json.dumps(report.to_json(), ensure_ascii=False) + "\n")
    else:
        console().print()
        for result in report.exercises:
            show_score(result)
            if result.name in stubs:
                show_section(course, result.name)
        for fault in report.faults:
            print(f"{BROKE}\n{fault}", file=sys.stderr)
        if own:
            show_next(course, report)
    return report.exit_code


def isolate(request: GradeRequest) -> GradeRequest:
    """The same, with the submission kept apart as far as this machine can; says how far that is."""
    apart = tier()
    print(f"{apart.said} {apart.remedy}".strip(), file=sys.stderr)
    return replace(request, isolation=apart.name)


def _grade(course: Course, request: GradeRequest, on_check: OnCheck | None) -> Report:
    """Grade many exercises in two processes at once; fewer in the process that stays warm, if this is a terminal, else
    (CI, a pipe) in this one. LOCKSTEP_WARM=0 or 1 decides that.
    """
    if request.isolation is None:
        if worthwhile(request.exercises):
            return grade_side_by_side(course, request, on_check)
        if os.environ.get("LOCKSTEP_WARM", "1" if sys.stdout.isatty() else "0") == "1":
            report = shared(course, request, on_check)
            if report is not None:
                return report
        warm(request.exercises)
    from ..grading.grade import grade  # here, since it imports torch: what others grade is shown without

    return grade(course, request, on_check)


class _Shower:
    """Shows checks as they conclude, under their exercise's name, until the pipe's reader has seen enough.

    At a terminal the line below them says that something goes on. It is gone when the grading is over.
    """

    def __init__(self, of: int) -> None:
        self.of, self.done, self.began = of, 0, time.monotonic()
        self.exercise = ""
        self.worth = Worth()
        self.waiting: list[CheckResult] = []
        self.gap = False  # Behind what was said last
        self.closed = False
        self.console = console()
        self.spinner = Spinner("dots", style="cyan")

    def live(self) -> AbstractContextManager[object]:
        """The line that moves; nothing in a pipe, even in one that takes colors."""
        if not (sys.stdout.isatty() and self.console.is_interactive):
            return nullcontext()
        return Live(self, console=self.console, transient=True, refresh_per_second=8)

    def __rich__(self) -> RenderableType:
        seconds = time.monotonic() - self.began
        said = Text(f"{self.done} of {self.of} checks · {seconds:.0f} s · Ctrl-C stops", style="dim")
        said.truncate(self.console.width - 4, overflow="ellipsis")
        self.spinner.update(text=said)
        return self.spinner.render(self.console.get_time())

    def __call__(self, exercise: str, result: CheckResult) -> None:
        self.done += 1
        if self.closed:
            return
        try:
            if exercise != self.exercise:
                self.finish()
                self.console.print(f"\n[bold]{exercise}[/bold]")
                self.exercise, self.worth, self.gap = exercise, Worth(), False
            if not self.worth(result):
                return
            if waits(result):
                self.waiting.append(result)
                return
            if self.gap:
                self.console.print()
            show_check(result, exercise, self.console)
            self.gap = is_explained(result)
        except BrokenPipeError:
            self.closed = True
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

    def finish(self) -> None:
        """After an exercise's last check: those that wait for others."""
        if self.waiting and not self.closed:
            if self.gap:
                self.console.print()
            show_waiting(self.waiting, self.console)
        self.waiting = []


def watch(course: Course, names: list[str]) -> int:
    """Grade once, and again each time one of the files is saved, until Ctrl-C."""
    from watchfiles import watch as changes

    warm(names)
    files = {str((course.exercises / f"{name}.py").resolve()): name for name in names}
    pending = names if len(names) == 1 else []
    try:
        while True:
            for name in pending:
                console().clear()
                try:
                    check(course, GradeRequest((name,)))
                except CourseError as error:
                    print(f"lockstep: {error}", file=sys.stderr)
            what = ", ".join(names) if len(names) <= 4 else f"{len(names)} exercises"
            console().print(f"\n[dim]watching {what}: save a file to check it, Ctrl-C to stop[/dim]")
            for batch in changes(course.exercises, debounce=150, raise_interrupt=True):
                pending = sorted({files[path] for _, path in batch if path in files})
                if pending:
                    break
            else:
                return 0
    except KeyboardInterrupt:
        return 0
