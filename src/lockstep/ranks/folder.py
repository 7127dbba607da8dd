"""The folder of one run: its socket, its crash dumps, its ranks' temporary files. It goes when the run does."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator

FOLDER = "lockstep-run-"
WORK = "lockstep-work-"
"""How the names of folders begin that a process holds for as long as it works with them (`held_folder`)."""
GONE = ".gone"  # How the name of a folder ends that is being removed: whoever finds one may go on with it
LONGEST = 70
"""The address of a local socket has room for about 100 bytes, and some clusters' temporary folders have long names."""


def make_folder() -> str:
    """A new folder for one run, locked for as long as this process lives."""
    long = len(tempfile.gettempdir()) > LONGEST and os.path.isdir("/tmp")
    folder = tempfile.mkdtemp(prefix=FOLDER, dir="/tmp" if long else None)
    os.mkdir(os.path.join(folder, "tmp"))
    _lock(folder)
    return folder


@contextlib.contextmanager
def held_folder() -> Iterator[str]:
    """A new folder that goes with the block; when this process is killed in it, at the next `remove_left_folders`."""
    folder = tempfile.mkdtemp(prefix=WORK)
    lock = _lock(folder)
    try:
        yield folder
    finally:
        remove_run_folder(folder)
        os.close(lock)


def _lock(folder: str) -> int:
    """Lock it for as long as this process lives, or until what is returned is closed."""
    lock = os.open(os.path.join(folder, "new"), os.O_CREAT | os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.rename(os.path.join(folder, "new"), os.path.join(folder, "lock"))
    return lock


def remove_run_folder(folder: str) -> None:
    """Remove the folder of a run; when this process is killed while it does, the next one goes on where it was."""
    gone = folder + GONE
    try:
        os.rename(folder, gone)
    except OSError:
        gone = folder
    remove_folder(gone)


def remove_folder(folder: str) -> None:
    """Remove it and all in it, also what a rank has made unreadable; what cannot be removed stays.

    Its depth may be more than a path can say or a stack can follow: it goes down and up from folder to folder.
    """
    with contextlib.suppress(OSError):
        mode = os.lstat(folder).st_mode
        if stat.S_ISLNK(mode):  # A rank has put it in the folder's place.
            os.unlink(folder)
            return
        if stat.S_ISDIR(mode):
            os.chmod(folder, 0o700)
        here = os.open(folder, _FOLDER)
        above: list[tuple[str, tuple[int, int]]] = []
        inner = [_empty(here)]
        try:
            while inner[-1] or above:
                if inner[-1]:
                    name = inner[-1].pop()
                    above.append((name, _identity(here)))
                    here = _go(name, here)
                    inner.append(_empty(here))
                else:
                    name, parent = above.pop()
                    inner.pop()
                    here = _go("..", here)
                    if _identity(here) != parent:  # Somebody has moved it meanwhile.
                        return
                    with contextlib.suppress(OSError):
                        os.rmdir(name, dir_fd=here)
        finally:
            os.close(here)
        os.rmdir(folder)


_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


def _identity(folder: int) -> tuple[int, int]:
    found = os.fstat(folder)
    return found.st_dev, found.st_ino


def _go(name: str, here: int) -> int:
    there = os.open(name, _FOLDER, dir_fd=here)
    os.close(here)
    return there


def _empty(folder: int) -> list[str]:
    """Remove the files in it and the folders that are empty; returns the names of those that are not."""
    with os.scandir(folder) as found:
        entries = list(found)
    left = []
    for entry in entries:
        with contextlib.suppress(OSError):
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.name, dir_fd=folder)
                continue
            os.chmod(entry.name, 0o700, dir_fd=folder)
            try:
                os.rmdir(entry.name, dir_fd=folder)
            except OSError:
                left.append(entry.name)
    return left


def remove_left_folders() -> None:
    """Remove the folders of processes that were killed: nobody holds their lock, or they were being removed."""
    for place in {tempfile.gettempdir(), "/tmp"}:
        with contextlib.suppress(OSError):
            for entry in os.scandir(place):
                if entry.name.startswith((FOLDER, WORK)) and entry.name.endswith(GONE):
                    remove_folder(entry.path)
                elif entry.name.startswith((FOLDER, WORK)):
                    _remove_if_left(entry.path)


def _remove_if_left(folder: str) -> None:
    with contextlib.suppress(OSError), open(os.path.join(folder, "lock"), "rb+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove_run_folder(folder)
