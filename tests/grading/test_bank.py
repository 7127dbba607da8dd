"""The grader's own exam: each wrong submission fails for its own reason, each right one passes, on any seed.

A wrong one names the diagnosis that it must get (`lockstep.authoring.bank`). That diagnosis must come first, and no other
may stand beside it unless the entry says so, so that nothing hides it.

A wrong one is graded by the check that its entry names, alone: a sixth of the work. A tenth of them, drawn by the seed
of each run, are graded by all checks, and so is each whose entry names none; `--whole` does so with all of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.authoring.bank import Entry, entries, shortfall
from lockstep.course import Course
from lockstep.course.stubs import make_stub
from lockstep.grading.request import GradeRequest
from lockstep.grading.text import report_text
from lockstep.grading.verdict import CheckOutcome, Report
from lockstep.grading.worker import Worker

ROOT = Path(__file__).resolve().parents[2]
NAMES = Course(ROOT).names
BANK = entries(ROOT)
WRONG = [entry for entry in BANK if not entry.right]
RIGHT = [entry for entry in BANK if entry.right]
WHOLE = 0.1
"""The share of the wrong ones that a run grades by all checks."""


def each(chosen: list[Entry]) -> pytest.MarkDecorator:
    """One test for each entry. A batch script takes a SLURM cluster, and half a minute."""
    slow = {True: (pytest.mark.slow,), False: ()}
    return pytest.mark.parametrize(
        "entry", [pytest.param(entry, id=entry.label, marks=slow[entry.script]) for entry in chosen]
    )


@pytest.fixture(scope="session")
def whole(request: pytest.FixtureRequest) -> Callable[[Entry], bool]:
    """Whether all checks grade this entry in this run."""
    option = request.config.option
    seed = getattr(option, "randomly_seed", 0)
    return lambda entry: option.whole or random.Random(f"{seed} {entry.label}").random() < WHOLE


def grade(entry: Entry, worker: Worker, course: Course, folder: Path, checks: str | None = None) -> Report:
    """What the grader says of a submission of the bank, by `checks` alone, or by all that grade it."""
    missing = entry.missing()
    if missing:
        pytest.skip(f"not run: {missing}")
    return worker.grade(
        course,
        GradeRequest(
            (entry.exercise,), entry.hand_in(course, folder), checks=checks or entry.checks, alone=checks is not None
        ),
    )


@each(WRONG)
def test_wrong_fails_for_its_own_reason(
    entry: Entry, worker: Worker, course: Course, whole: Callable[[Entry], bool], tmp_path: Path
) -> None:
    """The named diagnosis comes first and alone, from the named check, with a message in which something was seen."""
    mistake = entry.mistake
    assert mistake is not None and mistake.diagnosis in course.catalogue, (
        f"{mistake} is not in autograder/diagnoses.toml"
    )
    report = grade(entry, worker, course, tmp_path, None if whole(entry) else mistake.check)
    assert not report.faults, report.faults
    (result,) = report.exercises
    shown = report_text(report)
    assert not result.passed, f"it passed\n{shown}"
    found = [diagnosis.id for diagnosis in result.diagnoses]
    assert found, f"it was not graded at all\n{shown}"
    assert found[0] == mistake.diagnosis, f"the first diagnosis is {found[0]}\n{shown}"
    noticed = next(check.id for check in result.checks if check.diagnosis is not None)
    assert mistake.check in (noticed, ""), f"the first check to notice it is {noticed}, not {mistake.check}\n{shown}"
    assert set(found) <= {mistake.diagnosis, *mistake.also}, f"other diagnoses beside it: {found}\n{shown}"
    first = result.diagnoses[0]
    assert first.message and first.why and first.read, shown
    assert "Traceback" not in first.message and "lockstep-grade-" not in shown, shown
    if first.line is not None:
        assert 1 <= first.line <= len(entry.text.splitlines())


@each(RIGHT)
def test_right_passes(entry: Entry, worker: Worker, course: Course, tmp_path: Path) -> None:
    """Another style is no mistake. Beside a Python file lies no batch script, so that its checks are not run."""
    check_passed(grade(entry, worker, course, tmp_path), without_script=not entry.script)


def check_passed(report: Report, without_script: bool = False) -> None:
    """All that this machine can run, and that was handed in."""
    assert report.exercises and not report.faults, report.faults
    assert shortfall(report, without_script) is None, report_text(report)


@pytest.mark.parametrize("name", NAMES)
def test_stub_is_recognized(name: str, worker: Worker, course: Course, tmp_path: Path) -> None:
    """The untouched stub fails as such, once; its other checks are not run, and no point is given."""
    stub = tmp_path / f"{name}.py"
    stub.parent.mkdir(exist_ok=True)
    (stub.parent / "ticket.txt").write_text("1\n")
    stub.write_text(make_stub((course.solutions / f"{name}.py").read_text(encoding="utf-8"), name), encoding="utf-8")
    report = worker.grade(course, GradeRequest((name,), stub))
    (result,) = report.exercises
    assert not report.faults and result.score == 0, report_text(report)
    broken = {"not-diagnosed", "still-broken"} if name.startswith("clinic/") else {"not-implemented"}
    assert {diagnosis.id for diagnosis in result.diagnoses} == broken, report_text(report)
    assert result.checks[0].outcome is CheckOutcome.FAILED


@pytest.mark.parametrize("name", NAMES)
def test_bank_is_large_enough(name: str, course: Course) -> None:
    """At least 12 wrong and 4 right ones for an exercise, and for its batch script; 3 and 1 for a case of the clinic."""
    wrong, right = (3, 1) if name.startswith("clinic/") else (12, 4)
    for script in (False, True) if course.has_script(name) else (False,):
        assert len([one for one in WRONG if one.exercise == name and one.script is script]) >= wrong
        assert len([one for one in RIGHT if one.exercise == name and one.script is script]) >= right
