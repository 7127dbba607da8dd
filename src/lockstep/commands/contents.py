"""What JupyterLab's file browser lists: the chapters and the learner's files, not what the course consists of.

Only listings are shorter: every file still opens by its link.
"""

from __future__ import annotations

import asyncio
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

from jupyter_server.services.contents.largefilemanager import AsyncLargeFileManager

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

    async def get(self, path: str, *given: Any, **options: Any) -> Any:
        """A file or folder; of a folder of the course, what a learner works with."""
        model = await super().get(path, *given, **options)  # type: ignore[no-untyped-call]
        if model["type"] == "directory" and model["content"] is not None:
            hidden = await asyncio.to_thread(_hidden, Path(self.root_dir), path.strip("/"))
            model["content"] = [
                one for one in model["content"] if not any(fnmatch(one["name"], pattern) for pattern in hidden)
            ]
        return model


@cache
def _hidden(root: Path, folder: str) -> tuple[str, ...]:
    """The names, as patterns, that a listing of this folder leaves out."""
    if folder not in MACHINERY:
        return ()
    ignored = root / folder / ".gitignore"
    lines = ignored.read_text(encoding="utf-8").splitlines() if folder and ignored.is_file() else []
    return (*MACHINERY[folder].split(), *(line.strip("/") for line in lines if line and not line.startswith("#")))
