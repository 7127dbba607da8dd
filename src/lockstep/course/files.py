"""Files that survive a kill at any instant."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def write(path: Path, data: bytes) -> None:
    """Give a file this content. Whatever happens meanwhile, it has either its old content or all of the new."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    with open(unfinished, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)
    with contextlib.suppress(OSError):
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
