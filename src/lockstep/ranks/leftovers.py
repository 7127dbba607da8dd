"""What a rank leaves behind, in words and in files, read so that no rank can do harm by it: whatever it puts there."""

from __future__ import annotations

import contextlib
import os
import stat
from typing import Any

from .messages import Raised

LISTED = 50
MAX_FAULT = 20_000
MAX_TEXT = 100_000  # Characters of an error's parts; a rank that cuts them itself keeps far below


def text_of(path: str, start: int = 0) -> str:
    """What a file has from its byte `start` on, as far as a report can hold it; empty when it is no file: a rank may have put a link or a pipe in its place."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, errors="replace") as file:
            if start:
                file.seek(start)
            return file.read(MAX_FAULT) if stat.S_ISREG(os.fstat(descriptor).st_mode) else ""
    return ""


def size_of(path: str) -> int:
    """Bytes of a file; 0 when it is not there."""
    with contextlib.suppress(OSError):
        return os.lstat(path).st_size
    return 0


def files(folder: str) -> list[str]:
    """The files below a folder, by their paths in it, as far as a path reaches and no more than a reader wants to see."""
    found: list[str] = []
    open_ones = [folder]
    while open_ones and len(found) <= LISTED:
        with contextlib.suppress(OSError), os.scandir(open_ones.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    open_ones.append(entry.path)
                else:
                    found.append(os.path.relpath(entry.path, folder))
    return sorted(found)[:LISTED]


def cut(error: Raised) -> Raised:
    """An error as a rank tells of it, no longer than a report can hold."""
    message, traceback = (str(text or "")[:MAX_TEXT] for text in (error.message, error.traceback))
    return Raised(str(error.type or "")[:200], message, frames(error.frames), traceback)


def frames(told: Any) -> list[Any]:
    """The frames that a rank tells of, no more than a report can hold."""
    return told[:200] if isinstance(told, list) else []
