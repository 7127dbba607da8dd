"""A course of two small exercises, for what grades a class: its checks run real ranks, and break when a submission asks.

What a submission has in a comment, `# trap: …`, happens in the process that grades, which no submission can reach: it dies
(`dies`, `dies once`), its check has a mistake (`raises`) or takes no end (`waits`, until a file `go` is there).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from lockstep.course import Course

from . import ROOT

CHECKS = '''\
"""The checks of NAME."""

import os
import re
import signal
import time
from pathlib import Path

from lockstep.grading import Grader

TRAPS = Path(__file__).parents[1] / "traps"


def test_agrees_on_both_ranks(grader: Grader) -> None:
    """Both ranks get the same."""
    trap = re.search("# trap: (.*)", grader.submission.text)
    if trap:
        spring(trap[1])
    a, b = (grader.random("numbers").randrange(1000) for _ in range(2))
    run = grader.run("both", 2, a=a, b=b + 1)
    found = run.observed("result")
    if found != [FOUND] * 2:
        grader.fail("raised", f"NAME({a}, {b + 1}) was {found[0]}.", at="def NAME")


def test_is_quiet(grader: Grader) -> None:
    """Nothing is printed."""
    run = grader.run("both", 2, a=1, b=1)
    if run.ranks[0].stdout:
        grader.fail("raised", "It printed something.")


def spring(trap: str) -> None:
    if trap == "dies" or (trap == "dies once" and not (TRAPS / "died").exists()):
        (TRAPS / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if trap == "raises":
        raise OSError("a mistake of ours")
    while trap == "waits" and not (TRAPS / "go").exists():
        time.sleep(0.01)
'''
SCENARIOS = '''\
"""What runs on the ranks for NAME."""

from lockstep.grading.on_rank import observe


def both(submission, a, b):
    """NAME(a, b)."""
    observe("result", submission.NAME(a, b))
'''
CONTENT = """\
[[chapter]]
name = "01_numbers"
title = "Numbers"
exercises = ["add", "times"]
"""
RIGHT = {"add": "def add(a, b):\n    return a + b\n", "times": "def times(a, b):\n    return a * b\n"}
WRONG = {"add": "def add(a, b):\n    return a - b\n", "times": "def times(a, b):\n    return print('x') or a * b\n"}
HANGING = "import torch.distributed as dist\n\n\ndef add(a, b):\n    dist.init_process_group('gloo')\n    dist.recv(__import__('torch').ones(1))\n"  # fmt: skip


SECONDS = 300  # for what takes a few on a machine that has nothing else to do
CLASS = {"Ada Lovelace": RIGHT, "Zoë =1+1": WRONG, "Hank": {"add.py": HANGING}, "Nobody": {"essay.txt": "no code"}}
CLASS = {name: {(f if "." in f else f"{f}.py"): text for f, text in work.items()} for name, work in CLASS.items()}
IDS = ["ada-lovelace-1001", "hank-1003", "nobody-1004", "zoe-1-1-1002"]
WAITING = {**CLASS, "Mo": {"add.py": "# trap: waits\n" + RIGHT["add"]}}  # third of five


def make_course(root: Path) -> Course:
    """The course, in a new folder."""
    (root / "autograder" / "scenarios").mkdir(parents=True)
    (root / "traps").mkdir()
    (root / "solutions").mkdir()
    (root / "autograder" / "course.toml").write_text(CONTENT)
    shutil.copy(ROOT / "autograder" / "diagnoses.toml", root / "autograder")
    for name, right in (("add", "a + b + 1"), ("times", "a * (b + 1)")):
        (root / "autograder" / f"test_{name}.py").write_text(CHECKS.replace("NAME", name).replace("FOUND", right))
        (root / "autograder" / "scenarios" / f"{name}.py").write_text(SCENARIOS.replace("NAME", name))
        (root / "solutions" / f"{name}.py").write_text(RIGHT[name])
    return Course(root)


def moodle(file: Path, work: dict[str, dict[str, str]]) -> Path:
    """A download as Moodle gives it: name of a learner to their files."""
    with zipfile.ZipFile(file, "w") as archive:
        for number, (name, files) in enumerate(work.items(), 1001):
            for path, text in files.items():
                archive.writestr(f"{name}_{number}_assignsubmission_file_/{path}", text)
    return file


def command(course: Course, *arguments: object, **more: str) -> subprocess.Popen[str]:
    """`lockstep grade …` on this course, started; in a group of its own, so that a Ctrl-C reaches nobody else."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "LOCKSTEP_COURSE": str(course.root), "COLUMNS": "200",
                   "OMP_NUM_THREADS": "1", "LOCKSTEP_ISOLATION": "none", **more}  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-m", "lockstep", "grade", *map(str, arguments)],
        cwd=course.root, env=environment, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip


def files(folder: Path) -> dict[str, bytes]:
    """What counts of a grading: every learner's result, and the grades."""
    found = {path.name: path.read_bytes() for path in sorted((folder / "results").iterdir())}
    return found | {"grades.csv": (folder / "grades.csv").read_bytes()}
