"""The system's own tools for links: `ip` and `tc`."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable

SYSTEM_PATH = "/usr/local/sbin:/usr/sbin:/sbin"
"""Where system tools are, and where an ordinary user's PATH does not look."""


class ToolFailed(Exception):
    """A tool refused; the text is what it said."""


def find(name: str) -> str | None:
    """The path of a tool; None where it is not installed."""
    return shutil.which(name, path=os.environ.get("PATH", os.defpath) + os.pathsep + SYSTEM_PATH)


def use(name: str, *arguments: str, text: str | None = None, keep: Iterable[int] = ()) -> str:
    """Run a tool, give it `text` to read and the descriptors in `keep`, and return what it printed.

    Raises FileNotFoundError where the tool is missing, and ToolFailed when it refuses.
    """
    path = find(name)
    if path is None:
        raise FileNotFoundError(f"no {name}")
    done = subprocess.run([path, *arguments], input=text, capture_output=True, text=True, pass_fds=tuple(keep))
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise ToolFailed(f"{name} {' '.join(arguments)}: {said[0] if said else f'status {done.returncode}'}")
    return done.stdout
