"""The `check` command: its exit codes, its JSON, what a submission may be, and what has no effect on a grade."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support import ROOT
from support.command_line import CommandLine, only
from typer.testing import CliRunner

from lockstep.authoring.bank import find
from lockstep.commands import learner
from lockstep.course import Course
from lockstep.grading.request import GradeRequest
from lockstep.grading.text import check_text, report_text
from lockstep.grading.verdict import CheckOutcome, CheckResult, Diagnosis, ExerciseResult, Report, from_json
from lockstep.grading.worker import Worker
from lockstep.ranks.text import Row

CHECK_KEYS = {"name", "outcome", "diagnosis", "output"}
DIAGNOSIS_KEYS = {"id", "message", "evidence", "ranks", "file", "line", "read"}


def write(folder: Path, name: str, text: str) -> Path:
    """A submission."""
    file = folder / f"{name}.py"
    file.write_text(text, encoding="utf-8")
    return file


def test_json_is_one_object_of_schema_1(lockstep: CommandLine, course: Course) -> None:
    """Exit 0 for the solutions; the names of the schema are all there."""
    done = lockstep("check", "setup_ddp", "--submission", str(course.solutions), "--json", "--seed", "7")
    assert done.returncode == 0, done.stderr
    raw = only(done.stdout)
    assert (raw["schema"], raw["seed"]) == (1, 7)
    (exercise,) = raw["exercises"]
    assert exercise["name"] == "setup_ddp" and exercise["passed"] is True
    assert exercise["score"] == exercise["max_score"] == len(exercise["checks"]) > 3
    assert exercise["seconds"] > 0
    for check in exercise["checks"]:
        assert set(check) >= CHECK_KEYS and check["outcome"] == "passed" and check["diagnosis"] is None
    assert from_json(raw).to_json() == raw


def test_a_report_from_before_there_were_rows_shows_its_table() -> None:
    table = "  rank   waits in\n  0      barrier #1"
    found = Diagnosis("hang", "it hangs", f"{table}\n\nIt waits.")
    check = CheckResult("ends", "test_e", CheckOutcome.FAILED, found)
    old = Report(7, (ExerciseResult("train_ddp", (check,)),)).to_json()
    del old["exercises"][0]["checks"][0]["diagnosis"]["rows"]
    new = replace(check, diagnosis=replace(found, evidence="It waits.", rows=(Row("0", "barrier #1"),)))
    (read,) = from_json(old).exercises[0].checks
    assert check_text(read) == check_text(new) and table.replace("\n", "\n      ") in check_text(new)


@pytest.fixture
def here(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str]]:
    """Calls `lockstep …` in this process, with exit code and output; the tests' warm process is the one that it finds."""
    monkeypatch.setenv("LOCKSTEP_WARM", "1")
    monkeypatch.setattr("lockstep.commands.check.shared", worker.grade)

    def call(*arguments: str) -> tuple[int, str]:
        done = CliRunner().invoke(learner.commands, arguments, standalone_mode=False)
        assert done.exception is None, done.exception
        return done.return_value, done.stdout

    return call


def test_failure_is_exit_1_with_a_diagnosis(
    here: Callable[..., tuple[int, str]], course: Course, tmp_path: Path
) -> None:
    """A failed check carries its diagnosis, with the submission's own line."""
    text = (course.solutions / "train_ddp.py").read_text(encoding="utf-8")
    broken = write(tmp_path, "train_ddp", text.replace("sampler.set_epoch(epoch)", "pass"))
    assert broken.read_text() != text
    code, said = here("check", "train_ddp", "--submission", str(broken), "--json")
    assert code == 1, said
    failed = [check for check in only(said)["exercises"][0]["checks"] if check["outcome"] == "failed"]
    assert [check["diagnosis"]["id"] for check in failed] == ["missing-set-epoch"]
    diagnosis = failed[0]["diagnosis"]
    assert set(diagnosis) >= DIAGNOSIS_KEYS
    assert (
        diagnosis["file"].endswith("train_ddp.py") and "epoch" in broken.read_text().splitlines()[diagnosis["line"] - 1]
    )


