"""The folder of one run: its socket, its crash dumps, its ranks' temporary files. It goes when the run does."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile

FOLDER = "lockstep-run-"


def make_folder() -> str:
    """A new folder for one run, locked for as long as this process lives."""
    folder = tempfile.mkdtemp(prefix=FOLDER)
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
    with contextlib.suppress(OSError):
        for entry in os.scandir(tempfile.gettempdir()):
            if entry.name.startswith(FOLDER):
                with contextlib.suppress(OSError):
                    with open(os.path.join(entry.path, "lock"), "rb+") as lock:
                        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        remove_folder(entry.path)
