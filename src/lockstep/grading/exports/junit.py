"""JUnit's XML, which every CI system shows: a suite for each exercise, a case for each check."""

from __future__ import annotations

from xml.etree import ElementTree

from ..classroom import ClassResult
from ..verdict import CheckOutcome, CheckResult, ExerciseResult, Report
from . import visible


def junit(graded: ClassResult) -> str:
    """The class as XML 1.0, its suites called `LEARNER: EXERCISE`.

    A failed check is a failure, a check not run is skipped, a fault of ours is an error. A learner with nothing to
    grade has one case, skipped for this reason.
    """
    root = ElementTree.Element("testsuites", name="lockstep")
    for one in graded.learners:
        if one.report is not None:
            _report(root, one.report, f"{one.id}: ")
    for one in graded.learners:
        if one.report is None:
            suite = _suite_of(root, f"{one.id}: nothing to grade", skipped=1)
            case = ElementTree.SubElement(suite, "testcase", classname="lockstep", name="handed in", time="0.000")
            ElementTree.SubElement(case, "skipped", message=_text("; ".join(one.handed.refused)))
    ElementTree.indent(root)
    return f'<?xml version="1.0" encoding="utf-8"?>\n{ElementTree.tostring(root, encoding="unicode")}\n'


def _report(root: ElementTree.Element, report: Report, of: str) -> None:
    for exercise in report.exercises:
        _suite(root, exercise, of)
    if report.faults:
        suite = _suite_of(root, f"{of}the grader", errors=len(report.faults))
        for number, fault in enumerate(report.faults, 1):
            case = ElementTree.SubElement(suite, "testcase", classname="lockstep", name=f"fault {number}", time="0.000")
            ElementTree.SubElement(case, "error", message=_text(fault).partition("\n")[0]).text = _text(fault)


def _suite_of(
    root: ElementTree.Element, name: str, passed: int = 0, failures: int = 0, skipped: int = 0, errors: int = 0
) -> ElementTree.Element:
    counts = {"tests": passed + failures + skipped + errors, "failures": failures, "skipped": skipped, "errors": errors}
    return ElementTree.SubElement(
        root, "testsuite", {"name": _text(name), **{key: str(n) for key, n in counts.items()}}
    )


def _suite(root: ElementTree.Element, exercise: ExerciseResult, of: str) -> None:
    outcomes = [check.outcome for check in exercise.checks]
    counts = (outcomes.count(one) for one in (CheckOutcome.PASSED, CheckOutcome.FAILED, CheckOutcome.NOT_RUN))
    suite = _suite_of(root, f"{of}{exercise.name}", *counts)
    suite.set("time", f"{exercise.seconds:.3f}")
    for check in exercise.checks:
        _case(suite, exercise.name, check)


def _case(suite: ElementTree.Element, exercise: str, check: CheckResult) -> None:
    place, name = _text(exercise.replace("/", ".")), _text(check.name)
    case = ElementTree.SubElement(suite, "testcase", classname=place, name=name, time=f"{check.seconds:.3f}")
    if check.outcome is CheckOutcome.NOT_RUN:
        ElementTree.SubElement(case, "skipped", message=_text(check.reason))
    elif check.outcome is CheckOutcome.FAILED:
        found = check.diagnosis
        message = _text(found.message) if found else ""
        kind = _text(found.id) if found else "failed"
        failure = ElementTree.SubElement(case, "failure", message=message.partition("\n")[0], type=kind)
        if found:
            read, proof = f"read: {found.read}" if found.read else "", found.proof.shown()
            lines = (found.place, found.message, found.why, read, proof)
            failure.text = _text("\n".join(line for line in lines if line))
    if check.output:
        ElementTree.SubElement(case, "system-out").text = _text(check.output)


def _text(text: str) -> str:
    """Escapes the characters that XML 1.0 forbids: they would make the whole file unreadable."""
    return visible(text.replace("\r\n", "\n"), keep="\n\t")
