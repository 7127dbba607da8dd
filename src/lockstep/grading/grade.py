"""`grade`: run the checks of some exercises on a submission and return what they conclude."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from ..course import Course
from ..course.runs import warm
from . import plugin
from .plugin import REQUEST, SESSION, Session
from .request import GradeRequest, OnCheck
from .stamp import versions
from .verdict import Report


def grade(course: Course, request: GradeRequest, on_check: OnCheck | None = None) -> Report:
    """Grade in this process. What breaks on our side comes back in `Report.faults`.

    Raises CourseError for an exercise that is not in the course.
    """
    request = replace(request, exercises=tuple(course.require(request.exercises)))
    if request.isolation in (None, "none"):
        warm(request.exercises)
    listener = _Listener(course, request, on_check)
    options = ["--exitfirst"] if request.until_failure else []
    status, said = _pytest(course, (*request.exercises, *request.missing), options, listener)
    session, faults = listener.session, listener.faults
    if status == pytest.ExitCode.INTERRUPTED and not listener.uncollected:
        raise KeyboardInterrupt
    ended = status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    said_nothing = status == pytest.ExitCode.TESTS_FAILED and session and not session.results and not faults
    if not listener.uncollected and (session is None or not ended or said_nothing):
        faults = (*faults, said or f"pytest ended with status {status}")
    return Report(
        session.seed if session else request.seed or 0,
        session.exercises() if session else (),
        request.device,
        faults,
        versions(),
        request.isolation or "",
    )


class _Listener:
    """A pytest plugin that hands the request in and takes the results out. The course too: it has read its files."""

    def __init__(self, course: Course, request: GradeRequest, on_check: OnCheck | None) -> None:
        self.course, self.request, self.on_check = course, request, on_check
        self.session: Session | None = None
        self.uncollected: list[str] = []

    @property
    def faults(self) -> tuple[str, ...]:
        """Ours: checks that broke, and check files that cannot be imported."""
        return (*(self.session.faults if self.session else ()), *self.uncollected)

    @pytest.hookimpl(tryfirst=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        config.stash[REQUEST] = (self.course, self.request)
        config.option.tbstyle = "native"  # For faults of ours; pytest's own style parses whole files each time.

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.uncollected.append(f"{report.nodeid} cannot be collected: {report.longreprtext}")

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self.session = session.config.stash[SESSION]
        self.session.on_check = self.on_check


LEFT_OUT = (
    "cacheprovider", "terminal", "logging",
    "unraisableexception", "threadexception",  # they collect all garbage of a process with torch in it
)  # fmt: skip


def _pytest(course: Course, names: Sequence[str], options: list[str], own: object) -> tuple[int, str]:
    """Call pytest on these exercises' checks in this process: its status, and what it said on stderr.

    Other people's pytest plugins have no say in a grade (and nbval's would import all of Jupyter).
    """
    arguments = [*(str(course.checks(name)) for name in names), *options]
    arguments += [word for name in LEFT_OUT for word in ("-p", f"no:{name}")]
    arguments += [
        "--disable-plugin-autoload",
        "--capture=no",
        "--assert=plain",
        "--noconftest",
        "--import-mode=importlib",
    ]
    arguments += ["-c", os.devnull, "--rootdir", str(course.root), "-o", f"pythonpath={course.autograder}"]
    said = io.StringIO()
    with contextlib.redirect_stderr(said), _forgotten(course.autograder):
        status = pytest.main(arguments, plugins=[plugin, own])
    return int(status), said.getvalue().strip()


@contextlib.contextmanager
def _forgotten(folder: Path) -> Iterator[None]:
    """What is imported from `folder` in this block is imported again next time, and leaves no bytecode there.

    A process that stays warm may be asked about another course, whose helper modules have the same names.
    """
    before = set(sys.modules)
    sys.dont_write_bytecode, usual = True, sys.dont_write_bytecode
    try:
        yield
    finally:
        sys.dont_write_bytecode = usual
        for name in set(sys.modules) - before:
            file = getattr(sys.modules[name], "__file__", None)
            if name.startswith("autograder") or (file and Path(file).is_relative_to(folder)):
                del sys.modules[name]
