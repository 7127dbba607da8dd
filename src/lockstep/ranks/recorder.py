"""Inside a rank: notes every communication call as PyTorch dispatches it, and says where the main thread stands.

All of `torch.distributed`, DDP's own bucket all-reduces included, goes through the dispatcher's `c10d::` operators. A
kernel of ours at the dispatch key `BackendSelect`, which every call passes and which these operators leave empty, sees
each one below the user's code and below DDP, and hands it on. Three Python functions of torch are replaced:
`Work.wait`, so that the stack of a waiting rank tells which operation it waits for; the one that makes process groups,
so that none goes before the process does; and `init_process_group`, whose limit is the program's own.

A thread listens for the supervisor's questions. It sleeps until one comes, and answers while the main thread waits
inside a collective, since that wait releases the interpreter lock.
"""

from __future__ import annotations

import _thread
import contextlib
import datetime
import dis
import functools
import gc
import inspect
import os
import queue
import re
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from . import messages, processes
from .calls import CALLS, around, inside_of, library_of
from .channel import Channel, ChannelError, encode
from .messages import read
from .mismatch import ROOTED

_OPERATORS = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce_coalesced",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather_into_tensor",
    "allgather_coalesced_": "all_gather_coalesced",
    "allgather_into_tensor_coalesced_": "all_gather_into_tensor_coalesced",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter_tensor_coalesced",
    "gather_": "gather",
    "scatter_": "scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all_single",
    "barrier": "barrier",
    "monitored_barrier_": "monitored_barrier",
    "send": "send",
    "recv_": "recv",
    "recv_any_source_": "recv",
}
_PAYLOAD = ("input_tensors", "input_tensor", "inputs", "input", "tensors", "tensor", "input_list", "output_tensors")
_PEER = {"send": "dst", "recv": "src", **dict.fromkeys(ROOTED, "root_rank")}

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_PYTHON = os.path.dirname(os.path.abspath(threading.__file__)) + os.sep
_FUTURE, _POOL, _PROCESSES = (
    os.path.join(_PYTHON, "concurrent", "futures", name) for name in ("_base.py", "thread.py", "process.py")
)
_MULTIPROCESSING = os.path.join(_PYTHON, "multiprocessing") + os.sep
_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]")
_FILES = os.path.join(_TORCH, "distributed", "checkpoint") + os.sep
"""Torch's code that reads and writes checkpoints: what it says to other ranks it says through `distributed_c10d`."""
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep

_PICKLING = ("_object_to_tensor", "_tensor_to_object")
"""Functions of an object collective in which a rank works by itself, for as long as its objects need."""

UNTOLD_SECONDS = 2.0
MOST_OF_AN_ERROR = 120  # characters
UNLIMITED = contextlib.nullcontext()
LIMIT_LATE = 1.0  # So much later than at its limit a wait may end on a busy machine
RENDEZVOUS_TRIES = 3  # So many times its limit init_process_group may take: it tries again, and then connects
SHORT_SECONDS = 60.0
"""Who gives a group of its own so short a timeout may want to go on after it. That of the default group ends the job."""
CALLERS = 6
SIGNALS = signal.valid_signals()
CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}
MOST_OF_A_VALUE = 40  # characters
MOST_LOOPS = 1000
_ASKS = {"locals", "vars", "dir", "eval", "exec", "breakpoint", "set_trace"}
SITES_AGAIN = 10_000  # So often a call says again where it comes from: of a long run the first ones are forgotten

_current: Recorder | None = None


_loops: dict[tuple[int, int], tuple[CodeType, tuple[str, ...] | None]] = {}
"""What `_turns` has found, by the code's identity: to hash its content takes longer than a small all-reduce."""


def _turns(code: CodeType, at: int) -> tuple[str, ...] | None:
    """The variables of the innermost loop around this instruction; `for name, value in …` has two. None without a loop."""
    known = _loops.get((id(code), at))
    if known is None:
        if len(_loops) > MOST_LOOPS:
            _loops.clear()
        known = _loops[id(code), at] = code, _variables(code, at)
    return known[1]


def _variables(code: CodeType, at: int) -> tuple[str, ...] | None:
    inner: list[dis.Instruction] | None = None
    every = list(dis.get_instructions(code))
    for number, one in enumerate(every):
        if one.opname == "FOR_ITER" and one.offset < at < one.argval:
            inner = every[number + 1 : number + 4]
    if inner is None:
        return None
    stores = [one for one in inner if one.opname.startswith(("STORE_", "UNPACK_"))]
    if inner[:1] != stores[:1] or not stores:
        return ()
    if not stores[0].opname.startswith("UNPACK_"):
        stores = stores[:1]
    named = [one.argval if isinstance(one.argval, tuple) else (one.argval,) for one in stores]
    return tuple(name for some in named for name in some if isinstance(name, str))


