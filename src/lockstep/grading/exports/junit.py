"""JUnit's XML, which every CI system shows: a suite for each exercise, a case for each check."""

from __future__ import annotations

from xml.etree import ElementTree

from ..classroom import ClassResult
from ..text import visible
from ..verdict import CheckOutcome, CheckResult


def junit(graded: ClassResult) -> str:
    """The class as XML 1.0, its suites called `LEARNER: EXERCISE`.

    A failed check is a failure, a check not run is skipped, a fault of ours is an error. A learner with nothing to
    grade has one case, skipped for this reason.
    """
    root = ElementTree.Element("testsuites", name="lockstep")
    for one in sorted(graded.learners, key=lambda one: one.report is None):
        for exercise in one.report.exercises if one.report else ():
            suite = _added(root, "testsuite", name=f"{one.id}: {exercise.name}", time=f"{exercise.seconds:.3f}")
            for check in exercise.checks:
                _check(suite, exercise.name, check)
        if one.report is None:
            suite = _added(root, "testsuite", name=f"{one.id}: nothing to grade")
            _added(_case(suite, "lockstep", "handed in"), "skipped", message="; ".join(one.handed.refused))
        elif one.report.faults:
            suite = _added(root, "testsuite", name=f"{one.id}: the grader")
            for number, fault in enumerate(one.report.faults, 1):
                case = _case(suite, "lockstep", f"fault {number}")
                _added(case, "error", fault, message=fault.partition("\n")[0])
    for suite in root:
        counts = {"failures": "failure", "skipped": "skipped", "errors": "error"}
        suite.attrib |= {"tests": str(len(suite))} | {
            key: str(len(suite.findall(f"*/{of}"))) for key, of in counts.items()
        }
    ElementTree.indent(root)
    return f'<?xml version="1.0" encoding="utf-8"?>\n{ElementTree.tostring(root, encoding="unicode")}\n'


def _check(suite: ElementTree.Element, exercise: str, check: CheckResult) -> None:
    case = _case(suite, exercise.replace("/", "."), check.name, check.seconds)
    if check.outcome is CheckOutcome.NOT_RUN:
        _added(case, "skipped", message=check.reason)
    elif check.diagnosis is not None:
        found = check.diagnosis
        read = f"read: {found.read}" if found.read else ""
        lines = (found.place, found.message, found.why, read, found.proof.shown())
        text = "\n".join(line for line in lines if line)
        _added(case, "failure", text, message=found.message.partition("\n")[0], type=found.id)
    if check.output:
        _added(case, "system-out", check.output)


def _case(suite: ElementTree.Element, place: str, name: str, seconds: float = 0.0) -> ElementTree.Element:
    return _added(suite, "testcase", classname=place, name=name, time=f"{seconds:.3f}")


def _added(to: ElementTree.Element, tag: str, text: str = "", **attributes: str) -> ElementTree.Element:
    element = ElementTree.SubElement(to, tag, {name: _text(value) for name, value in attributes.items()})
    element.text = _text(text) or None
    return element


def _text(text: str) -> str:
    """Escapes the characters that XML 1.0 forbids: they would make the whole file unreadable."""
    return visible(text.replace("\r\n", "\n"), keep="\n\t")
