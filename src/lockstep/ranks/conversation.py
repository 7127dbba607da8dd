"""What the ranks of this machine say, and what they are asked.

Each speaks over a socket of its own, and prints through two pipes. What it says is noted in the run's state, and so is how
it ended, by its own word or the system's. What a rank of another machine has said is noted in the same way (`nodes`).
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import signal
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

from . import leftovers, messages, processes
from .channel import Channel, ChannelError, whole
from .comparison import Comparison
from .draws import drawn
from .hang_detector import TICK, Stacks
from .member import Member, RunState, line_of
from .messages import Role, read
from .output import OutputPipe
from .report import Outcome
from .reporting import FAULT_SIGNAL

ANSWER_SECONDS = 0.7
LAST_ANSWER_SECONDS = 2.5
"""How long a rank that is about to be stopped may take to say where it is: it is asked only once."""
NUMBERS_IN_MEMORY = 16  # How much larger numbers and lists are in memory than as text
MAX_OBSERVED = 256 << 20  # Bytes
MAX_TOLD = 64 << 20
USUAL_MESSAGE = 4 << 10  # Bytes. A rank may tell of any number of collectives, but not of any number of books.
MAX_INTRODUCTION = 4 << 10  # Bytes that a process may say before it is known who it is
DUMPED = 8  # Processes of a late rank that are asked for their stack
DUMP_SECONDS = 0.3


class Conversation:
    def __init__(self, run: RunState, tell: Callable[[messages.ToClient, bytes], None]) -> None:
        self.run, self.job, self.tell = run, run.job, tell
        self.selector = selectors.DefaultSelector()
        self.door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.directory = ""
        self.environment: Callable[[int], dict[str, str]] = lambda rank: {}
        self.arguments: list[tuple[Any, bytes]] = []
        """The target's arguments: the same for all ranks, or each rank's own."""
        self.secret = ""
        self.fork_server: Channel | None = None
        self.pipes: list[OutputPipe] = []
        self.statuses: dict[int, int] = {}
        self.asked = 0
        self.leaving = False  # The ranks have been told to go, and what they say of their end is no outcome of the run
        self.comparison = Comparison(run.job.world_size)
        self.dumped: dict[int, int] = {}  # How much of a member's fault file was written on demand
        self.ask_elsewhere: Callable[[int, list[Member], bool], None] = lambda number, members, insist: None
        self.relay: Callable[[int, messages.Relayed], None] = lambda rank, message: None
        """Has another machine know what a rank has said."""

    def open(self, directory: str) -> None:
        """Wait for the ranks at a socket in the run's folder."""
        self.directory = directory
        self.door.bind(os.path.join(directory, "attach"))
        self.door.listen(128)
        self.door.setblocking(False)
        self.selector.register(self.door, selectors.EVENT_READ, self._welcome)

    def read_output(self, pipe: OutputPipe) -> None:
        """Take what comes through a pipe, from now on."""
        self.pipes.append(pipe)
        self.selector.register(pipe.descriptor, selectors.EVENT_READ, lambda: self._hear_output(pipe))

    def hear(self, seconds: float) -> None:
        """Take what arrives, from anybody; return after `seconds` if nothing does."""
        for key, _ in self.selector.select(seconds):
            key.data()

    def ask(self, members: list[Member], insist: bool = True, seconds: float = ANSWER_SECONDS) -> Stacks | None:
        """Ask where these members stand; see `hang_detector.AskMembers`. Who stays silent is asked by a signal, to `insist`."""
        self.asked += 1
        for member in members:
            member.sample = None
        elsewhere = [member for member in members if member.node is not None]
        if elsewhere:
            self.ask_elsewhere(self.asked, elsewhere, insist)
        for member in members:
            if member.channel is not None:
                with contextlib.suppress(OSError):
                    member.channel.send(messages.Ask(self.asked))

        def silent() -> list[Member]:
            return [one for one in members if one.sample is None and not one.gone and (self.leaving or not one.done)]

        def speechless(one: Member) -> bool:
            return one.node is None and processes.is_stopped(one.pid)

        give_up = time.monotonic() + (2 * seconds if elsewhere else seconds)
        while (left := give_up - time.monotonic()) > 0 and not all(map(speechless, silent())):
            self.hear(min(left, TICK))  # an answer ends it at once
        for member in silent() if insist else ():
            if member.node is None and not processes.is_stopped(member.pid):
                _ask_without_lock(member)
        if any(member.sample is None for member in members):
            return None
        return [(member.pid, member.sample) for member in members]

    def dump(self, member: Member) -> list[tuple[int, str]]:
        """See `latecomers.Dump`. Only processes that have the fault handler answer: a rank's forks have its own."""
        path = self._fault_file(member)
        pids = [member.pid] if member.sample is None else []
        found: list[tuple[int, str]] = []
        for pid in [*pids, *processes.descendants(member.pid)][:DUMPED]:
            if (
                FAULT_SIGNAL is None
                or path not in processes.open_files(pid)
                or not processes.catches(pid, FAULT_SIGNAL)
            ):
                continue  # another program, which may understand the signal in its own way
            before = leftovers.size_of(path)
            processes.signal_main_thread(pid, FAULT_SIGNAL)
            give_up = time.monotonic() + DUMP_SECONDS
            while time.monotonic() < give_up and leftovers.size_of(path) == before:
                self.hear(0.02)
            self.hear(0.02)
            found.append((pid, leftovers.text_of(path, before)))
            self.dumped[member.pid] = leftovers.size_of(path)
        return found

    def fault(self, member: Member) -> str:
        """What the fault handler has written of a crash."""
        return leftovers.text_of(self._fault_file(member), self.dumped.get(member.pid, 0))

    def _fault_file(self, member: Member) -> str:
        return os.path.join(self.directory, f"fault-{member.pid}")

    def _moved(self) -> None:
        self.run.last_word = time.monotonic()

    def _member(self, channel: Channel) -> Member | None:
        return next((one for one in self.run.members if one.channel is channel), None)

    # What the ranks say ----------------------------------------------------------------------------------------

    def _welcome(self) -> None:
        with contextlib.suppress(OSError):
            sock, _ = self.door.accept()
            sock.setblocking(True)
            channel = Channel(sock)
            self.selector.register(channel, selectors.EVENT_READ, lambda: self._hear(channel))
            self._moved()

    def _hear_output(self, pipe: OutputPipe) -> None:
        data = pipe.read()
        if data is None:
            self.pipes.remove(pipe)
            self.selector.unregister(pipe.descriptor)
            os.close(pipe.descriptor)
        elif data:
            self._moved()
            limit = self.job.output_limit
            if not limit or pipe.member.printed <= limit + len(data):
                self.tell(messages.Output(pipe.member.rank or 0, pipe.stream, pipe.text(data)), b"")

    def _hear(self, channel: Channel) -> None:
        if channel.fileno() < 0:
            return
        try:
            received = channel.receive()
        except ChannelError:
            received = None
        if received is None:
            self.selector.unregister(channel)
            channel.close()
            return
        for message, blob in received:
            with contextlib.suppress(ValueError):
                self._take_from(channel, read(messages.FromRank, whole(message)), blob)
        member, limit = self._member(channel), self.job.report_limit
        if member is not None and not member.done:
            told = 0 if self.job.watch_replicas else channel.header_bytes - member.observed_headers
            member.says_too_much |= told > MAX_TOLD and told > channel.messages * USUAL_MESSAGE
            member.says_too_much |= limit is not None and channel.received > limit
        else:
            most = limit if member is not None or channel is self.fork_server else MAX_INTRODUCTION
            if most is not None and channel.received > most:  # nobody waits for the end of what it says
                self.selector.unregister(channel)
                channel.close()

    def _take_from(self, channel: Channel, message: Any, blob: bytes) -> None:
        if isinstance(message, messages.Hello):
            self._admit(channel, message)
        elif channel is self.fork_server:
            if isinstance(message, messages.ChildEnded):
                self.statuses[message.pid] = message.code
        elif (member := self._member(channel)) is not None:
            self.take(member, message, blob)

    def _admit(self, channel: Channel, hello: messages.Hello) -> None:
        """Let a process in. Who it is, is asked of the system where that can be: a rank may only be itself."""
        pid = _peer(channel.socket) or hello.pid
        if hello.role is Role.RANK:
            member = next((one for one in self.run.ranks if one.pid == pid and one.channel is None), None)
            if member is None:
                return
            member.channel = channel
            rank = member.rank or 0
            kwargs, blob = self.arguments[rank % len(self.arguments)]
            channel.send(messages.Go(self.job, self.environment(rank), kwargs), blob)
        elif self.job.launcher and hello.role is Role.FORK_SERVER and self.fork_server is None:
            self.fork_server = channel
        elif self.job.launcher and hello.role is Role.WORKER:
            self.run.members.append(Member(Role.WORKER, hello.rank, pid, channel))

    def take(self, member: Member, message: Any, blob: bytes) -> None:
        """What a rank has said, here or on another node."""
        if isinstance(message, messages.Sample):
            member.sample = message.stack if message.id == self.asked else member.sample
            return
        if isinstance(message, messages.Watcher):
            member.watcher = message.thread
            return
        self._moved()
        if member.outcome is Outcome.HUNG:  # its peers are ended first, so that its call fails, and its code goes on
            return
        if self.leaving and isinstance(message, (messages.Returned, messages.Raised, messages.Exit)):
            return
        match message:
            case _ if isinstance(message, messages.Event) and not member.says_too_much:
                member.events.append(message)
                if isinstance(message, messages.Begin):
                    member.operations += 1
                    member.last, member.last_at = message, time.monotonic()
                    member.reached[line_of(message, member.rank)] = message.group_number
                    member.accelerated |= message.device not in ("", "cpu", "meta")
                self.relay(member.rank or 0, message)
            case messages.Replica() | messages.NotFinite() if member.rank is not None and self.job.watch_replicas:
                self.comparison.take(member.rank, message)
                self.relay(member.rank, message)
            case messages.IsRank():
                if member.role is Role.WORKER:
                    member.rank = message.rank
            case messages.Observe(name, value):
                if self._has_room(member, (name, value), blob):
                    self.tell(messages.Observed(self.run.members.index(member), name, value), blob)
            case messages.Show(value):
                if self._has_room(member, value, blob):
                    self.tell(messages.Shown(self.run.members.index(member), value), blob)
                    self._answer(member)
            case messages.Returned():
                self.end(member, Outcome.RETURNED, 0)
            case messages.Raised():
                member.error = leftovers.cut(message)
                self.end(member, Outcome.RAISED, 1)
            case messages.Exit():
                member.frames = leftovers.frames(message.frames)
                member.error = (
                    leftovers.cut(messages.Raised("", message.message, message.frames)) if message.message else None
                )
                member.because = leftovers.cut(message.because) if message.because else None
                self.end(member, Outcome.EXITED, message.code)

    def _has_room(self, member: Member, value: Any, blob: bytes) -> bool:
        """Count what a member tells of itself: true as long as that is not too much."""
        text = len(str(value))
        member.observed_headers += text
        member.observed += len(blob) + NUMBERS_IN_MEMORY * text
        member.says_too_much |= member.observed > (self.job.report_limit or MAX_OBSERVED)
        return not member.says_too_much

    def _answer(self, member: Member) -> None:
        """Give a member the number that is due after what it has shown."""
        number = drawn(self.secret, member.rank or 0, member.shown)
        member.shown += 1
        if member.channel is not None:
            with contextlib.suppress(OSError):
                member.channel.send(messages.Drawn(number))

    def end(self, member: Member, outcome: Outcome, code: int | None) -> None:
        """Note how a member's code has ended, the first time that this is said."""
        if member.outcome is not None:
            return
        member.outcome, member.code, member.ended = outcome, code, self.run.elapsed()
        self.relay(member.rank or 0, messages.Ended(outcome, code))
        fine = outcome is Outcome.RETURNED or (outcome is Outcome.EXITED and code == 0 and not self.job.is_function)
        if not fine and member.role is Role.RANK and self.run.failed_at is None:
            self.run.failed_at = time.monotonic()

    def look_at_ends(self) -> None:
        processes.reap(self.statuses)
        for member in self.run.members:
            if member.gone:
                continue
            if member.pid not in self.statuses and (member.role is Role.RANK or self._fork_server_knows(member)):
                continue
            code = self.statuses.get(member.pid)
            member.gone = True
            self.drain(member)
            if member.outcome is None:
                self.end(member, self._outcome(code), code)
            elif member.outcome is Outcome.RETURNED:
                member.code = code
            self._moved()

    def _outcome(self, code: int | None) -> Outcome:
        """What the exit code of a process means that has said nothing of its end."""
        if code == -signal.SIGKILL and processes.memory_kills() > self.run.memory_kills:
            return Outcome.OUT_OF_MEMORY
        return Outcome.CRASHED if code is not None and code < 0 else Outcome.EXITED

    def _fork_server_knows(self, member: Member) -> bool:
        """Whether the fork server will still tell how this worker ended; without it, a worker that is gone is just gone."""
        return (self.fork_server is not None and self.fork_server.fileno() >= 0) or os.path.exists(
            f"/proc/{member.pid}"
        )

    def drain(self, member: Member) -> None:
        """Take what a process said before it went; its last words may still be on the way."""
        channel = member.channel
        if channel is not None and channel.fileno() >= 0:
            channel.socket.setblocking(False)
            while channel.fileno() >= 0 and select.select([channel], [], [], 0)[0]:
                self._hear(channel)
        for pipe in [one for one in self.pipes if one.member is member]:
            self._hear_output(pipe)

    def say_leave(self) -> None:
        for member in self.run.members:
            if member.channel is not None and not member.gone:
                with contextlib.suppress(OSError):
                    member.channel.send(messages.Leave())


def _peer(sock: socket.socket) -> int:
    """The process at the other end of a local socket; 0 where the system does not tell."""
    if not hasattr(socket, "SO_PEERCRED"):
        return 0
    pid, _, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(pid)


def _ask_without_lock(member: Member) -> None:
    """A thread that holds the interpreter lock keeps the listener from answering; a signal handler needs no lock."""
    if FAULT_SIGNAL is not None and processes.catches(member.pid, FAULT_SIGNAL):
        processes.signal_main_thread(member.pid, FAULT_SIGNAL)
