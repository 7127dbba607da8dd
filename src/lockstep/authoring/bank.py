"""The bank: submissions with known verdicts, in `tests/submissions/{wrong,right}/EXERCISE/NAME.py`.

A wrong one says in its first lines which diagnosis it must get (`# diagnosis: missing-set-epoch`), and which others may
stand beside it (`# also: …`). It is one mistake away from a right one. One whose mistake shows on several hosts alone says
so (`# needs: hosts`).

A batch script (`NAME.sbatch`) is handed in beside the reference, and graded by the checks whose ids have "batch" in them,
where there is SLURM.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from .. import cluster
from ..grading.course import Course, leaf
from ..grading.verdict import CheckOutcome, CheckResult, Report
from .stubs import SCRIPT

FOLDER = Path("tests") / "submissions"
WRONG_AND_RIGHT = (12, 4)
IN_A_GROUP = (3, 1)
"""How many an exercise must have at least. A case of a group is smaller, and there are many of them."""


def said(path: Path, key: str) -> list[str]:
    """What the file's head says under this key, split at commas."""
    found = re.search(rf"^# {key}: *(.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return [item.strip() for item in found.group(1).split(",")] if found else []


@dataclass(frozen=True)
class Entry:
    """One submission of the bank."""

    path: Path
    exercise: str
    right: bool

    @property
    def script(self) -> bool:
        """Whether it is a batch script."""
        return self.path.suffix == SCRIPT

    @property
    def label(self) -> str:
        """`train_ddp/no_set_epoch`, or `train/no_srun.sbatch`."""
        return f"{self.exercise}/{self.path.name if self.script else self.path.stem}"

    @property
    def checks(self) -> str:
        """The checks that grade it: those whose ids contain this."""
        return "batch" if self.script else ""

    def said(self, key: str) -> list[str]:
        """As the function of this name, of this submission."""
        return said(self.path, key)

    def missing(self) -> str | None:
        """Why it cannot be graded on this machine; None where it can."""
        needed = ["slurm"] if self.script else self.said("needs")
        return next((str(lack) for lack in map(cluster.available, needed) if lack is not None), None)  # type: ignore[arg-type]

    def hand_in(self, course: Course, folder: Path) -> Path:
        """What to grade: the file, or for a script this folder, filled with it and the reference."""
        if not self.script:
            return self.path
        shutil.copyfile(course.solutions / f"{self.exercise}.py", folder / f"{leaf(self.exercise)}.py")
        shutil.copyfile(self.path, folder / f"{leaf(self.exercise)}{SCRIPT}")
        return folder


def entries(root: Path) -> list[Entry]:
    """Every submission of the bank of the course at `root`, in order of their paths."""
    found = []
    for kind in ("wrong", "right"):
        top = root / FOLDER / kind
        for path in sorted([*top.glob("**/*.py"), *top.glob(f"**/*{SCRIPT}")]):
            found.append(Entry(path, path.parent.relative_to(top).as_posix(), kind == "right"))
    return found


def wanted(exercise: str) -> tuple[int, int]:
    """How many wrong and how many right submissions this exercise needs, and how many scripts where it has one."""
    return IN_A_GROUP if "/" in exercise else WRONG_AND_RIGHT


def shortfall(report: Report, without_script: bool = False) -> CheckResult | None:
    """The first check that did not pass, though it could have: None for one that is right as far as this machine can tell.

    A check could not where it needs SLURM or hosts and there are none, where it needs such a check, or, for what is handed
    in `without_script`, where it needs a batch script.
    """
    absent = [str(lack) for lack in (cluster.available("slurm"), cluster.available("hosts")) if lack is not None]
    for result in report.exercises:
        excused = (*absent, *([f"there is no {leaf(result.name)}{SCRIPT}"] if without_script else ()))
        held_back = set()
        for check in result.checks:
            if check.outcome is CheckOutcome.NOT_RUN and (
                check.reason.startswith(excused) or check.reason[7:-1] in held_back  # needs “…”
            ):
                held_back.add(check.name)
            elif check.outcome is not CheckOutcome.PASSED:
                return check
    return None