def _turn(frame: FrameType, names: tuple[str, ...]) -> tuple[str, str] | None:
    """Which turn of its loop this function is in: the first variable that is a number or a text, and its value."""
    for name in names:
        value = _value(frame, name)
        if type(value) in (bool, int, str):
            return name, repr(value)[:MOST_OF_A_VALUE]
    return None


def _value(frame: FrameType, name: str) -> Any:
    """What a name stands for there, without a trace of having looked; None where that is impossible.

    Until Python 3.13 a function's `f_locals` is a dictionary that stays with it and keeps all that it has, large tensors too.
    It is emptied, unless the code might have asked for that same dictionary.
    """
    if not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        return frame.f_locals.get(name)
    if not _ASKS.isdisjoint(frame.f_code.co_names):
        return None
    seen = frame.f_locals
    value = seen.get(name)
    if isinstance(seen, dict):
        seen.clear()
    return value


class Caller(NamedTuple):
    """Where a call comes from: see `report.Collective`."""

    frame: messages.Place
    callers: list[messages.Place]
    via: list[str]
    folded: int
    inside: str
    reduce_op: str
    turn: tuple[str, str] | None


class Recorder:
    """One process's record of communication, written straight to the supervisor's channel."""

    def __init__(self, channel: Channel, hidden: tuple[str, ...] = (), timeline: bool = False) -> None:
        """`hidden` are path prefixes of code that is not the user's (the client's own part on the rank)."""
        self.pid = os.getpid()
        self.channel = channel
        self.timeline = timeline
        self.reduced: Callable[[list[torch.Tensor]], None] | None = None  # told what DDP's backward reduces
        self.leave = threading.Event()
        self._drawn: queue.SimpleQueue[float] = queue.SimpleQueue()
        self._drawing = threading.Lock()
        self._hidden = (*hidden, _TORCH, _HERE)
        self._lock = threading.RLock()  # a signal handler or a finalizer may communicate while this thread records
        self._number = 0
        self._began = (0, 0)  # The latest operation's number, and when it was called
        self._sites: dict[Any, int] = {}
        self._in_group: dict[str, int] = {}
        self._of_kind: dict[tuple[str, str], int] = {}
        self._point_to_point: dict[tuple[str, str, int | None], int] = {}
        self._outstanding: deque[tuple[Any, int]] = deque(maxlen=4096)
        self._untold: dict[int, Any] = {}
        """With `timeline`: the future of each operation whose end has not been told. (Its Work says that it has completed
        only when all callbacks are through.)"""
        self._limits: dict[int, tuple[float, float]] = {}  # Of a thread: for how many seconds, and until when
        self.short_groups: dict[str, float] = {}  # Groups whose calls fail after a few seconds, as the program wants
        self._group_limits: dict[int | None, tuple[float, float]] = {}  # As `_limits`, of their operations
        """While the main thread is in a wait that the program has limited: to how many seconds, and when these are over."""
        self._main = threading.main_thread().ident
        self.address = _address()
        self.watcher: int | None = None
        # A DDP wrapper that outlives its destroyed group deadlocks at random: its destructor joins gloo's thread while
        # it holds the interpreter lock. The usual way to write a training function is hit by it, through no fault of
        # its writer, so no group that was used goes before this process does.
        self.groups: list[Any] = []
        self.keep_alive: dict[int, tuple[Any, str, list[int]]] = {}

    # What the user's code does ------------------------------------------------------------------------------

    def begin(self, kind: str, names: list[str], values: tuple[Any, ...]) -> int:
        """Report that the calling thread starts an operation; returns its number."""
        by_name = dict(zip(names, values, strict=False))
        tensors = _flatten(next((by_name[name] for name in _PAYLOAD if name in by_name), ()))
        group, members = self._group(by_name.get("process_group"))
        peer = by_name.get(_PEER.get(kind, ""))
        frame, callers, via, folded, inside, reduce_op, turn = self.caller()
        if self.reduced is not None and inside == "backward":
            self.reduced(tensors)
        with self._lock:
            self._number += 1
            number = self._number
            if kind in ("send", "recv"):
                key = (group, kind, peer)
                self._point_to_point[key] = self._point_to_point.get(key, 0) + 1
                group_number = self._point_to_point[key]
            else:
                group_number = self._in_group[group] = self._in_group.get(group, 0) + 1
            of_kind = self._of_kind[group, kind] = self._of_kind.get((group, kind), 0) + 1
            if number % SITES_AGAIN == 0:
                self._sites.clear()
            known, site = len(self._sites), self._sites.setdefault((frame, *callers, *via, folded), len(self._sites))
            first = tensors[0] if tensors else None
            barrier = kind in ("barrier", "monitored_barrier")
            now = time.monotonic_ns()
            self._began = (number, now)
            if seconds := self.short_groups.get(group):
                self._group_limits[number] = seconds, time.monotonic() + seconds + LIMIT_LATE
            self.send(messages.Begin(
                number, kind, group, members, group_number, of_kind,
                nbytes=0 if barrier else sum(t.numel() * t.element_size() for t in tensors),
                shape=list(first.shape) if first is not None and not barrier else [],
                dtype=str(first.dtype).removeprefix("torch.") if first is not None and not barrier else "",
                device=first.device.type if first is not None else "",
                time=now, inside=inside, reduce_op=reduce_op,
                peer=int(peer) if isinstance(peer, int) else None, frame=frame,
                site=site, callers=callers if site == known else [], via=via if site == known else [],
                folded=folded if site == known else 0, turn=turn,
            ))  # fmt: skip
        return number

    def _group(self, boxed: Any) -> tuple[str, list[int]]:
        """The name and the global ranks of a process group; it is kept from now on."""
        try:
            process_group = dist.ProcessGroup.unbox(boxed)
            known = self.keep_alive.get(id(process_group))
            if known is None:
                members = dist.get_process_group_ranks(process_group)
                if not self.keep_alive and dist.is_initialized():
                    self.send(messages.IsRank(dist.get_rank()))
                known = self.keep_alive[id(process_group)] = (process_group, process_group.group_name, members)
            return known[1], known[2]
        except Exception:
            return "?", []

    def launched(self, number: int, result: Any) -> None:
        """Remember the operation's Work, to know later whether it has completed. One without is over when it returns."""
        while self._outstanding and _completed(self._outstanding[0][0]):
            self._group_limits.pop(self._outstanding.popleft()[1], None)
        if result is None and self.timeline:
            self._end(number)
        boxed = result[-1] if isinstance(result, (tuple, list)) else result
        work = None
        with contextlib.suppress(Exception):
            work = dist.Work.unbox(boxed)
        if work is None:
            self._group_limits.pop(number, None)
            return
        self._outstanding.append((work, number))
        if self.timeline:
            with contextlib.suppress(Exception):
                self._untold[number] = work.get_future()
                self._untold[number].add_done_callback(lambda _: self._end(number))

    def waited(self, work: Any) -> None:
        """Forget a Work whose wait has returned: gloo's reduce_scatter never says that it has completed.

        Without this, it and all that follow it would keep their tensors. NCCL's wait returns before the operation has
        completed, so with a GPU in use the Work itself is asked.
        """
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return
        for known, number in list(self._outstanding):
            if known is work:
                with contextlib.suppress(ValueError):
                    self._outstanding.remove((known, number))
                    self._group_limits.pop(number, None)

    @contextlib.contextmanager
    def waiting(self, work: Any = None, blocking: bool = False) -> Iterator[None]:
        """Within, the calling thread waits for communication. For a timeline, of the main thread.

        A `blocking` call waits from its launch on: its caller has nothing else to do meanwhile.
        """
        if not self.timeline or threading.get_ident() != self._main:
            yield
            return
        number, since = self._number_of(work) or 0, time.monotonic_ns()
        if blocking and number == self._began[0]:
            since = self._began[1]
        try:
            yield
        except BaseException:  # the wait has given up; what it waited for goes on
            number = 0
            raise
        finally:
            self.send(messages.Waited(number, since, time.monotonic_ns()))

    def failed(self, number: int | None) -> None:
        """Say that a call has raised an error, or the wait for it."""
        if number:
            self.send(messages.Failed(number, time.monotonic_ns()))

    @contextlib.contextmanager
    def limited(self, seconds: float, times: int = 1) -> Iterator[None]:
        """Within, this thread waits no longer than so many times that; 0 means that the call sets no limit."""
        thread = threading.get_ident()
        outer = self._limits.get(thread)
        if seconds > 0:
            self._limits[thread] = seconds, time.monotonic() + times * seconds + LIMIT_LATE
        try:
            yield
        finally:
            self._limits.pop(thread, None)
            if outer:
                self._limits[thread] = outer

    def _end(self, number: int) -> None:
        self.send(messages.End(number, time.monotonic_ns()))
        self._untold.pop(number, None)

    def returned(self) -> None:
        """Say that the code has come to its end. The ends of what has completed come before: torch's threads tell them,
        which may be slower than the code that has waited for them.
        """
        give_up = time.monotonic() + UNTOLD_SECONDS
        while any(end.done() for end in list(self._untold.values())) and time.monotonic() < give_up:
            time.sleep(0.001)
        self.send(messages.Returned())

    def mark(self, name: str) -> None:
        """Note a point of the code, in order with this rank's collectives."""
        with self._lock:
            self._number += 1
            self.send(messages.Mark(self._number, str(name), time.monotonic_ns()))

    def observe(self, name: str, value: Any) -> None:
        """Send one observation. Raises TypeError for what cannot be one, ValueError for one that is too large."""
        tree, blob = encode(value)
        try:
            self.channel.send(messages.Observe(str(name), tree), blob)
        except ChannelError as error:
            raise ValueError(f"observation {name!r}: {error}") from None

    def draw(self, shown: Any) -> float:
        """Show what this rank has, and get the number that is due then. Raises TypeError, ValueError as `observe` does."""
        tree, blob = encode(shown)
        with self._drawing:
            try:
                self.channel.send(messages.Show(tree), blob)
            except ChannelError as error:
                raise ValueError(str(error)) from None
            return self._drawn.get()

    def send(self, message: Any) -> None:
        """Tell the supervisor; when it is gone, nobody needs to know."""
        with contextlib.suppress(OSError, ChannelError):
            self.channel.send(message)

    # Where the code stands -------------------------------------------------------------------------------------

    def is_users(self, filename: str) -> bool:
        """True for code that is neither Python's, nor an installed library's, nor ours."""
        return _is_users(filename, self._hidden)

    def caller(self) -> Caller:
        """Where the call that is being made comes from."""
        frame: FrameType | None = sys._getframe(2)
        users: list[messages.Place] = []
        libraries: list[str] = []
        folded = 0
        inside = reduce_op = ""
        turn = loop = None
        while frame is not None and len(users) <= CALLERS:
            file, name = frame.f_code.co_filename, frame.f_code.co_name
            if self.is_users(file):
                if loop is None and (loop := _turns(frame.f_code, frame.f_lasti)):
                    turn = _turn(frame, loop)
                users.append((file, frame.f_lineno, name))
            elif not users:
                if not reduce_op and file.endswith("distributed_c10d.py") and "op" in frame.f_code.co_varnames:
                    reduce_op = _reduce_name(frame.f_locals.get("op"))
                inside = around(inside, inside_of(file, name))
                folded += not file.startswith(_HERE)
                if library := _library_in(file, frame.f_globals.get("__name__", "")):
                    libraries.append(library)
            frame = frame.f_back
        via = [*dict.fromkeys(libraries[::-1])]
        return Caller((users or [None])[0], users[1:], via, folded if via else 0, inside, reduce_op, turn)

    def stack(self) -> messages.StackReport:
        """Where the main thread stands now; see `report.Stack`. From another thread, only `without_collections`."""
        frames = sys._current_frames()
        thread, frame = self._awaited(frames)
        call = ""
        operation = None
        communicating: bool | None = None
        detail: dict[str, Any] = {}
        innermost = called = ""
        passive = frame is not None and _is_passive(frame)
        place: messages.Place = None
        while frame is not None:
            code = frame.f_code
            name = code.co_name
            if self.is_users(code.co_filename):
                place = code.co_filename, frame.f_lineno, name
                break
            innermost = innermost or name
            if passive:
                called = f"{type(frame.f_locals.get('self')).__name__}.{name}"
            if name == "_lockstep_wait":
                communicating = True
                operation = self._number_of(frame.f_locals.get("self"))
            elif name == "_lockstep_leave":
                call, communicating = "finished", True
            elif _communicates(code.co_filename, name):
                communicating = communicating is not False
                public = not call or not name.startswith("_")
                if public and name not in ("wrapper", "wait") and call != "backward":
                    call = CALLS.get(name, name)
                detail |= _detail(name, frame)
            elif communicating is None and (
                name in _PICKLING
                or code.co_filename.startswith(_FILES)
                or not code.co_filename.startswith((_HERE, _TORCH))
            ):
                communicating = False
            inside = inside_of(code.co_filename, name)
            if inside == "DDP()":
                call = "DDP()"
            elif inside == "backward":
                call, communicating = "backward", True if communicating is None else communicating
            frame = frame.f_back
        if place is None and thread != self._main:
            place = self._users_place(frames.get(self._main or 0))
        if not communicating:
            call = ""
        pending = [number for work, number in list(self._outstanding) if not _completed(work)]
        if operation is None and call and pending:
            operation = pending[0] if call in ("backward", "DDP()", "forward") else pending[-1]
        if operation is not None and not call:
            call = "wait"
        if called and not call:
            detail["held"] = called
            needed = (self._users_place(one) for other, one in frames.items() if _needs(thread, other, frames))
            detail["thread_at"] = next(filter(None, needed), None)
        seconds, end = self._limits.get(thread, (0.0, 0.0))
        if not seconds and operation in self._group_limits:
            seconds, end = self._group_limits[operation]
        if seconds:
            detail["limit"] = seconds
        limited = seconds if time.monotonic() < end else 0.0
        detail |= self._handled()
        return messages.StackReport(
            place, call, operation, pending, self._own_threads(frames), detail, innermost, limited
        )

    def _awaited(self, frames: dict[int, FrameType]) -> tuple[int, FrameType | None]:
        """The main thread; where it only waits for the end of another one that communicates, that one."""
        main = self._main or 0
        speaking = [one for one, frame in frames.items() if one not in (main, self.watcher) and self._speaks(frame)]
        if len(speaking) == 1 and _needs(main, speaking[0], frames) and not any(map(_handler, SIGNALS)):
            return speaking[0], frames[speaking[0]]
        return main, frames.get(main)

    def _speaks(self, frame: FrameType | None) -> bool:
        """Whether a thread is inside a communication call, and not at work for it."""
        while frame is not None and not self.is_users(frame.f_code.co_filename):
            file, name = frame.f_code.co_filename, frame.f_code.co_name
            if _communicates(file, name) or name == "_lockstep_wait":
                return True
            if name in _PICKLING or file.startswith(_FILES) or not file.startswith((_HERE, _TORCH)):
                return False
            frame = frame.f_back
        return False

    def _users_place(self, frame: FrameType | None) -> messages.Place:
        while frame is not None and not self.is_users(frame.f_code.co_filename):
            frame = frame.f_back
        return (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name) if frame is not None else None

    def _handled(self) -> dict[str, Any]:
        """The error in whose `except` or `finally` the main thread is, and the user's line that raised it (Python 3.11)."""
        current: Callable[[], dict[int | None, Any]] = getattr(sys, "_current_exceptions", dict)
        found = current().get(self._main)
        error = found[1] if isinstance(found, tuple) else found
        if error is None:
            return {}
        place, trace = None, error.__traceback__
        while trace is not None:
            if self.is_users(trace.tb_frame.f_code.co_filename):
                place = trace.tb_frame.f_code.co_filename, trace.tb_lineno, trace.tb_frame.f_code.co_name
            trace = trace.tb_next
        known = (
            type(error).__module__ == "builtins"
        )  # The text of another is made by code that is not ours to run here.
        said = f"{type(error).__name__}: {error}" if known and str(error) else type(error).__name__
        return {"handles": said.partition("\n")[0][:MOST_OF_AN_ERROR], "raised_at": place}

    def _own_threads(self, frames: dict[int, FrameType]) -> int:
        """How many of these threads might do something for the user by themselves: no lock or queue holds them."""
        timers = {one.ident for one in threading.enumerate() if isinstance(one, threading.Timer)}
        return sum(
            thread in timers or self._may_act(thread, frame)
            for thread, frame in frames.items()
            if thread not in (self._main, self.watcher)
        )

    def _may_act(self, thread: int, frame: FrameType | None) -> bool:
        if frame is not None and _is_passive(frame):
            return False
        if self._speaks(frame):
            return thread in self._limits
        called: FrameType | None = None
        while frame is not None:
            if self.is_users(frame.f_code.co_filename) or _is_at_work(frame, called):
                return True
            called, frame = frame, frame.f_back
        return False

    def _number_of(self, work: Any) -> int | None:
        return next((number for known, number in list(self._outstanding) if known is work), None)

    # The supervisor's questions --------------------------------------------------------------------------------

    def listen(self) -> None:
        """Answer the supervisor until it is gone; then this process has no reason to live."""
        self.watcher = threading.get_ident()
        self.send(messages.Watcher(threading.get_native_id()))
        while True:
            try:
                message = self.channel.wait()
            except Exception:
                message = None
            if message is None:
                os._exit(1)
            asked: messages.Ask | messages.Leave | messages.Drawn = read(
                messages.Ask | messages.Leave | messages.Drawn, message[0]
            )
            if isinstance(asked, messages.Drawn):
                self._drawn.put(asked.number)
                continue
            if isinstance(asked, messages.Leave):
                self.leave.set()
                continue
            try:
                with without_collections():
                    # A look made torch.compile fail under DDP in half of the runs: see `without_collections`.
                    stack = messages.StackReport() if torch.compiler.is_compiling() else self.stack()
            except Exception as error:
                stack = messages.StackReport(detail={"error": repr(error)})
            self.send(messages.Sample(asked.id, stack))


