"""Looks at processes several times, from outside: where each stands, whether it moves, and what it does if it waits."""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ..ranks.processes import bytes_moved, cpu_seconds, is_janitor, is_stopped
from ..ranks.report import Frame
from .stacks import Thread, main_thread, sample, sampler

LOOKS = 3
BUSY = 0.05
"""The share of a core above which a process works. One that waits, also for the interpreter lock, uses less."""
MOVED = 1 << 16  # Bytes. One that polls a store or a queue moves fewer in a second.
_CALLS = {
    "x86_64": {0: "read", 1: "write", 7: "poll", 23: "poll", 35: "sleep", 42: "connect", 43: "accept", 44: "write", 45: "read",
               47: "read", 61: "process", 72: "file", 73: "file", 202: "lock", 230: "sleep", 232: "poll", 247: "process",
               270: "poll", 271: "poll", 281: "poll", 288: "accept"},
    "aarch64": {22: "poll", 25: "file", 32: "file", 63: "read", 64: "write", 72: "poll", 73: "poll", 95: "process", 98: "lock",
                101: "sleep", 115: "sleep", 202: "accept", 203: "connect", 206: "write", 207: "read", 212: "read",
                242: "accept", 260: "process"},
}  # fmt: skip
_WORDS = {
    "poll": "waits for input", "sleep": "sleeps", "connect": "connects to an address", "accept": "waits for a connection",
    "process": "waits for a process that it started", "file": "waits for a lock on a file",
    "lock": "waits for a lock or a thread",
}  # fmt: skip


@dataclass(frozen=True)
class Seen:
    """One process over the time of a look. `doing` says what it does, for one that waits: `sleeps`."""

    pid: int
    threads: tuple[Thread, ...]
    moves: bool
    doing: str

    @property
    def main(self) -> Thread:
        """The thread that runs the script; without a frame when it could not be read."""
        return main_thread(self.threads) or Thread("", ())

    @property
    def place(self) -> Frame | None:
        return next(iter(self.main.users), None)


def look(pids: Sequence[int], seconds: float) -> dict[int, Seen]:
    """What these processes do, from some samples over this many seconds. One that ends meanwhile is left out.

    Raises NotPermitted and NoSampler.
    """
    py_spy = sampler()
    wanted = [pid for pid in pids if not is_janitor(pid)]
    stacks: list[dict[int, tuple[Thread, ...]]] = []
    counters: list[dict[int, tuple[float, int]]] = []
    began = time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        for number in range(LOOKS):
            time.sleep(seconds / (LOOKS - 1) if number else 0)
            counters.append({pid: (cpu_seconds(pid), bytes_moved(pid)) for pid in wanted})
            found = zip(wanted, pool.map(lambda pid: sample(pid, py_spy), wanted), strict=True)
            stacks.append({pid: threads for pid, threads in found if threads is not None})
    took = time.monotonic() - began
    seen: dict[int, Seen] = {}
    for pid, threads in stacks[-1].items():
        frames = {main.frames for one in stacks if (main := main_thread(one.get(pid)))}
        cpu = (counters[-1][pid][0] - counters[0][pid][0]) / took
        moved = counters[-1][pid][1] - counters[0][pid][1]
        moves = len(frames) > 1 or cpu > BUSY or moved > MOVED * max(1.0, took)
        seen[pid] = Seen(pid, threads, moves, _doing(pid, cpu))
    return seen


def _doing(pid: int, cpu: float) -> str:
    """What the main thread does, by the system call that it is in."""
    if is_stopped(pid):
        return "is held by a signal (SIGSTOP)"
    if cpu > BUSY:
        return f"works ({cpu:.0%} of a core)"
    name, argument = _system_call(pid)
    if name in ("read", "write"):
        return f"{'reads from' if name == 'read' else 'writes to'} {_target(pid, argument)}"
    return _WORDS.get(name, "does not move")


def _system_call(pid: int) -> tuple[str, int]:
    """What kind of call, and its first argument; empty when it is in none, or where the system does not tell."""
    with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/syscall") as file:
        number, argument = file.read().split()[:2]
        return _CALLS.get(platform.machine(), {}).get(int(number), ""), int(argument, 16)
    return "", 0


def _target(pid: int, descriptor: int) -> str:
    """`a socket`, `a pipe`, or the file's path."""
    try:
        path = os.readlink(f"/proc/{pid}/fd/{descriptor}")
    except OSError:
        return "a file"
    kind = path.partition(":")[0]
    return path if path.startswith("/") else {"socket": "a socket", "pipe": "a pipe"}.get(kind, "a file")
