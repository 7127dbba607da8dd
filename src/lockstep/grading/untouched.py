"""A stub that is still as it was handed out: answered at once, without a rank, and no try.

Only a learner's own file is looked at, and only the whole stub counts: a part that was written is graded as ever. A
broken job of the clinic, whose stub runs, is always graded.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import replace

from ..course import Course, CourseError
from ..course.hints import stub, suffixes
from .request import GradeRequest, OnCheck
from .source import parse
from .stamp import versions
from .submission import locate, shown
from .verdict import UNWRITTEN, CheckOutcome, CheckResult, Diagnosis, ExerciseResult, Report, nothing_written


def untouched(course: Course, request: GradeRequest) -> dict[str, ExerciseResult]:
    """What there is to say of those exercises of the request whose files are their stubs; nothing of a submission."""
    results = ((name, _result(course, name, request)) for name in request.exercises if request.submission is None)
    return {name: result for name, result in results if result is not None}


def with_stubs(
    request: GradeRequest,
    stubs: Mapping[str, ExerciseResult],
    grade: Callable[[GradeRequest], Report],
    on_check: OnCheck | None = None,
) -> Report:
    """`grade` the exercises that are more than their stubs; `stubs` (from `untouched`) are told first."""
    if on_check is not None:
        for name, result in stubs.items():
            for check in result.checks:
                on_check(name, check)
    rest = tuple(name for name in request.exercises if name not in stubs)
    if not rest:
        return Report(request.seed or 0, tuple(stubs.values()), request.device, (), versions(), request.isolation or "")
    report = grade(replace(request, exercises=rest))
    results = {**{result.name: result for result in report.exercises}, **stubs}
    return replace(report, exercises=tuple(results[name] for name in request.exercises if name in results))


def _result(course: Course, name: str, request: GradeRequest) -> ExerciseResult | None:
    file = locate(course, name, request)
    try:
        if any(
            file.with_suffix(suffix).read_text("utf-8") != stub(course, name, suffix)
            for suffix in suffixes(course, name)
        ):
            return None
    except (OSError, ValueError, CourseError):  # something else than a stub, or none to compare it with
        return None
    text = file.read_text("utf-8")
    parts = _unwritten_parts(text)
    checks = list(course.titles(name).items())
    if not parts or not checks:
        return None
    line, message = min(parts)
    entry = course.catalogue[UNWRITTEN]
    where = shown(file, request.directory)
    source = text.splitlines()[line - 1].strip()
    found = Diagnosis(
        UNWRITTEN, nothing_written(message.partition(": ")[2]), file=where, line=line, why=entry.why, source=source
    )
    (id, title), *others = checks
    first = CheckResult(title, id, CheckOutcome.FAILED, found)
    waiting = (CheckResult(other, id, CheckOutcome.NOT_RUN, reason=f"needs “{title}”") for id, other in others)
    return ExerciseResult(name, (first, *waiting), submission=where)


def _unwritten_parts(text: str) -> list[tuple[int, str]]:
    """Line and message of each `raise NotImplementedError("…")`."""
    raised = [node for node in ast.walk(parse(text.encode()) or ast.Module([], [])) if isinstance(node, ast.Raise)]
    calls = [(node.lineno, node.exc) for node in raised if isinstance(node.exc, ast.Call)]
    return [
        (line, str(call.args[0].value))
        for line, call in calls
        if isinstance(call.func, ast.Name)
        and call.func.id == "NotImplementedError"
        and call.args
        and isinstance(call.args[0], ast.Constant)
    ]
