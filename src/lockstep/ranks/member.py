"""What a supervisor knows of its run and of each process in it."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from . import processes
from .channel import Channel
from .job import Job
from .messages import Begin, Event, MadeGroup, MemberReport, Pulse, Raised, Role, StackReport
from .report import Outcome, RunEnd, Why, named

KEPT_EVENTS = 50_000


@dataclass(eq=False)
class Member:
    """A process of the run: one of its ranks, or a worker that a launcher started."""

    role: Role
    rank: int | None
    pid: int
    channel: Channel | None = None
    outcome: Outcome | None = None
    code: int | None = None
    error: Raised | None = None
    because: Raised | None = None
    frames: list[Any] = field(default_factory=list)
    stack: StackReport | None = None
    watcher: int | None = None
    events: deque[Event] = field(default_factory=lambda: deque(maxlen=KEPT_EVENTS))
    observed: int = 0
    shown: int = 0
    observed_headers: int = 0
    says_too_much: bool = False
    printed: int = 0
    peak_memory: int = 0
    cpu: float = 0.0
    ended: float = 0.0
    gone: bool = False
    sample: StackReport | None = None
    operations: int = 0
    last: Begin | None = None
    last_at: float = 0.0
    reached: dict[tuple[object, ...], int] = field(default_factory=dict)
    """How far it has come: the number of its latest call, for each group and for each direction between two ranks."""
    accelerated: bool = False  # It communicates from an accelerator, whose work the operating system does not see
    stopped: bool = False
    node: int | None = None
    """The other machine that it is on; None: this one. What is known of it, that node has told: it has no process here."""
    told: MemberReport | None = None  # How that node says that it has ended

    @property
    def met(self) -> bool:
        """It has come to its first process group."""
        return any(isinstance(event, MadeGroup) for event in self.events)

    @property
    def done(self) -> bool:
        """Its code has ended, though the process may still be there."""
        return self.outcome is not None or self.gone

    def stop_here(self, outcome: Outcome, at: float) -> None:
        """Its code is ended from outside, `at` seconds into the run, where it stood when it was last asked."""
        self.outcome, self.ended = outcome, at
        self.stack = self.sample

    def report(self, fault: str) -> MemberReport:
        if (told := self.told) is not None:
            told.outcome, told.stack = self.outcome or told.outcome, self.stack or told.stack
            told.ended = self.ended or told.ended
            return told
        return MemberReport(
            self.role, self.rank, self.pid, self.outcome, self.code, self.error, self.frames, self.stack, self.stopped,
            fault, self.peak_memory, self.cpu, self.ended, self.because,
        )  # fmt: skip


@dataclass
class RunState:
    """A run as its supervisor knows it. The supervisor alone writes it; `hang_detector` and `limits` read and decide.

    `last_word` is when something last arrived from a process, `failed_at` when one first ended badly; `end` is None
    while the run lasts.
    """

    job: Job
    members: list[Member] = field(default_factory=list)
    elsewhere: list[Member] = field(default_factory=list)  # The ranks of other machines, by rank
    pulses: dict[int, tuple[float, Pulse]] = field(default_factory=dict)
    """What each other machine has last said of how still it is, and when."""
    began: float = field(default_factory=time.monotonic)
    last_word: float = field(default_factory=time.monotonic)
    failed_at: float | None = None
    end: RunEnd | None = None
    stops: list[int] = field(default_factory=list)  # The signals by which the run has been told to end
    memory_kills: int = field(default_factory=processes.memory_kills)  # When the run began

    @property
    def signal(self) -> int:
        """The first of them; 0 for none."""
        return self.stops[0] if self.stops else 0

    def end_by(self, end: RunEnd) -> None:
        """Note why the run ends, the first time; a client that is gone needs no other reason."""
        if self.end is None or end.why is Why.CLIENT_GONE:
            self.end = end

    @property
    def ranks(self) -> list[Member]:
        """The processes that the supervisor has started, in order."""
        return [member for member in self.members if member.role is Role.RANK]

    @property
    def everyone(self) -> list[Member]:
        """The processes of all machines. Those that are elsewhere have no process id here."""
        return (
            sorted([*self.members, *self.elsewhere], key=lambda one: one.rank or 0) if self.elsewhere else self.members
        )

    def unfinished(self) -> list[Member]:
        """The processes whose code has not ended, on all machines."""
        return [member for member in self.everyone if not member.done]

    def elapsed(self) -> float:
        """Seconds since the ranks were started."""
        return time.monotonic() - self.began


def others(call: Begin, rank: int | None) -> list[int]:
    """The ranks that have to make this rank's call too."""
    if call.kind not in ("send", "recv"):
        return [other for other in call.members if other != rank]
    other = named(call.peer, call.members)
    return [other] if other is not None and other in call.members else []


def line_of(call: Begin, rank: int | None) -> tuple[object, ...]:
    """What a rank's calls are counted in: a group's collectives, or the messages from one rank to another."""
    if call.kind not in ("send", "recv"):
        return (call.group,)
    return (call.group, call.kind, rank, *others(call, rank))


def counterpart(call: Begin, rank: int | None) -> tuple[object, ...]:
    """The line in which the others count their part of the call."""
    if call.kind not in ("send", "recv"):
        return (call.group,)
    return (call.group, "recv" if call.kind == "send" else "send", *others(call, rank), rank)