@functools.lru_cache(4096)
def _is_users(filename: str, hidden: tuple[str, ...]) -> bool:
    if filename.startswith("<frozen") or filename == "<string>":
        return False
    return not filename.startswith((*hidden, _PYTHON)) and not _INSTALLED.search(filename)


@functools.lru_cache(4096)
def _library_in(filename: str, module: str) -> str:
    return library_of(module) if _INSTALLED.search(filename) or filename.startswith(_TORCH) else ""


LOOK_SECONDS = 0.5
"""For so long no other thread may ask for the interpreter lock while one looks at frames: by default for 5 ms, and a busy
machine stops a thread for longer than that."""

_look: tuple[float, bool] | None = None
"""While a look is on: the switch interval and whether garbage is collected, as they were."""


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """No garbage collection starts within, and no other thread runs: the only safe way to look at another thread's frames.

    To look makes frame objects, and before Python 3.12 whatever makes objects may collect garbage there and then. What
    that finalizes can wait for a lock, and another thread runs. `sys._current_frames` would hold the interpreter's own
    list of threads meanwhile, so that a thread which is born waits for it, with the interpreter lock in its hand: a
    deadlock (CPython gh-106883). And a frame that is being made would belong to a call that has returned.

    A frame object that is held keeps its locals alive after its function returns, so `__del__` runs late. torch's DDPOptimizer
    relies on it (`FakeifyFirstAOTInvocationGuard`): the first step of a compiled model then fails with a
    FakeTensorDeviceMismatchError. So no function may return meanwhile. Who waits for the lock already does so
    by the usual interval, and gets it first: hence the sleep.
    """
    global _look
    interval = sys.getswitchinterval()
    _look = interval, False
    sys.setswitchinterval(LOOK_SECONDS)
    time.sleep(0)
    _look = interval, gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        _as_before()


