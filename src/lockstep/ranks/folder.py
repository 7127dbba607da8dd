"""The folder of one run: its socket, its crash dumps, its ranks' temporary files. It goes when the run does."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile

FOLDER = "lockstep-run-"
LONGEST = 70
"""The address of a local socket has room for about 100 bytes, and some clusters' temporary folders have long names."""


def make_folder() -> str:
    """A new folder for one run, locked for as long as this process lives."""
    long = len(tempfile.gettempdir()) > LONGEST and os.path.isdir("/tmp")
    folder = tempfile.mkdtemp(prefix=FOLDER, dir="/tmp" if long else None)
    os.mkdir(os.path.join(folder, "tmp"))
    lock = os.open(os.path.join(folder, "new"), os.O_CREAT | os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.rename(os.path.join(folder, "new"), os.path.join(folder, "lock"))
    return folder


def remove_folder(folder: str) -> None:
    """Remove it and all in it, also what a rank has made unreadable."""
    for path, _, _ in os.walk(folder):
        with contextlib.suppress(OSError):
            os.chmod(path, 0o700)
    shutil.rmtree(folder, ignore_errors=True)


def remove_left_folders() -> None:
    """Remove the folders of runs whose supervisor was killed: those that nobody holds the lock of."""
    for place in {tempfile.gettempdir(), "/tmp"}:
        with contextlib.suppress(OSError):
            for entry in os.scandir(place):
                if entry.name.startswith(FOLDER):
                    _remove_if_left(entry.path)


def _remove_if_left(folder: str) -> None:
    with contextlib.suppress(OSError), open(os.path.join(folder, "lock"), "rb+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove_folder(folder)
