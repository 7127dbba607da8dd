"""JUnit's XML, which every CI system shows: a suite an exercise, a case a check."""

from __future__ import annotations

from collections.abc import Mapping
from xml.etree import ElementTree

from ..verdict import CheckOutcome, CheckResult, ExerciseResult, Report
from . import visible


def junit(report: Report, learner: str = "") -> str:
    """The report as XML 1.0. A failed check is a failure, one that was not run is skipped, a fault of ours is an
    error."""
    root = ElementTree.Element("testsuites", name=_text(learner or "lockstep"))
    _report(root, report, "")
    return _document(root)


def junit_class(reports: Mapping[str, Report], nothing: Mapping[str, str] | None = None) -> str:
    """The reports of a class, by learner, in one document: its suites are called `LEARNER: EXERCISE`. Who handed in
    `nothing` that can be graded has a suite with one case, which was skipped for this reason.
    """
    root = ElementTree.Element("testsuites", name="lockstep")
    for learner, report in reports.items():
        _report(root, report, f"{learner}: ")
    for learner, why in (nothing or {}).items():
        suite = ElementTree.SubElement(root, "testsuite", name=_text(f"{learner}: nothing to grade"), tests="1", failures="0", skipped="1", errors="0")  # fmt: skip
        case = ElementTree.SubElement(suite, "testcase", classname="lockstep", name="handed in", time="0.000")
        ElementTree.SubElement(case, "skipped", message=_text(why))
    return _document(root)


def _document(root: ElementTree.Element) -> str:
    ElementTree.indent(root)
    return f'<?xml version="1.0" encoding="utf-8"?>\n{ElementTree.tostring(root, encoding="unicode")}\n'


def _report(root: ElementTree.Element, report: Report, of: str) -> None:
    for exercise in report.exercises:
        _suite(root, exercise, of)
    if report.faults:
        count = str(len(report.faults))
        suite = ElementTree.SubElement(root, "testsuite", name=_text(f"{of}the grader"), tests=count, failures="0", skipped="0", errors=count)  # fmt: skip
        for number, fault in enumerate(report.faults, 1):
            case = ElementTree.SubElement(suite, "testcase", classname="lockstep", name=f"fault {number}", time="0.000")
            ElementTree.SubElement(case, "error", message=_text(fault).partition("\n")[0]).text = _text(fault)


def _suite(root: ElementTree.Element, exercise: ExerciseResult, of: str) -> None:
    outcomes = [check.outcome for check in exercise.checks]
    suite = ElementTree.SubElement(
        root,
        "testsuite",
        name=_text(f"{of}{exercise.name}"),
        tests=str(len(outcomes)),
        failures=str(outcomes.count(CheckOutcome.FAILED)),
        skipped=str(outcomes.count(CheckOutcome.NOT_RUN)),
        errors="0",
        time=f"{exercise.seconds:.3f}",
    )
    for check in exercise.checks:
        _case(suite, exercise.name, check)


def _case(suite: ElementTree.Element, exercise: str, check: CheckResult) -> None:
    case = ElementTree.SubElement(
        suite,
        "testcase",
        classname=_text(exercise.replace("/", ".")),
        name=_text(check.name),
        time=f"{check.seconds:.3f}",
    )
    if check.outcome is CheckOutcome.NOT_RUN:
        ElementTree.SubElement(case, "skipped", message=_text(check.reason))
    elif check.outcome is CheckOutcome.FAILED:
        found = check.diagnosis
        message = _text(found.message) if found else ""
        failure = ElementTree.SubElement(
            case, "failure", message=message.partition("\n")[0], type=_text(found.id) if found else "failed"
        )
        if found:
            where = f"{found.file}:{found.line}" if found.line else found.file
            lines = (where, found.message, found.why, f"read: {found.read}" if found.read else "", found.evidence)
            failure.text = _text("\n".join(line for line in lines if line))
    if check.output:
        ElementTree.SubElement(case, "system-out").text = _text(check.output)


def _text(text: str) -> str:
    """Characters that XML 1.0 forbids would make the whole file unreadable: they are shown escaped."""
    return visible(text.replace("\r\n", "\n"), keep="\n\t")