def _as_before() -> None:
    """The end of a look, also in a child that was forked during one."""
    global _look
    if _look is not None:
        interval, collects = _look
        if collects:
            gc.enable()
        sys.setswitchinterval(interval)
        _look = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_as_before)


def _flatten(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _flatten(item)]
    return []


def _completed(work: Any) -> bool:
    try:
        return bool(work.is_completed())
    except Exception:
        return True


def _reduce_name(op: Any) -> str:
    """`SUM`; empty for what is no reduction, as a `_CollOp` of torch's that its functions call `op` too."""
    known = op.__getstate__()[0] if type(op).__name__ == "ReduceOp" else op
    return str(known.name) if isinstance(known, dist.ReduceOp.RedOpType) else ""


def _is_pythons(filename: str) -> bool:
    return filename.startswith(_PYTHON) and not _INSTALLED.search(filename)


def _needs(thread: int, other: int, frames: dict[int, FrameType]) -> bool:
    """Whether a thread goes on only when the other one has ended, or what a pool gave that one to do: it's in `join`, or in
    the `result` of a future. Locks, events and queues may be freed by anybody, also by C.
    """
    frame = frames.get(thread)
    if frame is None or frame.f_code.co_filename != threading.__file__ or not _is_passive(frame):
        return False
    joined = frame.f_locals.get("self")
    if isinstance(joined, threading.Thread):
        return joined.ident == other or _needs(joined.ident or 0, other, frames)
    caller, doing = frame.f_back, frames.get(other)
    if caller is None or caller.f_code.co_name != "result" or caller.f_code.co_filename != _FUTURE:
        return False
    while doing is not None and (doing.f_code.co_filename, doing.f_code.co_name) != (_POOL, "run"):
        doing = doing.f_back
    return doing is not None and getattr(doing.f_locals.get("self"), "future", None) is caller.f_locals.get("self")


