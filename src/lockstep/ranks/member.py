"""What a supervisor knows of one process of its run."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from .channel import Channel

KEPT_EVENTS = 50_000


@dataclass
class Member:
    """A process of the run: one of its ranks, or a worker that a launcher started."""

    role: str
    rank: int | None
    pid: int
    channel: Channel | None = None
    outcome: str = ""
    code: int | None = None
    error: dict[str, Any] | None = None
    frames: list[Any] = field(default_factory=list)
    stack: dict[str, Any] | None = None
    watcher: int | None = None
    events: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=KEPT_EVENTS))
    observed: int = 0
    observed_headers: int = 0
    says_too_much: bool = False
    printed: int = 0
    peak_memory: int = 0
    cpu: float = 0.0
    ended: float = 0.0
    gone: bool = False
    sample: dict[str, Any] | None = None
    operations: int = 0
    stopped: bool = False

    @property
    def done(self) -> bool:
        """Its code has ended, though the process may still be there."""
        return bool(self.outcome) or self.gone

    def stop_here(self, outcome: str, at: float) -> None:
        """Its code is ended from outside, `at` seconds into the run, where it stood when it was last asked."""
        self.outcome, self.ended = outcome, at
        self.stack = self.sample

    def report(self, fault: str) -> dict[str, Any]:
        """What the client is told of it at the end; `fault` is what Python's fault handler has left of it."""
        return {
            "role": self.role,
            "rank": self.rank,
            "pid": self.pid,
            "outcome": self.outcome,
            "code": self.code,
            "error": self.error,
            "frames": self.frames,
            "stack": self.stack,
            "stopped": self.stopped,
            "fault": fault,
            "peak_memory": self.peak_memory,
            "cpu": self.cpu,
            "ended": self.ended,
        }
