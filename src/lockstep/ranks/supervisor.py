"""One run: starts the ranks, watches them, decides how each ended, and leaves nothing behind.

Theory of operation. The client (a notebook, a check, the command line) holds one end of a socket, this process the
other. Every rank is a child of this process and speaks to it over a socket of its own; what a rank says is data about
itself and never a verdict. This process runs no learner's code. It is the subreaper of its ranks, so that whatever they
detach comes back to it.

- A rank ends a run badly when it raises, leaves with a status, is killed or breaks a limit. The others get a short
  grace to tell their own story, and are then stopped.
- A hang is found, not waited for: see `stillness`.
- Deadlines stand behind that for everything else: processor time for loops, stillness for sleepers, wall time for all.
- When the client goes away, or this process is told to go (SIGTERM), the run ends. When it is killed, the kernel kills
  its ranks, and the server, a subreaper too, ends what they had detached and removes the run's folder. A folder whose
  server was killed as well is removed by the next server: the lock on it is free.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
from typing import Any

from . import leavings, network, processes
from .channel import Channel, ChannelError, whole
from .comparison import Comparison
from .folder import make_folder, remove_run_folder
from .job import Job
from .limits import THREADS, Limits
from .member import Member
from .output import Printer
from .stillness import TICK, Stillness

GRACE = 0.8
NUMBERS_IN_MEMORY = 16
"""How much larger numbers and lists are in memory than as text."""
MAX_TOLD = 64 << 20
USUAL_MESSAGE = 4 << 10
"""Bytes. A rank may tell of any number of collectives, but not of any number of books."""
ALIVE_SECONDS = 1.0
WORK = "work"


class Supervisor:
    """Carries out one job for one client."""

    def __init__(self, client: Channel) -> None:
        self.client = client
        self.selector = selectors.DefaultSelector()
        self.members: list[Member] = []
        self.ranks: list[Member] = []
        self.nursery: Channel | None = None
        self.statuses: dict[int, int] = {}
        self.orders: list[tuple[Any, bytes]] = []
        """The target's arguments: the same for all ranks, or each rank's own."""
        self.reason = ""
        self.directory = ""
        self.store: Any = None
        self.network = network.Network()
        self.began = time.monotonic()
        self.last_word = self.began
        self.said_alive = 0.0
        self.failed_at: float | None = None
        self.still = Stillness(self)
        self.limits = Limits(self)

    # The course of a run ---------------------------------------------------------------------------------------

    def carry_out(self, fork: bool) -> None:
        """Receive the job, do it, report."""
        order = self.client.wait()
        if order is None:
            return
        message, _ = order
        self.job = Job(**message["job"])
        self.comparison = Comparison(self.job.world_size)
        try:
            self.network = network.enter(self.job.network, self.job)
        except network.NotRun as missing:
            self.tell({"event": "not run", "why": str(missing)})
            return
        processes.close_to_others(True)
        processes.adopt_orphans()
        if self.job.process_limit:
            processes.limit_threads_in_sandbox(THREADS)
        signal.signal(signal.SIGTERM, lambda *_: self._interrupt())
        shared_memory = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
        self.directory = make_folder()
        if not self.job.directory:
            self.job.directory = os.path.join(self.directory, WORK)
            os.mkdir(self.job.directory)
        try:
            self._listen()
            for rank in range(1 if self.job.launcher else self.job.world_size):
                self._start(rank, fork)
            self._take_orders(message["orders"])
            self._open_store()
            self.began = self.last_word = time.monotonic()
            self._watch()
        finally:
            self._finish(shared_memory)

    def _take_orders(self, count: int) -> None:
        """Receive what the ranks are given. They have been forked by now: what was here before, each would have in memory."""
        while len(self.orders) < count:
            order = self.client.wait()
            if order is None:
                self.reason = "client gone"
                return
            self.orders.append((order[0]["kwargs"], order[1]))

    def _listen(self) -> None:
        self.door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.door.bind(os.path.join(self.directory, "attach"))
        self.door.listen(128)
        self.door.setblocking(False)
        self.selector.register(self.door, selectors.EVENT_READ, self._welcome)
        self.selector.register(self.client, selectors.EVENT_READ, self._hear_client)

    def _start(self, rank: int, fork: bool) -> None:
        pipes = [os.pipe(), os.pipe()]
        pid = os.fork() if fork else 0
        if fork and not pid:
            self._become_rank(rank, pipes)
        if not fork:
            command = [sys.executable, "-m", "lockstep.ranks.rank", self.directory, str(rank)]
            pid = subprocess.Popen(
                command,
                stdout=pipes[0][1],
                stderr=pipes[1][1],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=functools.partial(self.network.join, rank) if self.job.network else None,
            ).pid
        member = Member("rank", rank, pid)
        self.members.append(member)
        self.ranks.append(member)
        for stream, (read, write) in zip(("stdout", "stderr"), pipes, strict=True):
            os.close(write)
            os.set_blocking(read, False)
            self.selector.register(read, selectors.EVENT_READ, Printer(self, member, stream, read).read)

    def _become_rank(self, rank: int, pipes: list[tuple[int, int]]) -> None:
        try:
            processes.queue_up()
            processes.close_to_others(False)
            processes.die_with_parent()
            os.dup2(pipes[0][1], 1)
            os.dup2(pipes[1][1], 2)
            self.network.join(rank)
            _close_descriptors()
            from . import rank as rank_module

            rank_module.main(self.directory, rank)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(70)

    def _open_store(self) -> None:
        """Host the rendezvous store on a port that the system chooses; torchrun's agent does the same.

        The listening socket is ours, so that nobody reaches the store from outside, and so that torch sees IPv4
        addresses: it looks up the name of every peer, and that of `::ffff:127.0.0.1` is asked of a name server.
        """
        self.port = 0
        if self.job.launcher:
            return
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        with socket.socket() as listening:
            listening.bind((self.network.address, 0))
            listening.listen(1024)
            self.port = listening.getsockname()[1]
            self.store = TCPStore(
                self.network.address, self.port, None, True, timeout=datetime.timedelta(minutes=30),
                wait_for_workers=False, master_listen_fd=listening.detach(),
            )  # fmt: skip

    def _watch(self) -> None:
        while not self.reason and not all(member.done for member in self.ranks):
            self._say_alive()
            self.hear(TICK)
            self._look_at_ends()
            self.limits.look()
            if self.reason:
                continue
            if self.failed_at is not None:
                self.reason = "failed" if self._others_have_spoken() else ""
            elif self.still.look():
                self.reason = "hang"

    def _say_alive(self) -> None:
        """The client hears from here all the time, so that it knows when a rank has stopped or killed this process."""
        now = time.monotonic()
        if now - self.said_alive > ALIVE_SECONDS:
            self.said_alive = now
            self.tell({"event": "alive", "pid": os.getpid()})

    def _others_have_spoken(self) -> bool:
        """After a failure: true when nobody moves any more, or the grace is over."""
        now = time.monotonic()
        waited = now - max(self.failed_at or 0.0, self.last_word)
        return now - (self.failed_at or 0.0) > GRACE or (waited > TICK and self.still.for_now())

    def hear(self, seconds: float) -> None:
        """Take what arrives, from anybody; return after `seconds` if nothing does."""
        for key, _ in self.selector.select(seconds):
            key.data()

    def elapsed(self) -> float:
        """Seconds since the ranks were started."""
        return time.monotonic() - self.began

    def moved(self) -> None:
        """Something arrived, so the run moves."""
        self.last_word = time.monotonic()

    def unfinished(self) -> list[Member]:
        """The processes whose code has not ended."""
        return [member for member in self.members if not member.done]

    # What the ranks say ----------------------------------------------------------------------------------------

    def _welcome(self) -> None:
        with contextlib.suppress(OSError):
            sock, _ = self.door.accept()
            sock.setblocking(True)
            channel = Channel(sock)
            self.selector.register(channel, selectors.EVENT_READ, lambda: self._hear(channel))
            self.moved()

    def _hear(self, channel: Channel) -> None:
        if channel.fileno() < 0:
            return
        try:
            messages = channel.receive()
        except ChannelError:
            messages = None
        if messages is None:
            self.selector.unregister(channel)
            channel.close()
            return
        for message, blob in messages:
            with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError, OverflowError):
                self._take_from(channel, whole(message), blob)
        member = next((one for one in self.members if one.channel is channel), None)
        if member is not None and not member.done:
            told = 0 if self.job.watch_replicas else channel.header_bytes - member.observed_headers
            member.says_too_much |= told > MAX_TOLD and told > channel.messages * USUAL_MESSAGE

    def _take_from(self, channel: Channel, message: dict[str, Any], blob: bytes) -> None:
        if message.get("event") == "hello":
            self._admit(channel, message)
        elif channel is self.nursery:
            self.statuses[int(message["pid"])] = int(message["code"])
        else:
            member = next((one for one in self.members if one.channel is channel), None)
            if member is not None:
                self._take(member, message, blob)

    def _admit(self, channel: Channel, hello: dict[str, Any]) -> None:
        """Let a process in. Who it is, is asked of the system where that can be: a rank may only be itself."""
        pid = _peer(channel.socket) or int(hello["pid"])
        if hello["role"] == "rank":
            member = next((one for one in self.ranks if one.pid == pid and one.channel is None), None)
            if member is None:
                return
            member.channel = channel
            environment = self.job.rank_environment(
                member.rank or 0, self.network.address, self.port, self.network.environment(member.rank or 0)
            )
            kwargs, blob = self.orders[(member.rank or 0) % len(self.orders)]
            channel.send({"do": "go", "job": self.job.to_json(), "environment": environment, "kwargs": kwargs}, blob)
        elif self.job.launcher and hello["role"] == "nursery" and self.nursery is None:
            self.nursery = channel
        elif self.job.launcher and hello["role"] == "worker":
            self.members.append(Member("worker", _integer(hello["rank"]), pid, channel))

    def _take(self, member: Member, message: dict[str, Any], blob: bytes) -> None:
        event = message["event"]
        if event == "sample":
            if message.get("id") == self.still.asked and isinstance(message["stack"], dict):
                member.sample = message["stack"]
            return
        if event == "watcher":
            member.watcher = int(message["thread"])
            return
        self.moved()
        match event:
            case "begin" | "mark" | "end" if not member.says_too_much:
                member.events.append(message)
                member.operations += event == "begin"
            case "replica":
                if member.rank is not None and self.job.watch_replicas:
                    self.comparison.take(member.rank, message)
            case "rank":
                if member.role == "worker":
                    member.rank = int(message["rank"])
            case "observe":
                text = len(str(message["value"]))
                member.observed_headers += text
                member.observed += len(blob) + NUMBERS_IN_MEMORY * text
                member.says_too_much |= member.observed > self.job.observation_limit
                if not member.says_too_much:
                    self.tell(
                        {
                            "event": "observe",
                            "member": self.members.index(member),
                            "name": str(message["name"]),
                            "value": message["value"],
                        },
                        blob,
                    )
            case "returned":
                self.end(member, "returned", 0)
            case "raised":
                member.error = leavings.cut(message)
                self.end(member, "raised", 1)
            case "exit":
                cut = leavings.cut(message)
                member.frames = cut["frames"]
                member.error = cut if cut["message"] else None
                self.end(member, "exited", int(message["code"]))

    def _hear_client(self) -> None:
        messages = self.client.receive()
        if messages is None:
            self.selector.unregister(self.client)
            self.reason = "client gone"
            return
        for message, _ in messages:
            if message.get("do") == "signal":
                for member in self.ranks:
                    if not member.done:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(member.pid, int(message["number"]))
            elif message.get("do") == "stop":
                self._interrupt()

    def _interrupt(self) -> None:
        self.reason = self.reason or "interrupted"

    def tell(self, message: dict[str, Any], blob: bytes = b"") -> None:
        """Say something to the client; when it is gone, the run ends."""
        try:
            self.client.send(message, blob)
        except OSError:
            self.reason = "client gone"

    # How they end ----------------------------------------------------------------------------------------------

    def end(self, member: Member, outcome: str, code: int | None) -> None:
        """Note how a member's code has ended, the first time that this is said."""
        if member.outcome:
            return
        member.outcome, member.code, member.ended = outcome, code, self.elapsed()
        fine = outcome == "returned" or (outcome == "exited" and code == 0 and not self.job.is_function)
        if not fine and member.role == "rank" and self.failed_at is None:
            self.failed_at = time.monotonic()

    def _look_at_ends(self) -> None:
        processes.reap(self.statuses)
        for member in self.members:
            if member.gone:
                continue
            if member.pid not in self.statuses and (member.role == "rank" or self._nursery_knows(member)):
                continue
            code = self.statuses.get(member.pid)
            member.gone = True
            self._drain(member)
            if not member.outcome:
                self.end(member, "crashed" if code is not None and code < 0 else "exited", code)
            elif member.outcome == "returned":
                member.code = code
            self.moved()

    def _nursery_knows(self, member: Member) -> bool:
        """Whether the nursery will still tell how this worker ended; without it, a worker that is gone is just gone."""
        return (self.nursery is not None and self.nursery.fileno() >= 0) or os.path.exists(f"/proc/{member.pid}")

    def _drain(self, member: Member) -> None:
        """Take what a process said before it went; its last words may still be on the way."""
        channel = member.channel
        if channel is not None and channel.fileno() >= 0:
            channel.socket.setblocking(False)
            while channel.fileno() >= 0 and _readable(channel):
                self._hear(channel)
        for key in list(self.selector.get_map().values()):
            printer = getattr(key.data, "__self__", None)
            if isinstance(printer, Printer) and printer.member is member:
                printer.read()

    # The end of it all -----------------------------------------------------------------------------------------

    def _finish(self, shared_memory: set[str]) -> None:
        seconds = self.elapsed()
        orderly = all(member.outcome in ("returned", "exited") for member in self.ranks)
        if orderly and not self.reason:
            self._let_leave()
        if self.reason == "interrupted":
            self.still.ask(self.unfinished())
            for member in self.unfinished():
                member.stop_here("interrupted", self.elapsed())
        left = processes.descendants(os.getpid())
        known = {member.pid for member in self.members}
        mapped = processes.shared_memory_files(left)
        stray = [text for pid in left if pid not in known and (text := _describe_stray(pid))]
        for member in self.ranks:
            if not member.done:
                member.outcome = "stopped"
        immortal = processes.end_all(os.getpid(), self.statuses)
        self.said_alive = 0.0
        self._say_alive()
        if not processes.LINUX:
            for member in self.members:
                with contextlib.suppress(OSError):
                    os.killpg(member.pid, signal.SIGKILL)
        for member in self.members:
            self._drain(member)
        self.store = None
        faults = {
            pid: leavings.text_of(os.path.join(self.directory, f"fault-{pid}")) for pid in (m.pid for m in self.members)
        }
        temporary: list[str] = []
        with contextlib.suppress(OSError):  # A rank may have removed it.
            temporary = whole(sorted(os.listdir(os.path.join(self.directory, "tmp")))[: leavings.LISTED])
        temporary += whole(leavings.files(os.path.join(self.directory, WORK)))
        remove_run_folder(self.directory)
        for path in mapped:
            if os.path.basename(path) not in shared_memory:
                with contextlib.suppress(OSError):
                    os.unlink(path)
        self._report(seconds, faults, stray, temporary, immortal)

    def _let_leave(self) -> None:
        """Give the ranks leave to go, and a moment for what they clean up themselves."""
        for member in self.members:
            if member.channel is not None and not member.gone:
                with contextlib.suppress(OSError):
                    member.channel.send({"do": "leave"})
        patience = time.monotonic() + 1.0
        while time.monotonic() < patience and not all(member.gone for member in self.ranks):
            self.hear(0.005)
            self._look_at_ends()

    def _send_events(self, index: int, events: list[dict[str, Any]]) -> None:
        try:
            self.client.send({"event": "events", "member": index, "events": events})
        except ChannelError:  # too large for one message, or, alone, for any
            middle = len(events) // 2
            for part in (events[:middle], events[middle:]) if middle else ():
                self._send_events(index, part)

    def _report(
        self, seconds: float, faults: dict[int, str], stray: list[str], temporary: list[str], immortal: list[int]
    ) -> None:
        with contextlib.suppress(OSError):
            for index, member in enumerate(self.members):
                events = list(member.events)
                for at in range(0, len(events), 2000):
                    self._send_events(index, events[at : at + 2000])
            self.client.send({
                "event": "end",
                "reason": self.reason,
                "seconds": seconds,
                "began": self.began,
                "still": self.still.found_after,
                "stray": stray[:20],
                "temporary": temporary,
                "immortal": immortal,
                "replicas": self.comparison.to_json(),
                "members": [member.report(faults[member.pid]) for member in self.members],
            })  # fmt: skip