def _is_at_work(frame: FrameType, called: FrameType | None) -> bool:
    """Whether this frame of a library's thread, which has called the other one (or C), may do something for the user: what
    a pool was given, a target from Python's library (a loop of asyncio, a server), or a library that knows torch.
    """
    file, name = frame.f_code.co_filename, frame.f_code.co_name
    if file == "<string>":  # exec
        return True
    if file == _POOL:
        return name == "run"
    if file == _PROCESSES:
        return name == "run" and bool(frame.f_locals["self"].pending_work_items)
    if file.startswith(_MULTIPROCESSING):  # a pool's threads: those that work, and the one that waits for its processes
        return bool(frame.f_locals.get({"worker": "func", "_handle_results": "cache"}.get(name, "")))
    if file == threading.__file__ and name == "run":
        target = called.f_code.co_filename if called is not None else file
        return _is_pythons(target) and not target.startswith(_MULTIPROCESSING)
    known = _INSTALLED.search(file) and not file.startswith((_TORCH, _HERE))
    return bool(known) and any(one is torch or one is dist for one in [*frame.f_globals.values()])


def _is_passive(frame: FrameType) -> bool:
    """True for a wait in Python's library that another thread of this process has to end, without a time limit."""
    return (
        _is_pythons(frame.f_code.co_filename)
        and not frame.f_code.co_filename.startswith(_MULTIPROCESSING)
        and frame.f_code.co_name in ("wait", "get", "join", "_wait_for_tstate_lock", "acquire", "_worker")
        and frame.f_locals.get("timeout", None) in (None, -1)
    )


