"""Stubs and solutions that a learner asks for: an exercise with a batch script has two files, and both are meant."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support import ROOT
from support.command_line import CommandLine

from lockstep.course.stubs import make_stub, without_markers


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A course of one's own: the table of contents, the checks of two exercises, and their solutions."""
    root = tmp_path / "course"
    for name in ("autograder/course.toml", "autograder/test_train.py", "autograder/test_setup_ddp.py", "solutions/train.py",
                 "solutions/train.sbatch", "solutions/setup_ddp.py"):  # fmt: skip
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, root / name)
    return root


def stub(name: str) -> str:
    """What the learner begins with."""
    return make_stub((ROOT / "solutions" / name).read_text(encoding="utf-8"), name.removesuffix(".py"))


def test_reset_brings_back_both_files_and_keeps_both(own: Path, lockstep: CommandLine) -> None:
    exercises = own / "exercises"
    exercises.mkdir()
    (exercises / "train.py").write_text(stub("train.py"))
    (exercises / "train.sbatch").write_text("#!/bin/bash\necho mine\n")
    done = lockstep("reset", "train", cwd=own, LOCKSTEP_COURSE=str(own))
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert (
        said[0].endswith("exercises/train.py is the stub.") and "exercises/train.sbatch is the stub again." in said[1]
    )
    assert (exercises / "train.py").read_text() == stub("train.py")
    assert (exercises / "train.sbatch").read_text() == stub("train.sbatch")
    (kept,) = (own / ".lockstep" / "backups").iterdir()
    assert kept.suffix == ".sbatch" and kept.read_text() == "#!/bin/bash\necho mine\n"


def test_reset_brings_back_a_batch_script_without_solutions(own: Path, lockstep: CommandLine) -> None:
    """As in a learner's copy, which has the stubs alone."""
    stubs = own / "autograder" / "stubs"
    stubs.mkdir()
    for name in ("train.py", "train.sbatch", "setup_ddp.py"):
        (stubs / name).write_text(stub(name))
    shutil.rmtree(own / "solutions")
    assert lockstep("reset", "train", cwd=own, LOCKSTEP_COURSE=str(own)).returncode == 0
    assert lockstep("reset", "setup_ddp", cwd=own, LOCKSTEP_COURSE=str(own)).returncode == 0
    there = {path.name: path.read_text() for path in (own / "exercises").iterdir()}
    assert there == {name: stub(name) for name in ("train.py", "train.sbatch", "setup_ddp.py")}


def test_the_solution_is_both_files(own: Path, lockstep: CommandLine) -> None:
    shown = lockstep("solution", "-y", "train", cwd=own, LOCKSTEP_COURSE=str(own)).stdout
    parts = [
        without_markers((ROOT / "solutions" / name).read_text(encoding="utf-8"))
        for name in ("train.py", "train.sbatch")
    ]
    assert shown == "".join(parts)
    alone = lockstep("solution", "-y", "setup_ddp", cwd=own, LOCKSTEP_COURSE=str(own)).stdout
    assert alone == without_markers((ROOT / "solutions" / "setup_ddp.py").read_text(encoding="utf-8"))
