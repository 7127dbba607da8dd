"""What a run leaves behind: one outcome a rank, what each rank did, and why it ended as it did.

Everything here is data. `supervisor` fills it in, `explain` reads it and finds the cause, and whoever asked for the
run shows it.
"""

from __future__ import annotations

import contextlib
import functools
import linecache
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any


class Outcome(str, Enum):
    """How one rank ended. A run ends in exactly one of these for each rank."""

    RETURNED = "returned"
    RAISED = "raised"
    EXITED = "exited"
    CRASHED = "crashed"
    HUNG = "hung"
    TIMED_OUT = "timed out"
    OUT_OF_MEMORY = "out of memory"
    TOO_MUCH_OUTPUT = "too much output"
    TOO_MANY_PROCESSES = "too many processes"
    STOPPED = "stopped"
    INTERRUPTED = "interrupted"
    LOST = "lost"


class Kind(str, Enum):
    """What sort of end a run came to, when it did not end well."""

    HANG = "hang"
    MISMATCH = "mismatch"
    RAISED = "raised"
    EXITED = "exited"
    CRASHED = "crashed"
    TIMED_OUT = "timed out"
    OUT_OF_MEMORY = "out of memory"
    TOO_MUCH_OUTPUT = "too much output"
    TOO_MANY_PROCESSES = "too many processes"
    INTERRUPTED = "interrupted"
    NODE_LOST = "node lost"


class Why(Enum):
    ALL_DONE = "all done"
    FAILED = "failed"
    HANG = "hang"
    DEADLINE = "deadline"
    CPU = "cpu"
    IDLE = "idle"
    INTERRUPTED = "interrupted"
    CLIENT_GONE = "client gone"
    NODE_LOST = "node lost"


@dataclass(frozen=True)
class RunEnd:
    """What ended a run; `limit` is how many seconds it had used up, `node` the other machine that ended it, in words."""

    why: Why
    limit: float = 0.0
    node: str = ""


class Topic(Enum):
    """What to read about to understand how a run ended. Where, says the one who shows it (`text.describe`)."""

    HANGS = "hangs"
    MISMATCHES = "mismatches"
    FAILURES = "failures"


MOST_QUOTED = 1 << 20  # Bytes of an untrusted file of which a line is shown: all of it is read for that
_allowed: ContextVar[Callable[[str], bool] | None] = ContextVar("allowed", default=None)


@contextlib.contextmanager
def only_places_below(folders: Iterable[str] | None) -> Iterator[None]:
    """Within, places are taken from ranks only where they are files below these folders; None allows all.

    Whoever shows a place reads its line. A rank that is not trusted could have any file read to it, or a pipe without end.
    """
    real = None if folders is None else tuple(os.path.realpath(folder) + os.sep for folder in folders)
    # A run tells of thousands of places in a few files: the file system is asked once for each.
    token = _allowed.set(None if real is None else functools.lru_cache(1000)(functools.partial(_is_below, real)))
    try:
        yield
    finally:
        _allowed.reset(token)


def _is_below(folders: tuple[str, ...], file: str) -> bool:
    try:
        real = os.path.realpath(file)
        return os.path.isfile(real) and real.startswith(folders) and os.path.getsize(real) <= MOST_QUOTED
    except (OSError, ValueError):
        return False


def _is_allowed(file: str) -> bool:
    allowed = _allowed.get()
    return allowed is None or allowed(file)


@dataclass(frozen=True)
class Frame:
    """A place in the user's own code."""

    file: str
    line: int
    function: str = ""

    @classmethod
    def of(cls, raw: Any) -> Frame | None:
        """From what a rank has sent, which may be anything: None for what is no place, or none of `only_places_below`."""
        try:
            frame = cls(str(raw[0]), int(raw[1]), str(raw[2])) if raw else None
        except (TypeError, ValueError, LookupError):
            return None
        return frame if frame is None or _is_allowed(frame.file) else None

    @property
    def text(self) -> str:
        """The source line, without its indentation; empty when the source is not at hand."""
        return linecache.getline(self.file, self.line).strip()

    @property
    def is_cell(self) -> bool:
        """True for a notebook cell, which has a name in angle brackets instead of a path."""
        return self.file.startswith("<")

    @property
    def short(self) -> str:
        """`train.py:7`, or `cell line 7`."""
        return str(self) if self.is_cell else f"{self.file.rsplit('/', 1)[-1]}:{self.line}"

    def __str__(self) -> str:
        return f"cell line {self.line}" if self.is_cell else f"{self.file}:{self.line}"