def _handler(number: int) -> bool:
    """Whether a function of the user's is called at this signal."""
    known = signal.getsignal(number)
    return callable(known) and known is not signal.default_int_handler


def _communicates(filename: str, name: str) -> bool:
    if name in _PICKLING:
        return False
    return name == "_engine_run_backward" or (
        filename.startswith(_TORCH)
        and f"{os.sep}distributed" in filename[len(_TORCH) - 1 :]
        and not filename.startswith(_FILES)
    )


def _address() -> str:
    """Where the environment says that the ranks meet."""
    return f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"


def _detail(name: str, frame: FrameType) -> dict[str, Any]:
    """What a rendezvous waits for: the rank and world size given to init_process_group, and the address it goes to."""
    if name == "_create_c10d_store" and _current is not None:
        return {"address": _address(), "launchers_address": _current.address}
    if name != "init_process_group":
        return {}
    known = {key: frame.f_locals.get(key) for key in ("rank", "world_size", "backend", "init_method")}
    known["again"] = bool(_current and _current.keep_alive)
    return {key: value for key, value in known.items() if isinstance(value, (int, str))}


def _own() -> Recorder | None:
    """The recorder of this process. A child of a rank has none: the rank's channel is not its own, nor is the lock on it."""
    return _current if _current is not None and _current.pid == os.getpid() else None


