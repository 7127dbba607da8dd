"""A learner's copies of the chapters: JupyterLab saves them there, and the course's own notebooks stay as they are.

So running a chapter changes nothing that git knows, and an update never meets a chapter that has been run. A copy is
named after what it was made from: when the course's chapter changes, that one is shown again, and the copy is set
aside beside it.
"""

from __future__ import annotations

import hashlib
import time
from functools import lru_cache
from pathlib import Path

from .course import Course

FOLDER = "mine"


def chapter_file(course: Course, name: str) -> Path:
    """The notebook that a learner sees as this chapter: their copy, or the course's own as long as there is none."""
    kept = copy_of(course, name)
    return kept if kept.is_file() else course.page(name)


def copy_of(course: Course, name: str) -> Path:
    """Where the learner's copy of a chapter is, or would be."""
    own = course.page(name)
    there = own.stat()
    return own.parent / FOLDER / f"{name}.{_digest(own, there.st_mtime_ns, there.st_size)}.ipynb"


def set_aside(course: Course) -> list[tuple[str, Path]]:
    """Move the copies whose chapter has changed since beside it, under the date when they were last saved."""
    moved = []
    for file in sorted((course.root / "chapters" / FOLDER).glob("*.ipynb")):
        name = file.name.partition(".")[0]
        if course.page(name).is_file() and file != copy_of(course, name):
            saved = time.strftime("%Y-%m-%d-%H%M", time.localtime(file.stat().st_mtime))
            moved.append((name, file.replace(course.page(f"{name}.{saved}"))))
    return moved


@lru_cache
def _digest(file: Path, *_: int) -> str:
    """Of the file's bytes; read again when the file has another time or size."""
    return hashlib.sha256(file.read_bytes()).hexdigest()[:8]
