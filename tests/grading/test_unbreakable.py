"""Nothing that a submission's text holds can break or stall the judge."""

from __future__ import annotations

import os
import random
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT, hostile_sources

from lockstep.course import Course
from lockstep.grading.request import GradeRequest
from lockstep.grading.source import parse
from lockstep.grading.submission import RUN_FOLDER
from lockstep.grading.worker import Worker

CPU_SECONDS = 120
"""A backstop far above what it takes: each of these texts alone took more before it was bounded, some took hours."""


def bounded() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))


@pytest.mark.slow
def test_any_text_is_read() -> None:
    """Parsed, searched for every pattern of the checks, quoted, cleaned of paths, compared: a corpus and random ones."""
    seed = random.SystemRandom().randrange(1 << 30)
    command = [sys.executable, "-W", "ignore", hostile_sources.__file__, str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=bounded)
    last = done.stdout.splitlines()[-1:]
    assert done.returncode == 0, f"seed {seed}, at {last}: status {done.returncode}\n{done.stderr[-3000:]}"
    assert len(done.stdout.splitlines()) == len(hostile_sources.CORPUS) + hostile_sources.DRAWN


@pytest.mark.parametrize("name", hostile_sources.DEEP)
def test_deep_source_is_no_tree(name: str) -> None:
    """None, or a tree of what Python can read; never an exception."""
    tree = parse(hostile_sources.DEEP[name])
    assert tree is None or tree.body


def test_paths_of_runs_are_taken_out() -> None:
    """With all that comes before them, and nothing else."""
    from lockstep.grading.source import without_path

    for text, left in {
        'File "/tmp/lockstep-run-a_b/work/x.py", line 1': 'File "x.py", line 1',
        "/var/a.b/lockstep-run-1/tmp and /lockstep-run-2/work/y": " and y",
        "/tmp/lockstep-run-1/other": "/tmp/lockstep-run-1/other",
        "no path": "no path",
        "a=/t/lockstep-run-x/work/b/t/lockstep-run-y/work/c": "a=bc",
    }.items():
        assert without_path(text, RUN_FOLDER) == left


def test_what_a_killed_grader_leaves_goes_at_the_next_start(tmp_path: Path, course: Course) -> None:
    """Its folder has the submission and references in it."""
    code = (
        "import sys; from pathlib import Path; from lockstep.course import Course; from lockstep.grading.plugin import Session; "
        "from lockstep.grading.request import GradeRequest; root, given = sys.argv[1:]; "
        "session = Session(Course(Path(root)), GradeRequest(('setup_ddp',), Path(given))); session.grader('setup_ddp'); "
        "print(session.scratch, flush=True); input()"
    )

    def start() -> tuple[subprocess.Popen[str], Path]:
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(ROOT), str(course.solutions)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(tmp_path)},
        )  # fmt: skip
        assert process.stdout is not None
        return process, Path(process.stdout.readline().strip())

    killed, left = start()
    assert list(left.rglob("setup_ddp.py"))
    killed.kill()
    killed.communicate()
    assert left.exists()
    following, own = start()
    assert not left.exists() and own.exists()
    following.kill()
    following.communicate()


@pytest.mark.parametrize("name", ["minus", "a great number"])
def test_it_fails_its_checks_and_is_no_fault(name: str, tmp_path: Path, worker: Worker, course: Course) -> None:
    """The submission's own checks fail, nothing of ours broke, and no path of this machine is in the report."""
    stub = (ROOT / "exercises" / "average_gradients.py").read_text(encoding="utf-8")
    (tmp_path / "average_gradients.py").write_text(f"{stub}\n{hostile_sources.CORPUS[name]}\n")
    request = GradeRequest(("average_gradients",), tmp_path, seed=3, directory=tmp_path)
    report = worker.grade(course, request)
    assert report.faults == () and report.exercises[0].score == 0
    assert report.exercises[0].diagnoses
    assert str(tmp_path) not in str(report.exercises) and str(ROOT) not in str(report.exercises)
