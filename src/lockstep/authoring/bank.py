"""The bank: submissions with known verdicts, in `tests/submissions/{wrong,right}/EXERCISE/NAME.py`.

A wrong one says in its first lines which diagnosis it must get (`# diagnosis: missing-set-epoch`), and which others may
stand beside it (`# also: …`). It is one mistake away from a right one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

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
    def label(self) -> str:
        """`train_ddp/no_set_epoch`."""
        return f"{self.exercise}/{self.path.stem}"

    def said(self, key: str) -> list[str]:
        """As the function of this name, of this submission."""
        return said(self.path, key)


def entries(root: Path) -> list[Entry]:
    """Every submission of the bank of the course at `root`, in order of their paths."""
    found = []
    for kind in ("wrong", "right"):
        top = root / FOLDER / kind
        for path in sorted(top.glob("**/*.py")):
            found.append(Entry(path, path.parent.relative_to(top).as_posix(), kind == "right"))
    return found


def wanted(exercise: str) -> tuple[int, int]:
    """How many wrong and how many right submissions this exercise needs."""
    return IN_A_GROUP if "/" in exercise else WRONG_AND_RIGHT
