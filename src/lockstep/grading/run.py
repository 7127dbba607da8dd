"""`grade`: run the checks of some exercises on a submission and return what they conclude."""

from __future__ import annotations

import contextlib
import io
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import ranks
from . import plugin
from .course import Course, CourseError
from .plugin import SESSION, Session
from .verdict import CheckResult, Report

Progress = Callable[[str, CheckResult], None]


class _Witness:
    """Takes the results out of a pytest session."""

    def __init__(self, progress: Progress | None) -> None:
        self.progress = progress
        self.session: Session | None = None
        self.told = 0
        self.uncollected: list[str] = []

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:  # a check file of ours that cannot be imported: pytest says "interrupted" after that
            self.uncollected.append(f"{report.nodeid} cannot be collected: {report.longreprtext}")

    def pytest_sessionstart(self, session: Any) -> None:
        self.session = session.config.stash[SESSION]

    def pytest_runtest_logreport(self, report: Any) -> None:
        if self.progress is None or self.session is None or report.when == "teardown":
            return
        results = [(name, check) for name, checks in self.session.results.items() for check in checks]
        for name, check in results[self.told :]:
            self.progress(name, check)
        self.told = len(results)


def grade(
    course: Course,
    names: list[str],
    submission: Path | None = None,
    *,
    device: str = "cpu",
    seed: int | None = None,
    isolation: str | None = None,
    checks: str = "",
    progress: Progress | None = None,
) -> Report:
    """Grade these exercises of a submission (a file, a folder, or None for `exercises/`).

    `isolation` names the tier in which the submission's ranks run (`isolation.TIERS`); None is for one's own code.
    `checks` restricts it to those whose ids contain this. `progress(exercise, check)` is called as checks conclude.
    Raises CourseError for an exercise that is not in the course. What breaks on our side comes back in `Report.faults`.
    """
    import pytest

    if isolation in (None, "none"):
        ranks.warm()
    names = course.require(names)
    arguments = ["--device", device]
    if submission is not None:
        arguments.append(f"--submission={submission}")
    if isolation is not None:
        arguments.append(f"--isolation={isolation}")
    if seed is not None:
        arguments.append(f"--seed={seed}")
    if checks:
        arguments += ["-k", checks]
    witness = _Witness(progress)
    status, said = _pytest(course, names, arguments, witness)
    session = witness.session
    faults = [*(session.faults if session else ()), *witness.uncollected]
    if status == pytest.ExitCode.INTERRUPTED and not witness.uncollected:
        raise KeyboardInterrupt
    if not witness.uncollected and (
        session is None
        or status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        or (status == pytest.ExitCode.TESTS_FAILED and not session.results and not faults)
    ):
        faults.append(said or f"pytest ended with status {status}")
    return Report(session.seed if session else seed or 0, session.exercises() if session else (), device, tuple(faults),
                  versions(), isolation or "")  # fmt: skip


def outline(course: Course, names: list[str]) -> dict[str, tuple[tuple[str, str], ...]]:
    """The checks that these exercises have, by exercise and in order: id and name. Nothing is run.

    Raises CourseError for an exercise that is not in the course, or whose checks cannot be imported.
    """
    import pytest

    names = course.require(names)
    listed = _Lister()
    status, said = _pytest(course, names, ["--collect-only"], listed)
    if status != pytest.ExitCode.OK:
        raise CourseError(f"the checks cannot be collected: {said or f'pytest ended with status {status}'}")
    return {name: tuple(listed.checks.get(name, ())) for name in names}


class _Lister:
    """Takes the checks out of a pytest session that runs none."""

    def __init__(self) -> None:
        self.checks: dict[str, list[tuple[str, str]]] = {}

    def pytest_collection_finish(self, session: Any) -> None:
        for item in session.items:
            self.checks.setdefault(plugin.exercise_of(item), []).append((item.name, plugin.title(item)))


def _pytest(course: Course, names: list[str], arguments: list[str], witness: object) -> tuple[int, str]:
    """Call pytest on these exercises' checks, in this process and with no trace left in it: its status, and what it
    said on stderr."""  # fmt: skip
    import pytest

    arguments = [
        *(str(course.checks(name)) for name in names),
        "-p", "no:cacheprovider", "-p", "no:terminal", "-p", "no:logging",
        "-p", "no:unraisableexception", "-p", "no:threadexception",  # they collect all garbage of a process with torch in it
        "--capture=no", "--assert=plain", "--noconftest",
        "-c", os.devnull, "--rootdir", str(course.root), "-o", f"pythonpath={course.autograder}", "--import-mode=importlib",
        *arguments,
    ]  # fmt: skip
    said = io.StringIO()
    before = set(sys.modules)
    sys.dont_write_bytecode, bytecode = True, sys.dont_write_bytecode
    # Other people's pytest plugins have no say in a grade, and nbval's would import all of Jupyter.
    autoload = os.environ.get("PYTEST_DISABLE_PLUGIN_AUTOLOAD")
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    try:
        with contextlib.redirect_stderr(said):
            status = pytest.main(arguments, plugins=[plugin, witness])
    finally:
        sys.dont_write_bytecode = bytecode
        os.environ.pop("PYTEST_DISABLE_PLUGIN_AUTOLOAD")
        if autoload is not None:
            os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = autoload
        for name in set(sys.modules) - before:
            file = getattr(sys.modules[name], "__file__", None)
            if name.startswith("autograder") or (file and Path(file).is_relative_to(course.autograder)):
                del sys.modules[name]
    return int(status), said.getvalue().strip()


def versions() -> dict[str, str]:
    """What a regrade needs to know of this machine."""
    from importlib.metadata import version

    from .. import __version__

    return {"lockstep": __version__, "torch": version("torch"), "python": platform.python_version()}
