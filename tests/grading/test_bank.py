"""The grader's own exam: each wrong submission fails for its own reason, each right one passes, on any seed.

A wrong one names in its first lines the diagnosis that it must get (`# diagnosis: missing-set-epoch`). That diagnosis
must come first, and no other may stand beside it unless the file says so (`# also: …`), so that nothing hides it.

A batch script (`NAME.sbatch`) is handed in beside the reference, and graded by the checks whose ids have "batch" in them,
where this machine has SLURM. A Python file whose mistake shows on several hosts alone says so (`# needs: hosts`).
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from lockstep import cluster
from lockstep.authoring.bank import said
from lockstep.authoring.stubs import SCRIPT, make_stub
from lockstep.grading.course import Course
from lockstep.grading.text import report_text
from lockstep.grading.verdict import CheckOutcome, Report
from lockstep.grading.worker import Worker

BANK = Path(__file__).resolve().parents[1] / "submissions"
NAMES = Course(BANK.parents[1]).names
WRONG = sorted(path for path in BANK.glob("wrong/**/*.py"))
RIGHT = sorted(path for path in BANK.glob("right/**/*.py"))
WRONG_SCRIPTS = sorted(BANK.glob(f"wrong/**/*{SCRIPT}"))
RIGHT_SCRIPTS = sorted(BANK.glob(f"right/**/*{SCRIPT}"))


def exercise(path: Path) -> str:
    """The exercise that a file of the bank hands in: its folder below `wrong` or `right`."""
    return "/".join(path.relative_to(BANK).parts[1:-1])


def label(path: Path) -> str:
    """`train_ddp/no_set_epoch`, or `train/no_srun.sbatch`."""
    return f"{exercise(path)}/{path.stem if path.suffix == '.py' else path.name}"


def grade(path: Path, worker: Worker, course: Course, folder: Path) -> Report:
    """What the grader says of a file of the bank."""
    name = exercise(path)
    needed = ["slurm"] if path.suffix == SCRIPT else said(path, "needs")
    for missing in (cluster.available(feature) for feature in needed):  # type: ignore[arg-type]
        if missing is not None:
            pytest.skip(f"not run: {missing}")
    if path.suffix == ".py":
        return worker.grade(course, [name], path)
    shutil.copyfile(course.solutions / f"{name}.py", folder / f"{name}.py")
    shutil.copyfile(path, folder / f"{name}{SCRIPT}")
    return worker.grade(course, [name], folder, checks="batch")


@pytest.mark.parametrize("path", WRONG + WRONG_SCRIPTS, ids=label)
def test_wrong_fails_for_its_own_reason(path: Path, worker: Worker, course: Course, tmp_path: Path) -> None:
    """The named diagnosis comes first and alone, with a message in which something was seen."""
    expected = said(path, "diagnosis")
    assert len(expected) == 1, f"{path} does not say which diagnosis it must get"
    assert expected[0] in course.catalogue, f"{expected[0]} is not in autograder/diagnoses.toml"
    report = grade(path, worker, course, tmp_path)
    assert not report.faults, report.faults
    (result,) = report.exercises
    shown = report_text(report)
    assert not result.passed, f"it passed\n{shown}"
    found = [diagnosis.id for diagnosis in result.diagnoses]
    assert found, f"it was not graded at all\n{shown}"
    assert found[0] == expected[0], f"the first diagnosis is {found[0]}\n{shown}"
    assert set(found) <= {*expected, *said(path, "also")}, f"other diagnoses beside it: {found}\n{shown}"
    first = result.diagnoses[0]
    assert first.message and first.why and first.read, shown
    assert "Traceback" not in first.message and "lockstep-grade-" not in shown, shown
    if first.line is not None:
        assert 1 <= first.line <= len(path.read_text(encoding="utf-8").splitlines())


@pytest.mark.parametrize("path", RIGHT + RIGHT_SCRIPTS, ids=label)
def test_right_passes(path: Path, worker: Worker, course: Course, tmp_path: Path) -> None:
    """Another style is no mistake. Beside a Python file lies no batch script, so that its checks are not run."""
    assert as_far_as_it_can(grade(path, worker, course, tmp_path), "there is no train.sbatch beside train.py")


def test_solutions_pass_together(worker: Worker, course: Course) -> None:
    """The reference passes everything, as a folder; without SLURM on this machine, all but that."""
    report = worker.grade(course, list(NAMES), course.solutions)
    assert as_far_as_it_can(report)
    assert [result.name for result in report.exercises] == list(NAMES), report_text(report)


def as_far_as_it_can(report: Report, *reasons: str) -> bool:
    """Whether everything has passed but what was not run for these reasons, or because this machine has no SLURM or hosts."""
    assert not report.faults, report.faults
    absent = {str(cluster.available("slurm")), str(cluster.available("hosts"))} - {"None"}
    held_back = set()
    for check in (check for result in report.exercises for check in result.checks):
        because = check.reason.startswith((*reasons, *absent)) or check.reason[7:-1] in held_back  # needs “…”
        if check.outcome is CheckOutcome.NOT_RUN and because:
            held_back.add(check.name)
        else:
            assert check.outcome is CheckOutcome.PASSED, report_text(report)
    return bool(report.exercises)


@pytest.mark.parametrize("name", NAMES)
def test_stub_is_recognised(name: str, worker: Worker, course: Course, tmp_path: Path) -> None:
    """The untouched stub fails as such, once; its other checks are not run, and no point is given."""
    stub = tmp_path / f"{name}.py"
    stub.parent.mkdir(exist_ok=True)
    (stub.parent / "ticket.txt").write_text("1\n")
    stub.write_text(make_stub((course.solutions / f"{name}.py").read_text(encoding="utf-8"), name), encoding="utf-8")
    report = worker.grade(course, [name], stub)
    (result,) = report.exercises
    assert not report.faults and result.score == 0, report_text(report)
    broken = {"not-diagnosed", "still-broken"} if name.startswith("clinic/") else {"not-implemented"}
    assert {diagnosis.id for diagnosis in result.diagnoses} == broken, report_text(report)
    assert result.checks[0].outcome is CheckOutcome.FAILED


@pytest.mark.parametrize("name", NAMES)
def test_bank_is_large_enough(name: str) -> None:
    """At least 12 wrong and 4 right ones for an exercise; 3 wrong mends and a right one for a case of the clinic."""
    wrong, right = (3, 1) if name.startswith("clinic/") else (12, 4)
    assert len([path for path in WRONG if exercise(path) == name]) >= wrong
    assert len([path for path in RIGHT if exercise(path) == name]) >= right


def test_bank_of_batch_scripts_is_large_enough(course: Course) -> None:
    """The same for an exercise with a batch script."""
    for name in (name for name in NAMES if course.has_script(name)):
        assert len([path for path in WRONG_SCRIPTS if exercise(path) == name]) >= 12
        assert len([path for path in RIGHT_SCRIPTS if exercise(path) == name]) >= 4