def test_a_wait_for_ranks_that_have_left_the_code(here: Callable[..., tuple[int, str]]) -> None:
    """The collective that the others wait in is the check's own: the first line does not speak of it."""
    wrong = find(ROOT, "setup_ddp/waits_on_rank_0")
    assert wrong is not None
    _, said = here("check", "--submission", wrong.label, "--json")
    first = only(said)["exercises"][0]["checks"][0]["diagnosis"]
    assert (
        first["message"] == "Rank 0 waits in barrier #1, where nobody else comes: ranks 1, 2 and 3 have left your code."
    )
    assert wrong.text.splitlines()[first["line"] - 1].strip() == "dist.barrier()"


def test_a_call_that_meets_one_of_the_checks_own(here: Callable[..., tuple[int, str]]) -> None:
    """... and went on with it: the ranks part where one calls in the submission, and the others have left it."""
    wrong = find(ROOT, "setup_ddp/reduces_on_rank_0")
    assert wrong is not None
    _, said = here("check", "--submission", wrong.label, "--json")
    first = only(said)["exercises"][0]["checks"][0]["diagnosis"]
    assert first["message"] == "Rank 0 called all_reduce #1 where ranks 1, 2 and 3 had left your code."
    assert wrong.text.splitlines()[first["line"] - 1].strip() == "dist.all_reduce(torch.ones(1))"
    branch = f"Rank 0 took the branch at line {first['line'] - 1} (if rank == 0); ranks 1, 2 and 3 did not."
    assert first["evidence"] == branch


