"""What decides how a grading ends, besides the submission: a hash of all that judges, and the versions."""

from __future__ import annotations

import functools
import hashlib
import platform
from importlib.metadata import version
from pathlib import Path

from .. import __version__
from ..course import Course
from ..ranks.client import SOURCE

MACHINERY = ("ranks", "cluster", "course", "grading")
NOT_JUDGING = {"exports", "contracts", "policy.toml"}
"""What no grading reads, or that only write what was concluded: they may change without a regrade."""


def stamp(course: Course) -> str:
    """Changes with any file of the checks, the solutions or the machinery, wherever these are."""
    found = hashlib.sha256()
    package = Path(SOURCE) / "lockstep"
    judging = [(course.root, course.autograder), (course.root, course.solutions)]
    judging += [(package, package / name) for name in MACHINERY]
    for root, folder in judging:
        for path in sorted(folder.rglob("*")):
            judges = NOT_JUDGING.isdisjoint(path.relative_to(folder).parts)
            if judges and path.suffix in (".py", ".toml") and path.is_file():
                content = path.read_bytes()
                found.update(f"{path.relative_to(root).as_posix()} {len(content)}\n".encode())
                found.update(content)
    return found.hexdigest()


@functools.cache
def versions() -> dict[str, str]:
    """What a regrade needs to know of this machine."""
    return {"lockstep": __version__, "torch": version("torch"), "python": platform.python_version()}
