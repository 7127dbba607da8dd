"""The pytest side of the grader. `autograder/conftest.py` takes its hooks from here.

A test is a check, and its docstring's first line is the check's name. It ends by returning (passed), by `grader.fail`
(failed, with a diagnosis) or by raising `CheckNotRun`. Anything else that it raises is a fault of ours and is never
charged to the submission.
"""

from __future__ import annotations

import contextlib
import inspect
import secrets
import time
import traceback
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from .. import ranks
from ..course import Course, CourseError, find
from ..ranks.folder import held_folder, remove_left_folders
from . import isolation
from .grader import CheckNotRun, Failed, Grader, Lacking
from .request import GradeRequest, OnCheck
from .submission import prepare
from .text import check_text
from .verdict import NOT_HANDED_IN, CheckOutcome, CheckResult, ExerciseResult


class Session:
    """What the checks of a grading share, and their results so far."""

    def __init__(self, course: Course, request: GradeRequest) -> None:
        self.course, self.request = course, request
        self.seed = secrets.randbelow(1 << 31) if request.seed is None else request.seed
        self.tier = next((tier for tier in isolation.TIERS if tier.name == request.isolation), None)
        remove_left_folders()
        self.own = contextlib.ExitStack()
        self.scratch = Path(self.own.enter_context(held_folder()))
        if self.tier is not None and self.tier.keeps_apart:
            checks = (self.course.checks(name).read_text(encoding="utf-8") for name in request.exercises)
            namespaces = any("network=" in text for text in checks)
            server = self.tier.server(self.scratch, request.exercises, namespaces=namespaces)
            server.start()
            self.own.enter_context(ranks.served_by(server))
        self.graders: dict[str, Grader] = {}
        self.results: dict[str, list[CheckResult]] = {}
        self.on_check: OnCheck | None = None
        self.faults: list[str] = []
        self.began: dict[str, float] = {}

    def grader(self, name: str) -> Grader:
        if name not in self.graders:
            submission = prepare(self.course, name, self.request, self.scratch)
            self.graders[name] = Grader(
                self.course, submission, self.scratch, self.seed, self.request.device, self.tier
            )
        return self.graders[name]

    def exercises(self) -> tuple[ExerciseResult, ...]:
        done = []
        for name, checks in self.results.items():
            shown = self.graders[name].submission.shown if name in self.graders else ""
            done.append(ExerciseResult(name, tuple(checks), round(sum(check.seconds for check in checks), 3), shown))
        return tuple(done)

    def result(self, exercise: str, check: str) -> CheckResult | None:
        """How an earlier check of this exercise ended."""
        return next((result for result in self.results.get(exercise, []) if result.id == check), None)

    def close(self) -> None:
        """End the processes of this grading, and remove the scratch folder."""
        self.own.close()


EXHAUSTED = (RecursionError, MemoryError)
UNREADABLE = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError, MemoryError)
"""What a check raises when the ranks report something that its scenario never does: the submission has seen to that.
Breaking a check must not be better than failing it."""
BROKEN = "this check of ours broke"
REQUEST = pytest.StashKey[tuple[Course, GradeRequest]]()
SESSION = pytest.StashKey[Session]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """The grader's options, for plain `pytest autograder` as well."""
    group = parser.getgroup("lockstep")
    group.addoption("--submission", help="file or folder to grade (default: exercises/)")
    group.addoption("--device", default="cpu", choices=("cpu", "cuda"), help="where the ranks compute")
    names = [tier.name for tier in isolation.TIERS]
    group.addoption("--isolation", choices=names, help="keep the ranks apart from the judge (default: they are not)")
    group.addoption("--seed", type=int, help="what the inputs are drawn from; a report names its own")


def pytest_configure(config: pytest.Config) -> None:
    """Open the grading. Its checks are in the order of their files, whatever shuffles other tests."""
    config.option.randomly_reorganize = False
    config.addinivalue_line("markers", "needs(check, ...): not run unless these checks of the same file have passed")
    config.addinivalue_line(
        "markers", "stage(what, where): what a learner writes in this stage, and where it is explained"
    )
    course, request = config.stash.get(REQUEST, None) or (find(config.rootpath), _request(config))
    session = Session(course, request)
    config.stash[SESSION] = session
    config.add_cleanup(session.close)


def _request(config: pytest.Config) -> GradeRequest:
    """From the command line of a plain `pytest autograder`."""
    given, seed, device, tier = (
        config.getoption(f"--{name}") for name in ("submission", "seed", "device", "isolation")
    )
    return GradeRequest((), Path(given).resolve() if given else None, seed, device, tier)


def pytest_report_header(config: pytest.Config) -> str:
    """Name the seed, so that a run can be repeated."""
    session = config.stash[SESSION]
    return f"lockstep: seed {session.seed}, device {session.request.device}"