def _peer(sock: socket.socket) -> int:
    """The process at the other end of a local socket; 0 where the system does not tell."""
    if not hasattr(socket, "SO_PEERCRED"):
        return 0
    pid, _, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(pid)


def _integer(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def _readable(channel: Channel) -> bool:
    return bool(select.select([channel], [], [], 0)[0])


def _describe_stray(pid: int) -> str:
    """`pid command line` of a process that a rank left behind; empty for the runtime's own helpers."""
    if processes.is_helper(pid) or processes.is_janitor(pid):
        return ""
    command = processes.command_line(pid)
    return f"{pid} {command}" if command else ""


def _close_descriptors() -> None:
    """Close whatever a freshly forked rank has of its supervisor's: sockets, other ranks' pipes."""
    for name in os.listdir("/proc/self/fd" if processes.LINUX else "/dev/fd"):
        if int(name) > 2:
            with contextlib.suppress(OSError):
                os.close(int(name))


def serve(sock: socket.socket, fork: bool) -> None:
    """Be the supervisor of the run that the client at the other end of `sock` orders."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    processes.close_to_others(False)  # until its network is made
    Supervisor(Channel(sock)).carry_out(fork)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), fork=False)
    os._exit(0)  # All is reported; the interpreter's own ending, with torch in it, takes its time.