def named(peer: int | None, members: Sequence[int]) -> int | None:
    """The rank of the world that a call within a group of these members names as `peer`."""
    if peer is None or peer < 0:
        return None
    return members[peer] if peer < len(members) else peer


@dataclass(frozen=True)
class Collective:
    """One communication call of one rank, recorded where PyTorch dispatches it, below the user's code.

    `number` counts a rank's calls from 1. `group_number` counts the collectives of one process group from 1: the ranks
    of a group meet when theirs are equal. `nbytes` is what this rank put in (for a receive: what it asked for).
    `start` and `end` are seconds since the run began; `end` is None unless the run asked for a timeline. `members` are
    the ranks of the group, as the default group numbers them. `of_kind` counts the group's calls of this kind from 1.
    `callers` called `frame`'s function, the nearest first; `folded` frames lie between `frame` and the call, of the
    libraries `via`.
    `turn` is the variable of the loop around the call, and what it was, if that is a number or a text. `failed`: it has
    raised an error, which the code may have caught. `described` is the group's `group_desc`, for a mesh the dimension.
    """

    rank: int
    number: int
    kind: str
    group: str
    group_number: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    start: float
    frame: Frame | None = None
    inside: str = ""
    reduce_op: str = ""
    peer: int | None = None
    end: float | None = None
    members: tuple[int, ...] = ()
    of_kind: int = 0
    callers: tuple[Frame, ...] = ()
    via: tuple[str, ...] = ()
    folded: int = 0
    turn: tuple[str, str] | None = None
    failed: bool = False
    described: str = ""

    @property
    def named(self) -> int | None:
        """The rank that the call names, its root or the other end of a message, as the world numbers it; None is any."""
        return named(self.peer, self.members)

    @property
    def chain(self) -> tuple[Frame, ...]:
        """The call's line and what led to it, the outermost first."""
        return tuple(frame for frame in (self.frame, *self.callers) if frame)[::-1]

    @property
    def is_point_to_point(self) -> bool:
        """True for send and receive, which two ranks do, against collectives, which a whole group does."""
        return self.kind in ("send", "recv")

    @property
    def title(self) -> str:
        """`all_reduce #2`, with the kind's own count within its group, as a reader would count it."""
        return f"{self.kind} #{self.of_kind or self.group_number}"

    @property
    def tensor(self) -> str:
        """`4 × float32`, `3×5 float32`, or empty for a barrier."""
        if self.kind in ("barrier", "monitored_barrier") or not self.dtype:
            return ""
        if len(self.shape) > 1:
            return f"{'×'.join(map(str, self.shape))} {self.dtype}"
        return f"{self.shape[0] if self.shape else 1} × {self.dtype}"


@dataclass(frozen=True)
class Group:
    """A process group that a rank has made or waits for, of the `members`, as the default group numbers them.

    `timeout` is after how many seconds its collectives fail; None where that isn't known, and for other backends than gloo.
    """

    name: str
    members: tuple[int, ...]
    frame: Frame | None
    timeout: float | None = None


@dataclass(frozen=True)
class Wait:
    """A time in which a rank's main thread stood in a wait for communication; recorded for a timeline only.

    `number` is that of the collective, 0 when it isn't known.
    """

    number: int
    begin: float
    end: float


@dataclass(frozen=True)
class Mark:
    """Something the code on a rank pointed out (`lockstep.ranks.mark`), in order with that rank's collectives."""

    rank: int
    number: int
    name: str
    at: float


@dataclass(frozen=True)
class Stack:
    """Where a rank's main thread stood: the user's frame, and what PyTorch was doing for it.

    `call` names the innermost communication call (`all_reduce`, `backward`, `init_process_group`, …), empty when the
    thread was not communicating. `operation` is the number of the collective it waits for, when that is known.
    """

    frame: Frame | None
    call: str = ""
    operation: int | None = None
    pending: tuple[int, ...] = ()
    threads: int = 0
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Error:
    """An exception that a rank's code raised, cut to the user's frames."""

    type: str
    message: str
    frames: tuple[Frame, ...] = ()
    traceback: str = ""

    @property
    def frame(self) -> Frame | None:
        """The innermost of the user's frames."""
        return self.frames[-1] if self.frames else None

    def __str__(self) -> str:
        return f"{self.type}: {self.message}" if self.message else self.type