@pytest.fixture(scope="module")
def grader(request: pytest.FixtureRequest) -> Grader:
    """The submission under test, for the exercise that the module's name says."""
    try:
        one = request.config.stash[SESSION].grader(exercise_of(request))
    except CourseError as error:
        pytest.fail(str(error), pytrace=False)
    one.reader = getattr(request.module, "read_failure", None)
    one.own_gpus = getattr(request.module, "OWN_GPUS", False)
    return one


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the checks that were not asked for, unless one that was asked for needs them and isn't run alone."""
    request = config.stash[SESSION].request
    asked = request.checks
    if not asked:
        return
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    needed: set[tuple[str, str]] = set()
    for item in reversed(items):  # a check stands below those that it needs
        exercise = exercise_of(item)
        if asked in item.name or (exercise, item.name) in needed:
            if not request.alone:
                needed |= {(exercise, name) for marker in item.iter_markers("needs") for name in marker.args}
            kept.append(item)
        else:
            left_out.append(item)
    items[:] = kept[::-1]
    config.hook.pytest_deselected(items=left_out)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Hold back the checks of what was not handed in, and those that need others which have not passed."""
    session = item.config.stash[SESSION]
    exercise = exercise_of(item)
    if exercise in session.request.missing:
        raise CheckNotRun(NOT_HANDED_IN)
    for marker in item.iter_markers("needs"):
        for name in marker.args:
            premise = session.result(exercise, name)
            if premise is None and session.request.alone:
                continue
            if premise is None or premise.outcome is not CheckOutcome.PASSED:
                missing = Lacking if premise is not None and premise.lacking else CheckNotRun
                raise missing(f"needs “{premise.name if premise is not None else name}”")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn how a test ended into a check's result."""
    report = yield
    session = item.config.stash[SESSION]
    exercise = exercise_of(item)
    if call.when == "setup":
        session.began[exercise] = time.monotonic()
    if call.when == "teardown" or (call.when == "setup" and call.excinfo is None):
        if call.when == "teardown" and call.excinfo is not None:
            session.faults.append(f"{item.nodeid}: {call.excinfo.value!r}")
        return report
    result = _conclude(item, call, session, exercise)
    if result is None:
        session.faults.append(f"{item.nodeid}: {report.longreprtext}")
        result = CheckResult(title(item), item.name, CheckOutcome.NOT_RUN, reason=BROKEN, stage=stage(item))
    session.results.setdefault(exercise, []).append(result)
    if session.on_check is not None:
        session.on_check(exercise, result)
    if result.outcome is CheckOutcome.FAILED and result.diagnosis is not None:
        report.longrepr = check_text(result)
    elif result.outcome is CheckOutcome.NOT_RUN and result.reason != BROKEN:
        report.outcome = "skipped"
        report.longrepr = (str(item.path), item.reportinfo()[1] or 0, f"not run: {result.reason}")
    return report


def _conclude(item: pytest.Item, call: pytest.CallInfo[Any], session: Session, exercise: str) -> CheckResult | None:
    one = session.graders.get(exercise)
    output, seconds = "", round(time.monotonic() - session.began.get(exercise, time.monotonic()), 3)
    if one is not None:
        output, one.output = one.output, ""
    name = title(item)

    def result(outcome: CheckOutcome, **more: Any) -> CheckResult:
        return CheckResult(name, item.name, outcome, output=output, seconds=seconds, stage=stage(item), **more)

    error = call.excinfo.value if call.excinfo is not None else None
    if error is None:
        return result(CheckOutcome.PASSED)
    if isinstance(error, Failed):
        return result(CheckOutcome.FAILED, diagnosis=error.diagnosis)
    if isinstance(error, CheckNotRun):
        return result(CheckOutcome.NOT_RUN, reason=str(error), lacking=isinstance(error, Lacking))
    if isinstance(error, pytest.skip.Exception):
        return result(CheckOutcome.NOT_RUN, reason=str(error))
    if one is not None and isinstance(error, UNREADABLE) and not (_is_ours(error) or _breaks_anyway(item, session)):
        return result(CheckOutcome.FAILED, diagnosis=one.unreadable(error))
    return None


def _is_ours(error: BaseException) -> bool:
    """True when the error came from starting a run or writing a diagnosis, not from looking at what was seen."""
    if isinstance(error, EXHAUSTED):  # by what was read, wherever that was
        return False
    ours = {Grader._attempt.__code__, Grader.diagnosis.__code__}
    return any(frame.f_code in ours for frame, _ in traceback.walk_tb(error.__traceback__))


def _breaks_anyway(item: pytest.Item, session: Session) -> bool:
    """True when the same check breaks on the reference as well: then it is the check's own doing.

    The reference runs apart from the submission, in a process and a folder of its own. False when there is none.
    """
    exercise = exercise_of(item)
    reference = session.course.solutions / f"{exercise}.py"
    if not reference.is_file() or not isinstance(item, pytest.Function):
        return False
    with held_folder() as folder, ranks.served_by(ranks.client.Server()):
        scratch = Path(folder)
        submission = prepare(session.course, exercise, GradeRequest((exercise,), reference), scratch)
        control = Grader(session.course, submission, scratch, session.seed, session.request.device)
        control.own_gpus = session.graders[exercise].own_gpus
        given = {name: item.funcargs[name] for name in inspect.signature(item.obj).parameters}
        try:
            item.obj(**{**given, "grader": control})
        except (Failed, CheckNotRun, pytest.skip.Exception):
            return False
        except Exception:
            return True
    return False


def title(item: pytest.Item) -> str:
    """The check's name in the learner's words."""
    said = item.obj.__doc__ if isinstance(item, pytest.Function) else None
    return (said or item.name).strip().splitlines()[0].rstrip(".")


def stage(item: pytest.Item) -> str:
    """What the check's stage has a learner do; empty if its exercise has no stages."""
    marker = item.get_closest_marker("stage")
    return "{} ({})".format(*marker.args) if marker is not None else ""


def exercise_of(of: pytest.Item | pytest.FixtureRequest) -> str:
    """The exercise that this test's file checks."""
    return of.config.stash[SESSION].course.of_checks(of.path)
