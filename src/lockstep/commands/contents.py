"""What JupyterLab's file browser lists: the chapters and the learner's files, not what the course consists of.

Only listings are shorter: every file still opens by its link. A chapter is saved to the learner's copy of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

from jupyter_server.services.contents.largefilemanager import AsyncLargeFileManager

from ..course import Course, CourseError, copies
from ..notebook.start_page import LANGUAGE, write_start_page
from ..notebook.start_page import NAME as START_PAGE
from .lab import trust

MACHINERY = {
    "": (
        "CHANGELOG.md CITATION.cff CONTRIBUTING.md LICENSE README.md SECURITY.md autograder benchmarks book docs "
        "environment.yml lockstep pyproject.toml requirements.lock solutions src tests"
    ),
    "chapters": (
        "claims.toml conftest.py device.py digits.py four_ranks.py joined_batch.py measured.py nbval_sanitize.cfg "
        "pictures quiet_exit.py quizzes rank_spread.py source step_table.py twelve_layers.py"
    ),
}
"""By folder. What cells write is listed in that folder's .gitignore."""


class CourseFiles(AsyncLargeFileManager):
    """JupyterLab's own way to read and write files, with shorter listings."""

    async def get(self, path: str, content: bool = True, *given: Any, **options: Any) -> Any:
        """A file or folder; of the course's folders, what a learner works with; the start page as it is now; a chapter
        with what its kernel will say of itself: JupyterLab would add that, and ask whether to save what was only read.
        """
        if content and path.strip("/") == START_PAGE:
            await asyncio.to_thread(_write_start_page, Path(self.root_dir))
        model = await super().get(path, content, *given, **options)  # type: ignore[no-untyped-call]
        if model["type"] == "notebook" and model["content"] is not None and self._learners(path):
            model["content"]["metadata"]["language_info"] = LANGUAGE
        if model["type"] == "directory" and model["content"] is not None:
            hidden = await asyncio.to_thread(_hidden, Path(self.root_dir), path.strip("/"))
            model["content"] = [
                one for one in model["content"] if not any(fnmatch(one["name"], pattern) for pattern in hidden)
            ]
        return model

    async def save(self, model: Any, path: str = "") -> Any:
        """Write a file; of a chapter, the learner's copy."""
        if kept := self._learners(path):
            with contextlib.suppress(OSError):  # where none can be made, the chapter itself is written
                await asyncio.to_thread(_make, Path(self.root_dir, path.strip("/")), kept)
        return await super().save(model, path)  # type: ignore[no-untyped-call]

    def _get_os_path(self, path: str) -> str:
        kept = self._learners(path)
        return str(kept) if kept and kept.is_file() else super()._get_os_path(path)  # type: ignore[no-untyped-call]

    def _learners(self, path: str) -> Path | None:
        """Where the learner's copy of this file is, or would be; None for what is no chapter."""
        folder, _, name = path.strip("/").removesuffix(".ipynb").rpartition("/")
        if folder == "chapters" and name in _chapters(Path(self.root_dir)):
            with contextlib.suppress(OSError):
                return copies.copy_of(Course(Path(self.root_dir)), name)
        return None


class WithoutAddress(logging.Filter):
    """Lets through what the server logs, except where it is: `./lockstep lab` prints that."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "token=" not in record.getMessage()


def _write_start_page(root: Path) -> None:
    with contextlib.suppress(OSError):  # where none can be written, the old one is read
        trust([write_start_page(Course(root))])


def _make(chapter: Path, kept: Path) -> None:
    if not kept.is_file():
        kept.parent.mkdir(exist_ok=True)
        shutil.copyfile(chapter, kept)


@cache
def _chapters(root: Path) -> frozenset[str]:
    try:
        return frozenset(one.name for one in Course(root).chapters)
    except CourseError:
        return frozenset()


@cache
def _hidden(root: Path, folder: str) -> tuple[str, ...]:
    """The names, as patterns, that a listing of this folder leaves out."""
    if folder not in MACHINERY:
        return ()
    ignored = root / folder / ".gitignore"
    lines = ignored.read_text(encoding="utf-8").splitlines() if folder and ignored.is_file() else []
    return (*MACHINERY[folder].split(), *(line.strip("/") for line in lines if line and not line.startswith("#")))
