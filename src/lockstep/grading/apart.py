"""A process beside this one for what is done to a stranger's text: it may die, or take too long, and is then replaced.

The checks judge in workers of their own. What the engine itself reads, to find out which exercise a file is or whom it
resembles, it has read here.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import resource
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

SECONDS = 20.0  # for one text
MEMORY = 2 << 30  # bytes of address space
Result = TypeVar("Result")


class _Reader:
    """A process that is started when it is first asked, and again after it has been ended."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.process: multiprocessing.process.BaseProcess | None = None
        self.pipe: Connection | None = None

    def ask(self, function: Callable[..., Any], given: tuple[Any, ...], seconds: float) -> Any:
        """Raises TimeoutError, EOFError when the process died, ValueError when the function raised anything."""
        if self.pipe is None:
            spawn = multiprocessing.get_context("spawn")
            self.pipe, theirs = spawn.Pipe()
            self.process = spawn.Process(target=_serve, args=(theirs, MEMORY), daemon=True)
            self.process.start()
            theirs.close()
        self.pipe.send((function, given))
        if not self.pipe.poll(seconds):
            raise TimeoutError
        done, value = self.pipe.recv()
        if not done:
            raise ValueError(value)
        return value

    def end(self) -> None:
        """End the process, if there is one."""
        if self.process is not None and self.pipe is not None:
            self.process.kill()
            self.process.join()
            self.pipe.close()
            self.process = self.pipe = None


_READER = _Reader()


def read_apart(function: Callable[..., Result], *given: Any, otherwise: Result, seconds: float = SECONDS) -> Result:
    """What `function(*given)` returns, called in the process beside; `otherwise` when it raised, died or took longer.

    The function, a module's own, its arguments and its result are pickled; what a stranger wrote is text among these.
    """
    with _READER.lock:
        try:
            return _READER.ask(function, given, seconds)  # type: ignore[no-any-return]
        except ValueError:
            return otherwise
        except (TimeoutError, EOFError, OSError):
            _READER.end()
            return otherwise


def _serve(pipe: Connection, memory: int) -> None:
    for limit, most in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_CORE, 0)):
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(limit, (most, most))
    with contextlib.suppress(EOFError, OSError, KeyboardInterrupt):
        while True:
            function, given = pipe.recv()
            try:
                answer = (True, function(*given))
            except Exception as error:
                answer = (False, type(error).__name__)
            pipe.send(answer)
