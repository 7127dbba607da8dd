"""The waiting of a process that forks: it wakes for a request on its socket, and when a child has ended.

SIGCHLD writes to a pipe of its own (signal.set_wakeup_fd), so that no end is missed between two looks. For a process
with one thread.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from typing import NamedTuple


class Woken(NamedTuple):
    """Why `ForkLoop.wait` came back; neither is true when the time was over."""

    request: bool
    child: bool


class ForkLoop:
    """Waits on one socket and on this process's children."""

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        self._pipe = os.pipe()
        for end in self._pipe:
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def wait(self, seconds: float | None = None) -> Woken:
        """Wait until there is something to do, at most so long."""
        request, child = self._requests.fileno(), self._pipe[0]
        ready, _, _ = select.select([request, child], [], [], seconds)
        if child in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(child, 4096)
        return Woken(request in ready, child in ready)

    def leave(self) -> None:
        """In a child that was forked from this process: it takes signals as any other, and has none of these files."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._requests.close()
        for end in self._pipe:
            os.close(end)