def _make_kernel(operator: Any, kind: str) -> Any:
    names = [argument.name for argument in operator._schema.arguments]
    limit = names.index("timeout") if kind == "monitored_barrier" else None
    select = torch._C.DispatchKey.BackendSelect

    def lockstep_record(keyset: Any, *values: Any) -> Any:
        below = keyset.remove(select)
        recorder = _own()
        if recorder is None:
            return operator.redispatch(below, *values)
        number = recorder.begin(kind, names, values)
        try:
            with recorder.limited(values[limit] / 1000) if limit is not None else UNLIMITED:
                result = operator.redispatch(below, *values)
        except BaseException:
            recorder.failed(number)
            raise
        recorder.launched(number, result)
        return result

    return lockstep_record


_library: torch.library.Library | None = None
_functional: torch.library.Library | None = None
_wait = dist.Work.wait
_init = c10d.init_process_group


def _seconds(timeout: Any = None) -> float:
    """Of a timeout as torch takes it; 0 for none."""
    return timeout.total_seconds() if isinstance(timeout, datetime.timedelta) else 0.0


def _lockstep_wait(self: Any, *args: Any, **kwargs: Any) -> Any:
    recorder = _own()
    if recorder is None:
        return _wait(self, *args, **kwargs)
    blocking = sys._getframe(1).f_code.co_filename == c10d.__file__
    with recorder.waiting(self, blocking), recorder.limited(_seconds(kwargs.get("timeout", *args[:1]))):
        try:
            result = _wait(self, *args, **kwargs)
        except BaseException:
            recorder.failed(recorder._number_of(self))
            raise
    recorder.waited(self)
    return result


@functools.wraps(_init)
def _lockstep_init(*args: Any, **kwargs: Any) -> Any:
    recorder = _own()
    if recorder is None:
        return _init(*args, **kwargs)
    with recorder.limited(_seconds(kwargs.get("timeout", *args[2:3])), RENDEZVOUS_TRIES):
        return _init(*args, **kwargs)


def _lockstep_wait_tensor(keyset: Any, *values: Any) -> Any:
    """In place of the wait of functional collectives, which does not pass `Work.wait`."""
    below = keyset.remove(torch._C.DispatchKey.BackendSelect)
    recorder = _own()
    with recorder.waiting() if recorder is not None else contextlib.nullcontext():
        return torch.ops._c10d_functional.wait_tensor.default.redispatch(below, *values)