@pytest.mark.parametrize(
    ("label", "message", "line", "evidence"),
    [
        ("train_ddp/uneven_data_hang",
         "The ranks took different numbers of steps (backward passes: rank 0: 4, rank 1: 3, rank 2: 3).",
         "for chosen in my_indices(len(data), rank, world_size, epoch).split(batch_size):",
         "Rank 0 is inside the loop at line {} (for chosen in my_indices(len(data), rank, world_size, …); "
         "ranks 1 and 2 are not."),
        ("checkpoint/barrier_on_rank_0",
         "Rank 0 called barrier #3; ranks 1 and 2 did not, and went on to barrier_on_rank_0.py:63.",
         "dist.barrier()", "Rank 0 took the branch at line 56 (if dist.get_rank() == 0); ranks 1 and 2 did not."),
        ("shard_optimizer/owner_alone_sends",
         "All ranks had the same parameters and the same gradients, but their calls differ. In broadcast #1, rank 1 names "
         "rank 1 as the root, and rank 0 names rank 0.", "dist.broadcast(parameter, src=dist.get_rank())", ""),
    ],
)  # fmt: skip
def test_a_hang_is_told_once(
    here: Callable[..., tuple[int, str]], label: str, message: str, line: str, evidence: str
) -> None:
    """The mistake, the line, the table and what is known of this run alone; the rules are in `why`."""
    wrong = find(ROOT, label)
    assert wrong is not None
    _, said = here("check", "--submission", wrong.label, "--json")
    found = [one["diagnosis"] for one in only(said)["exercises"][0]["checks"] if one["diagnosis"]]
    assert found[0]["message"] == message and found[0]["rows"]
    assert wrong.text.splitlines()[found[0]["line"] - 1].strip() == line
    assert " ".join(found[0]["evidence"].split()) == evidence.format(found[0]["line"])
    code, source = found[0]["code"], wrong.text.splitlines()
    assert code and all(one["source"] == source[one["number"] - 1].rstrip() for one in code)
    standing = {int(row["at"].rpartition(":")[2]) for row in found[0]["rows"]}
    assert standing == {one["number"] for one in code if "← rank" in one["note"]}
    assert [one["number"] for one in code if one["branch"]] == [
        int(n) for n in re.findall(r"at line (\d+)", found[0]["evidence"])
    ]
    file = f"{label.partition('/')[2]}.py"
    assert found[0]["file"] == file and {row["at"].partition(":")[0] for row in found[0]["rows"]} == {file}


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ([], "which exercise"),
        ([], "clinic/… (28 of them)"),
        (["train_dp"], "Did you mean train_ddp"),
        (["exercises/clinic/short_shart.py"], "Did you mean clinic/short_shard"),
        (["xyz"], "There are: average_gradients, "),
        (["solutions/train_ddp.py"], "./lockstep check train_ddp --submission solutions/train_ddp.py"),
        (["train_ddp", "--submission", "/no/such/file.py"], "there is no"),
        (
            ["train", "--submission", "solutions/train.sbatch"],
            "a batch script: give the folder that holds it and train.py",
        ),
        (["train_ddp", "--all"], "not both"),
        (["--all", "--submission", "pyproject.toml"], "one file"),
        (["train_ddp", "--device", "tpu"], "tpu"),
        (["train_ddp", "--seed", "x"], "seed"),
    ],
)
def test_usage_errors_are_exit_2(lockstep: CommandLine, arguments: list[str], word: str) -> None:
    """One clear line on stderr, nothing on stdout, no traceback."""
    done = lockstep("check", *arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    assert word in done.stderr and "Traceback" not in done.stderr and not done.stdout


def test_an_exercise_may_be_named_by_its_file(course: Course, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a shell completes it, from the course's folder, from exercises/, or by an absolute path."""
    monkeypatch.chdir(course.root)
    asked = [
        "exercises/train_ddp.py",
        str(course.exercises / "clinic" / "nan_batch.py"),
        "train.sbatch",
        "setup_ddp.py",
    ]
    assert course.require(asked) == ["setup_ddp", "train_ddp", "clinic/nan_batch", "train"]
    monkeypatch.chdir(course.exercises / "clinic")
    assert course.require(["nan_batch.py"]) == ["clinic/nan_batch"]


def test_our_own_fault_is_exit_3(lockstep: CommandLine, course: Course, tmp_path: Path) -> None:
    """A check that breaks is our fault, says so, and gives the submission no failed check."""
    copy = tmp_path / "course"
    for folder in ("autograder", "solutions"):
        shutil.copytree(course.root / folder, copy / folder)
    checks = copy / "autograder" / "test_setup_ddp.py"
    checks.write_text(
        checks.read_text() + '\n\ndef test_ours(grader):\n    """a check of ours that breaks"""\n    1 / 0\n'
    )
    done = lockstep("check", "setup_ddp", "--submission", str(course.solutions), "--json", LOCKSTEP_COURSE=str(copy))
    assert done.returncode == 3, done.stdout + done.stderr
    raw = only(done.stdout)
    assert "ZeroDivisionError" in raw["faults"][0]
    *others, ours = raw["exercises"][0]["checks"]
    assert all(check["outcome"] == "passed" for check in others) and others
    assert ours["outcome"] == "not run" and ours["diagnosis"] is None and "ours" in ours["reason"]


@pytest.mark.slow
def test_checks_that_cannot_be_read_are_our_fault(lockstep: CommandLine, course: Course, tmp_path: Path) -> None:
    """A check file that cannot be imported is exit 3 with its reason, not taken for an interrupt."""
    copy = tmp_path / "course"
    for folder in ("autograder", "solutions"):
        shutil.copytree(course.root / folder, copy / folder)
    (copy / "autograder" / "test_setup_ddp.py").write_text("import nothing_of_this_name\n")
    done = lockstep("check", "setup_ddp", "--submission", str(course.solutions), "--json", LOCKSTEP_COURSE=str(copy))
    assert done.returncode == 3, done.stdout + done.stderr
    assert "nothing_of_this_name" in only(done.stdout)["faults"][0]


@pytest.mark.slow
def test_plain_pytest_grades_too(course: Course, tmp_path: Path) -> None:
    """`pytest autograder` works by itself, and shows the diagnosis instead of our frames."""
    import os
    import subprocess
    import sys

    text = (course.solutions / "setup_ddp.py").read_text(encoding="utf-8")
    write(tmp_path, "setup_ddp", text.replace("dist.destroy_process_group()", "pass"))
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "autograder/test_setup_ddp.py", "--submission", str(tmp_path), "-q", "-p", "no:cacheprovider"],
        cwd=course.root, capture_output=True, text=True, timeout=180, env=environment,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert "cleanup-missing" in done.stdout and "raise Failed" not in done.stdout


@pytest.mark.slow
def test_same_seed_same_verdict(worker: Worker, course: Course, tmp_path: Path) -> None:
    """A regrade from the recorded seed says the same, word for word."""
    text = (course.solutions / "train_ddp.py").read_text(encoding="utf-8")
    broken = write(tmp_path, "train_ddp", text.replace("lr=lr", "lr=lr * 1.5"))
    assert broken.read_text() != text

    def words(seed: int | None) -> tuple[int, list[tuple[str, str, str]]]:
        report = worker.grade(course, GradeRequest(("train_ddp",), broken, seed=seed))
        return report.seed, [(c.name, c.outcome.value, c.diagnosis.message if c.diagnosis else c.reason)
                             for c in report.exercises[0].checks]  # fmt: skip

    seed, first = words(None)
    assert words(seed) == (seed, first)
    others = [words(seed + more)[1] for more in (1, 2, 3)]  # one may say the same, rounded
    assert any(other != first for other in others), "the inputs do not depend on the seed"


def test_broken_dependency_is_not_charged_twice(worker: Worker, course: Course, tmp_path: Path) -> None:
    """A folder whose setup_ddp fails has train_ddp judged with the reference."""
    write(
        tmp_path,
        "setup_ddp",
        "def setup_ddp(rank, world_size):\n    raise RuntimeError('mine is broken')\n\ndef cleanup_ddp():\n    pass\n",
    )
    shutil.copy(course.solutions / "train_ddp.py", tmp_path)
    report = worker.grade(course, GradeRequest(("setup_ddp", "train_ddp"), tmp_path))
    first, second = report.exercises
    assert not first.passed and second.passed, report_text(report)


def test_own_helper_in_a_dependency(worker: Worker, course: Course, tmp_path: Path) -> None:
    """A learner's own setup_ddp is taken when train_ddp needs a name that only it has."""
    own = (course.solutions / "setup_ddp.py").read_text() + "\n\ndef say_hello():\n    return 'hello'\n"
    write(tmp_path, "setup_ddp", own)
    text = (course.solutions / "train_ddp.py").read_text()
    write(tmp_path, "train_ddp", text + "\n\nfrom setup_ddp import say_hello\nassert say_hello() == 'hello'\n")
    report = worker.grade(course, GradeRequest(("train_ddp",), tmp_path))
    assert report.passed, report_text(report)


def test_what_lies_beside_has_no_effect(worker: Worker, course: Course, tmp_path: Path) -> None:
    """torch.py, conftest.py, sitecustomize.py and others in the same folder are not taken along."""
    shutil.copy(course.solutions / "setup_ddp.py", tmp_path)
    for name in ("torch", "conftest", "sitecustomize", "pytest", "random", "numpy", "usercustomize", "lockstep"):
        write(tmp_path, name, "raise SystemExit('this file must not be imported')\n")
    report = worker.grade(course, GradeRequest(("setup_ddp",), tmp_path))
    assert report.passed, report_text(report)


ODD = {
    "syntax error": ("def setup_ddp(rank, world_size:\n    pass\n", "syntax-error"),
    "unknown import": ("import no_such_package\n", "import-error"),
    "nothing defined": ("x = 1\n", "import-error"),
    "leaves at import": ("raise SystemExit(0)\n", "exited-early"),
    "os._exit at import": ("import os\nos._exit(0)\n", "exited-early"),
    "another signature": ("def setup_ddp():\n    pass\n\ndef cleanup_ddp():\n    pass\n", "wrong-signature"),
    "asks the keyboard": ("input('rank? ')\n", "raised"),
    "kills itself": ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n", "crashed"),
    "prints without end": ("while True:\n    print('hello ' * 1000)\n", "too-much-output"),
}


@pytest.mark.parametrize("case", ODD, ids=str)
def test_odd_submissions_have_plain_words(case: str, worker: Worker, course: Course, tmp_path: Path) -> None:
    """Whatever the file does, the first diagnosis says it, and no trace of our own code is shown."""
    text, expected = ODD[case]
    report = worker.grade(course, GradeRequest(("setup_ddp",), write(tmp_path, "setup_ddp", text)))
    shown = report_text(report)
    (result,) = report.exercises
    assert not report.faults, report.faults
    assert result.diagnoses[0].id == expected, shown
    assert "lockstep/" not in shown and "lockstep-grade-" not in shown, shown
    assert result.score == 0


@pytest.mark.parametrize(
    "prefix", [b"\xef\xbb\xbf", b"# -*- coding: latin-1 -*-\n# caf\xe9\n"], ids=["byte order mark", "latin-1"]
)
def test_encodings(prefix: bytes, worker: Worker, course: Course, tmp_path: Path) -> None:
    """A file is read as Python reads it, Windows line ends included."""
    text = (course.solutions / "setup_ddp.py").read_bytes().replace(b"\n", b"\r\n")
    (tmp_path / "setup_ddp.py").write_bytes(prefix + text)
    report = worker.grade(course, GradeRequest(("setup_ddp",), tmp_path))
    assert report.passed, report_text(report)


def test_not_run_is_not_passed(worker: Worker, course: Course, tmp_path: Path) -> None:
    """Checks behind a failed one are not run, with the reason, and score nothing."""
    text = (course.solutions / "train_ddp.py").read_text()
    report = worker.grade(
        course, GradeRequest(("train_ddp",), write(tmp_path, "train_ddp", "raise ValueError('at import')\n" + text))
    )
    (result,) = report.exercises
    outcomes = [check.outcome for check in result.checks]
    assert outcomes.count(CheckOutcome.FAILED) >= 1 and CheckOutcome.PASSED not in outcomes
    waiting = [check for check in result.checks if check.outcome is CheckOutcome.NOT_RUN]
    assert waiting and all(check.reason.startswith("needs") for check in waiting)
    assert result.score == 0 and not result.passed


@pytest.mark.slow
def test_whoever_reads_may_stop_reading(course: Course) -> None:
    """`lockstep check … | head -1`: the grading goes on, and its status is the grade's."""
    command = [sys.executable, "-m", "lockstep", "check", "device_report", "--submission", str(course.solutions)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "LOCKSTEP_WARM": "0", "PYTHONUNBUFFERED": "1"}
    done = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert done.stdout is not None and done.stderr is not None
    while "device_report" not in done.stdout.readline():
        pass
    done.stdout.close()
    assert done.stderr.read() == ""
    assert done.wait(120) == 0
    done.stderr.close()


def test_a_check_that_is_asked_for_brings_those_that_it_needs(worker: Worker, course: Course) -> None:
    """Or comes alone, as the bank's entries are graded."""
    request = GradeRequest(("checkpoint",), course.solutions / "checkpoint.py", checks="test_keep")
    for alone, needed in ((False, ["test_one_writer", "test_round_trip", "test_newest"]), (True, [])):
        (result,) = worker.grade(course, replace(request, alone=alone)).exercises
        told = [(check.id, check.outcome) for check in result.checks]
        assert told == [(id, CheckOutcome.PASSED) for id in (*needed, "test_keep")]