@dataclass
class RankReport:
    """One rank's story. `code` is its exit status (negative: the signal that ended it).

    `shown` is what it has shown to draw numbers (`ranks.draw`), in order. `stopped` tells that a signal (SIGSTOP) held the
    process, so that it could not go on. `because` is the exception that its code had caught when it left by SystemExit.
    """

    rank: int
    outcome: Outcome = Outcome.STOPPED
    pid: int = 0
    code: int | None = None
    error: Error | None = None
    because: Error | None = None
    stack: Stack | None = None
    stdout: str = ""
    stderr: str = ""
    fault: str = ""
    stopped: bool = False
    peak_memory: int = 0
    cpu_seconds: float = 0.0
    ended: float = 0.0
    collectives: list[Collective] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    observations: dict[str, Any] = field(default_factory=dict)
    shown: list[Any] = field(default_factory=list)

    @property
    def last_collective(self) -> Collective | None:
        return self.collectives[-1] if self.collectives else None


OWN_CODE = "its own code"
"""What a rank is in that waits in no call of PyTorch's."""


@dataclass(frozen=True)
class Waiting:
    """A row of a hang's table: what one rank waits in, and where; its `node` when the nodes are machines of their own.

    `waits` is false for a rank that waits in nothing: then `what` says how it ended, or what is missing of it, or, if
    `called`, what it called.
    """

    rank: int
    what: str
    tensor: str = ""
    since: float | None = None
    frame: Frame | None = None
    differs: bool = False
    node: str = ""
    waits: bool = True
    called: bool = False


@dataclass(frozen=True)
class Cause:
    """Why a run did not end well: the first line to read, then the evidence.

    `ranks` are those at fault; `echoes` those that only failed because of them. `branch` is the line of the statement
    that some ranks are inside of and others are not; `may_part` that of the only `if` by which a rank can skip the call,
    if it isn't known whether one has. `own` are the notes that are about this run, without the rules that
    hold for all; `cited` are places that the notes name.
    """

    kind: Kind
    headline: str
    ranks: tuple[int, ...] = ()
    frame: Frame | None = None
    rows: tuple[Waiting, ...] = ()
    notes: tuple[str, ...] = ()
    echoes: tuple[int, ...] = ()
    topic: Topic | None = None
    error: Error | None = None
    branch: int | None = None
    may_part: int | None = None
    own: tuple[str, ...] = ()
    cited: tuple[Frame, ...] = ()

    @property
    def parted(self) -> Frame | None:
        """The place of the `branch`."""
        place = next((frame for frame in (self.frame, *(row.frame for row in self.rows)) if frame), None)
        return replace(place, line=self.branch) if place and self.branch else None


@dataclass(frozen=True)
class Drift:
    """The first optimizer step after which the replicas were not equal bit for bit; step 0 is before the first.

    `tensor` is the first of `tensors` parameters, of `of` in all, that differed. `ranks` are those that do not have what
    most have. `amount` is the largest difference among a few sampled values of it. `frame` is where the step was taken.
    """

    step: int
    tensor: str
    tensors: int
    of: int
    ranks: tuple[int, ...]
    amount: float | None
    reason: str
    frame: Frame | None = None


@dataclass(frozen=True)
class Blowup:
    """The first optimizer step after which a parameter held NaN or an infinity, on `ranks`; step 0 is before the first.

    `value` and `gradient` are `NaN` or `inf`; `gradient`, what the parameter's gradient held before the step, is empty when
    it held numbers. `brought` are the ranks that brought such a value to DDP's average; None when DDP averaged nothing.
    """

    step: int
    tensor: str
    value: str
    ranks: tuple[int, ...]
    gradient: str
    brought: tuple[int, ...] | None
    frame: Frame | None = None


@dataclass(frozen=True)
class Replicas:
    """What watching the replicas found. `steps` are the optimizer steps that each rank took, `compared` those that all
    took. `same_work` counts the compared steps at which all ranks brought the same gradients to DDP's average, though
    each should have data of its own. `statistics` are buffers that differed after a step (BatchNorm's do, by
    design)."""

    compared: int
    steps: tuple[int, ...]
    same_work: int
    statistics: tuple[str, ...]
    drift: Drift | None = None
    blowup: Blowup | None = None