def install() -> None:
    """Put the kernels in place, for this process and all that are forked from it. They do nothing until `start`."""
    global _library, _functional
    if _library is not None:
        return
    _functional = torch.library.Library("_c10d_functional", "IMPL")  # type: ignore[no-untyped-call]
    _functional.impl("wait_tensor", _lockstep_wait_tensor, "BackendSelect", with_keyset=True)  # type: ignore[no-untyped-call]
    _library = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
    for name, kind in _OPERATORS.items():
        packet = getattr(torch.ops.c10d, name, None)
        if packet is not None:
            kernel = _make_kernel(packet.default, kind)
            _library.impl(name, kernel, "BackendSelect", with_keyset=True)  # type: ignore[no-untyped-call]


def keep_compilers_out() -> None:
    """Have torch.compile leave these files alone: what a kernel of ours does is no part of the user's graph.

    For processes in which `torch._dynamo` is imported; to be called once, before any of them compiles.
    """
    with contextlib.suppress(Exception):
        from torch._dynamo import trace_rules

        trace_rules.add(__package__)


def _is_gloo(backend: str) -> bool:
    """True when a group of this backend communicates through gloo, whatever the tensors are on."""
    return backend == "gloo" or (backend in ("undefined", "cpu:gloo,cuda:nccl") and not torch.cuda.is_available())


def _keep_groups(recorder: Recorder) -> None:
    """Hold every process group from its beginning.

    A rank that destroys its group as soon as it has it would close the connections on which a slower neighbor is still
    setting up its own: that one's init_process_group then fails with "Connection closed by peer", now and then.
    """
    make = getattr(c10d, "_new_process_group_helper", None)
    if make is None:
        return
    parameters = inspect.signature(make)

    def lockstep_make_group(*args: Any, **kwargs: Any) -> Any:
        if _own() is None:
            return make(*args, **kwargs)
        with contextlib.suppress(Exception):
            given = parameters.bind(*args, **kwargs).arguments
            members, name = given["global_ranks_in_group"], str(given["group_name"])
            place = recorder.caller().frame
            timeout = _seconds(given.get("timeout")) if _is_gloo(str(given["backend"])) else 0.0
            members = [int(rank) for rank in members]
            if members and 0 < timeout <= SHORT_SECONDS:  # the default group has none
                recorder.short_groups[name] = timeout
            described = str(given.get("group_desc") or "").removeprefix("mesh_")
            described = "" if described in ("undefined", "default_pg") else described
            recorder.send(messages.MadeGroup(name, members, place, time.monotonic_ns(), timeout or None, described))
        with processes.threads_named(processes.POLLERS[0]):
            made = make(*args, **kwargs)
        recorder.groups.append(made)
        return made

    c10d._new_process_group_helper = lockstep_make_group


_DIRECT = {"allreduce": "all_reduce", "broadcast": "broadcast", "reduce": "reduce", "allgather": "all_gather",
           "_allgather_base": "all_gather_into_tensor", "reduce_scatter": "reduce_scatter", "gather": "gather",
           "_reduce_scatter_base": "reduce_scatter_tensor", "scatter": "scatter", "alltoall": "all_to_all",
           "alltoall_base": "all_to_all_single", "send": "send", "recv": "recv"}  # fmt: skip


def _record_direct_calls() -> None:
    """Note what is asked of a backend itself, which does not pass the dispatcher.

    Nothing of torch's own does that from Python: `dist.group.WORLD._get_backend(device).allreduce([t])` does.
    """
    backend = torch._C._distributed_c10d.Backend
    for name, kind in _DIRECT.items():
        if callable(getattr(backend, name, None)):
            setattr(backend, name, _noted(getattr(backend, name), kind))


def _noted(call: Any, kind: str) -> Any:
    def lockstep_direct(*values: Any, **options: Any) -> Any:
        recorder = _own()
        if recorder is not None:
            tensors = _flatten([*values[1:], *options.values()])
            world = dist.group.WORLD
            group = world.boxed() if world is not None else None  # Which group it is of, a backend does not say.
            peer = values[2] if kind in ("send", "recv") and len(values) > 2 else None
            recorder.begin(kind, ["tensors", "process_group", _PEER.get(kind, "")], (tensors[:1], group, peer))
        return call(*values, **options)

    return lockstep_direct


def start(recorder: Recorder) -> None:
    global _current
    install()
    _record_direct_calls()
    _keep_groups(recorder)
    dist.Work.wait = _lockstep_wait  # type: ignore[method-assign]
    dist.init_process_group = c10d.init_process_group = _lockstep_init
    _current = recorder
    # The program shall not see this thread, neither in threading.enumerate() nor as one that takes its signals.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS - CRASHES)
    _thread.start_new_thread(recorder.listen, ())
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def current() -> Recorder:
    """The recorder of this rank; raises RuntimeError outside a rank that Lockstep started."""
    recorder = _own()
    if recorder is None:
        raise RuntimeError("observe() and mark() work on a rank that Lockstep started")
    return recorder
