"""One run: starts the ranks, watches them, decides how each ended, and leaves nothing behind.

Theory of operation. The client (a notebook, a check, the command line) holds one end of a socket, this process the
other. Every rank is a child of this process and speaks to it over a socket of its own; what a rank says is data about
itself and never a verdict. This process runs no learner's code. It is the subreaper of its ranks, so that whatever they
detach comes back to it.

- A rank ends a run badly when it raises, leaves with a status, is killed or breaks a limit. The others get a short
  grace to tell their own story, and are then stopped.
- A hang is found, not waited for. While nothing arrives from any rank, the operating system is asked how often each
  thread of each process was given the processor. When all sleep and no count has changed, the ranks are asked where
  they stand; when every one of them is inside a communication call or has finished, and the same again a moment later,
  nothing can move them any more.
- Deadlines stand behind that for everything else: processor time for loops, stillness for sleepers, wall time for all.
- When the client goes away, the run ends. When this process is killed, the kernel kills its ranks, and the server, a
  subreaper too, ends what they had detached.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from . import processes
from .channel import Channel, ChannelError
from .job import Job

TICK = 0.1
GRACE = 0.8
STILL_WITH_THREADS = 5.0
LAUNCHER_STILL = 1.5
ACCELERATOR_STILL = 3.0
KEPT_EVENTS = 50_000
NOT_OK = ("raised", "exited", "crashed", "hung", "timed out", "out of memory", "too much output")


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
    printed: int = 0
    peak_memory: int = 0
    cpu: float = 0.0
    ended: float = 0.0
    gone: bool = False
    sample: dict[str, Any] | None = None
    operations: int = 0

    @property
    def done(self) -> bool:
        """Its code has ended, though the process may still be there."""
        return bool(self.outcome) or self.gone


class Supervisor:
    """Carries out one job for one client."""

    def __init__(self, client: Channel) -> None:
        self.client = client
        self.selector = selectors.DefaultSelector()
        self.members: list[Member] = []
        self.statuses: dict[int, int] = {}
        self.reason = ""
        self.directory = ""
        self.store: Any = None
        self.began = time.monotonic()
        self.last_word = self.began
        self.failed_at: float | None = None
        self.still = Stillness(self)

    # The course of a run ---------------------------------------------------------------------------------------

    def carry_out(self, fork: bool) -> None:
        """Receive the job, do it, report."""
        order = self.client.wait()
        if order is None:
            return
        message, self.blob = order
        self.job = Job(**message["job"])
        self.kwargs = message["kwargs"]
        processes.adopt_orphans()
        self.directory = tempfile.mkdtemp(prefix="lockstep-")
        shared_memory = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
        try:
            os.mkdir(os.path.join(self.directory, "tmp"))
            self._listen()
            self.ranks = [self._start(rank, fork) for rank in range(1 if self.job.launcher else self.job.world_size)]
            self._open_store()
            self.began = self.last_word = time.monotonic()
            self._watch()
        finally:
            self._finish(shared_memory)

    def _listen(self) -> None:
        self.door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.door.bind(os.path.join(self.directory, "attach"))
        self.door.listen(128)
        self.door.setblocking(False)
        self.selector.register(self.door, selectors.EVENT_READ, self._welcome)
        self.selector.register(self.client, selectors.EVENT_READ, self._hear_client)

    def _start(self, rank: int, fork: bool) -> Member:
        pipes = [os.pipe(), os.pipe()]
        pid = os.fork() if fork else 0
        if fork and not pid:
            self._become_rank(rank, pipes)
        if not fork:
            command = [sys.executable, "-m", "lockstep.ranks.rank", self.directory, str(rank)]
            pid = subprocess.Popen(
                command, stdout=pipes[0][1], stderr=pipes[1][1], stdin=subprocess.DEVNULL, start_new_session=True
            ).pid
        member = Member("rank", rank, pid)
        self.members.append(member)
        for stream, (read, write) in zip(("stdout", "stderr"), pipes, strict=True):
            os.close(write)
            os.set_blocking(read, False)
            self.selector.register(read, selectors.EVENT_READ, Printer(self, member, stream, read).read)
        return member

    def _become_rank(self, rank: int, pipes: list[tuple[int, int]]) -> None:
        try:
            os.setsid()
            processes.die_with_parent()
            os.dup2(pipes[0][1], 1)
            os.dup2(pipes[1][1], 2)
            _close_descriptors()
            from . import rank as rank_module

            rank_module.main(self.directory, rank)
        except BaseException:  # noqa: BLE001
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        finally:
            os._exit(70)

    def _open_store(self) -> None:
        """Host the rendezvous store on a port that the system chooses; torchrun's agent does the same."""
        self.port = 0
        if self.job.launcher:
            return
        import datetime

        import torch.distributed as dist

        self.store = dist.TCPStore(
            "127.0.0.1", 0, None, True, timeout=datetime.timedelta(minutes=30), wait_for_workers=False
        )
        self.port = self.store.port

    def _watch(self) -> None:
        while not self.reason and not all(member.done for member in self.ranks):
            for key, _ in self.selector.select(TICK):
                key.data()
            self._look_at_ends()
            self._look_at_limits()
            if not self.reason and self.failed_at is None:
                self.still.look()
            elif self.failed_at is not None and self._others_have_spoken():
                self.reason = self.reason or "failed"

    def _others_have_spoken(self) -> bool:
        """After a failure: true when nobody moves any more, or the grace is over."""
        now = time.monotonic()
        waited = now - max(self.failed_at or 0.0, self.last_word)
        return now - (self.failed_at or 0.0) > GRACE or (waited > TICK and self.still.for_now())

    def elapsed(self) -> float:
        """Seconds since the ranks were started."""
        return time.monotonic() - self.began

    def heard(self) -> None:
        """Something arrived, so the run moves."""
        self.last_word = time.monotonic()

    # What the ranks say ----------------------------------------------------------------------------------------

    def _welcome(self) -> None:
        with contextlib.suppress(OSError):
            sock, _ = self.door.accept()
            sock.setblocking(True)
            channel = Channel(sock)
            self.selector.register(channel, selectors.EVENT_READ, lambda: self._hear(channel))
            self.heard()

    def _hear(self, channel: Channel) -> None:
        try:
            messages = channel.receive()
        except ChannelError:
            messages = None
        if messages is None:
            self.selector.unregister(channel)
            channel.close()
            return
        for message, blob in messages:
            if message.get("event") == "hello":
                self._admit(channel, message)
                continue
            member = next((one for one in self.members if one.channel is channel), None)
            if member is not None:
                with contextlib.suppress(KeyError, TypeError, ValueError):
                    self._take(member, message, blob)

    def _admit(self, channel: Channel, hello: dict[str, Any]) -> None:
        if hello.get("role") == "rank":
            member = next((one for one in self.ranks if one.rank == hello.get("rank") and one.channel is None), None)
            if member is None:
                return
            member.channel = channel
            channel.send({"do": "go", "job": self.job.to_json(), "port": self.port, "kwargs": self.kwargs}, self.blob)
        elif self.job.launcher and isinstance(hello.get("pid"), int):
            self.members.append(Member("worker", hello.get("rank"), hello["pid"], channel))

    def _take(self, member: Member, message: dict[str, Any], blob: bytes) -> None:
        event = message["event"]
        if event == "sample":
            member.sample = message
            return
        if event == "watcher":
            member.watcher = int(message["thread"])
            return
        self.heard()
        match event:
            case "begin" | "mark" | "end":
                member.events.append(message)
                member.operations += event == "begin"
            case "observe":
                member.observed += len(blob) + 64
                if member.observed <= self.job.observation_limit:
                    self.client.send({"event": "observe", "member": self.members.index(member),
                                      "name": message["name"], "value": message["value"]}, blob)
            case "returned":
                self._end(member, "returned", 0)
            case "raised":
                member.error = message
                self._end(member, "raised", 1)
            case "exit":
                member.frames = message.get("frames") or []
                member.error = message if message.get("message") else None
                self._end(member, "exited", int(message["code"]))

    def _hear_client(self) -> None:
        messages = self.client.receive()
        if messages is None:
            self.reason = "client gone"
            return
        for message, _ in messages:
            if message.get("do") == "signal":
                for member in self.ranks:
                    if not member.done:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(member.pid, int(message["number"]))
            elif message.get("do") == "stop":
                self.still.ask([member for member in self.members if not member.done])
                self.reason = "interrupted"

    # How they end ----------------------------------------------------------------------------------------------

    def _end(self, member: Member, outcome: str, code: int | None) -> None:
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
            if member.pid in self.statuses:
                member.code = self.statuses[member.pid]
            elif member.role == "rank" or os.path.exists(f"/proc/{member.pid}"):
                continue
            member.gone = True
            self._drain(member)
            if not member.outcome:
                code = member.code
                self._end(member, "crashed" if code is not None and code < 0 else "exited", code)
            self.heard()

    def _drain(self, member: Member) -> None:
        """Take what a process said before it went; its last words may still be on the way."""
        for key in list(self.selector.get_map().values()):
            if key.fileobj is member.channel:
                member.channel.socket.setblocking(False)
                key.data()
            elif isinstance(getattr(key.data, "__self__", None), Printer) and key.data.__self__.member is member:
                key.data()

    def _look_at_limits(self) -> None:
        now = time.monotonic()
        if now - getattr(self, "_measured", 0.0) < TICK:
            return
        self._measured = now
        job = self.job
        for member in self.members:
            if member.gone:
                continue
            member.peak_memory = max(member.peak_memory, processes.private_memory(member.pid))
            member.cpu = processes.cpu_seconds(member.pid) or member.cpu
            if member.done:
                continue
            if job.memory_limit and member.peak_memory > job.memory_limit:
                self._break(member, "out of memory")
            elif job.output_limit and member.printed > job.output_limit:
                self._break(member, "too much output")
            elif job.cpu_limit and member.cpu > job.cpu_limit:
                self._time_out(f"cpu {job.cpu_limit:g}")
        if job.deadline and self.elapsed() > job.deadline:
            self._time_out(f"deadline {job.deadline:g}")
        elif job.idle_limit and self.still.seconds() > job.idle_limit:
            self._time_out(f"idle {job.idle_limit:g}")

    def _break(self, member: Member, outcome: str) -> None:
        self._end(member, outcome, None)
        processes.kill([member.pid])

    def _time_out(self, why: str) -> None:
        if self.reason or self.failed_at is not None:
            return
        waiting = [member for member in self.members if not member.done]
        self.still.ask(waiting)
        for member in waiting:
            member.stack = (member.sample or {}).get("stack")
            member.outcome, member.ended = "timed out", self.elapsed()
        self.reason = why

    # The end of it all -----------------------------------------------------------------------------------------

    def _finish(self, shared_memory: set[str]) -> None:
        seconds = self.elapsed()
        orderly = all(member.outcome in ("returned", "exited") for member in getattr(self, "ranks", []))
        if orderly and not self.reason:
            self._let_leave()
        if self.reason == "interrupted":
            for member in self.members:
                if not member.done:
                    member.stack, member.outcome = (member.sample or {}).get("stack"), "interrupted"
        left = processes.descendants(os.getpid())
        known = {member.pid for member in self.members}
        mapped = processes.shared_memory_files(left)
        stray = [text for pid in left if pid not in known and (text := _describe_stray(pid))]
        for member in getattr(self, "ranks", []):
            if not member.done:
                member.outcome = "stopped"
        immortal = processes.end_all(os.getpid(), self.statuses)
        if not processes.LINUX:
            for member in self.members:
                with contextlib.suppress(OSError):
                    os.killpg(member.pid, signal.SIGKILL)
        for member in self.members:
            self._drain(member)
        self.store = None
        faults = {member.pid: self._fault(member) for member in self.members}
        temporary = sorted(os.listdir(os.path.join(self.directory, "tmp")))[:50]
        shutil.rmtree(self.directory, ignore_errors=True)
        for path in mapped:
            if os.path.basename(path) not in shared_memory:
                with contextlib.suppress(OSError):
                    os.unlink(path)
        self._tell(seconds, faults, stray, temporary, immortal)

    def _let_leave(self) -> None:
        """Give the ranks leave to go, and a moment for what they clean up themselves."""
        for member in self.members:
            if member.channel is not None and not member.gone:
                with contextlib.suppress(OSError):
                    member.channel.send({"do": "leave"})
        patience = time.monotonic() + 1.0
        while time.monotonic() < patience and not all(member.gone for member in self.ranks):
            for key, _ in self.selector.select(0.005):
                key.data()
            self._look_at_ends()

    def _fault(self, member: Member) -> str:
        with contextlib.suppress(OSError):
            with open(os.path.join(self.directory, f"fault-{member.pid}"), errors="replace") as file:
                return file.read(20_000)
        return ""

    def _tell(self, seconds: float, faults: dict[int, str], stray: list[str], temporary: list[str],
              immortal: list[int]) -> None:
        with contextlib.suppress(OSError):
            for index, member in enumerate(self.members):
                events = list(member.events)
                for at in range(0, len(events), 2000):
                    self.client.send({"event": "events", "member": index, "events": events[at : at + 2000]})
            self.client.send({
                "event": "end",
                "reason": self.reason,
                "seconds": seconds,
                "began": self.began,
                "still": self.still.found_after,
                "stray": stray[:20],
                "temporary": temporary,
                "immortal": immortal,
                "members": [
                    {
                        "role": member.role,
                        "rank": member.rank,
                        "pid": member.pid,
                        "outcome": member.outcome,
                        "code": member.code,
                        "error": member.error,
                        "frames": member.frames,
                        "stack": member.stack,
                        "fault": faults[member.pid],
                        "peak_memory": member.peak_memory,
                        "cpu": member.cpu,
                        "ended": member.ended,
                    }
                    for member in self.members
                ],
            })  # fmt: skip


class Printer:
    """Passes on what one process prints, as text, and counts it."""

    def __init__(self, supervisor: Supervisor, member: Member, stream: str, descriptor: int) -> None:
        self.supervisor, self.member, self.stream, self.descriptor = supervisor, member, stream, descriptor
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def read(self) -> None:
        """Read until the pipe is empty or has ended."""
        while True:
            try:
                data = os.read(self.descriptor, 65536)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                with contextlib.suppress(KeyError, ValueError):
                    self.supervisor.selector.unregister(self.descriptor)
                os.close(self.descriptor)
                return
            self.member.printed += len(data)
            self.supervisor.heard()
            limit = self.supervisor.job.output_limit
            if limit and self.member.printed > limit:
                return
            with contextlib.suppress(OSError):
                self.supervisor.client.send({"event": "output", "rank": self.member.rank or 0, "stream": self.stream,
                                             "text": self.decoder.decode(data)})


class Stillness:
    """Decides whether a run can still move. See the theory of operation above."""

    def __init__(self, supervisor: Supervisor) -> None:
        self.supervisor = supervisor
        self.before: processes.Movement | None = None
        self.since: float | None = None
        self.looked = 0.0
        self.asked = 0
        self.first: list[Any] | None = None
        self.first_at = 0.0
        self.operations: list[int] = []
        self.settled = False
        self.found_after: float | None = None

    def seconds(self) -> float:
        """For how long nothing has moved, as far as is known."""
        return time.monotonic() - self.since if self.since is not None else 0.0

    def look(self) -> None:
        """Observe once, at most every TICK; ends the run when it is found to hang."""
        supervisor = self.supervisor
        now = time.monotonic()
        if now - self.looked < TICK:
            return
        if now - supervisor.last_word < TICK or any(m.channel is None for m in supervisor.ranks):
            self._reset()
            return
        self.looked = now
        still = self._nothing_moves()
        if not still:
            self.first = None if still is False else self.first
            return
        if self.seconds() < 2 * TICK or now - self.first_at < 2 * TICK:
            return
        self._compare(now)

    def for_now(self) -> bool:
        """True when nothing has moved between the last two looks."""
        self._nothing_moves()
        return self.settled and self.seconds() > TICK / 2

    def _reset(self) -> None:
        self.before, self.since, self.first = None, None, None

    def _watched(self) -> list[Member]:
        return [m for m in self.supervisor.members if not m.gone and not (m.role == "rank" and self.supervisor.job.launcher)]

    def _nothing_moves(self) -> bool:
        """Compare with the observation before; keeps `since`, the moment from which nothing has moved."""
        members = self._watched()
        roots = [member.pid for member in members]
        if not self.supervisor.job.launcher:
            roots = processes.descendants(os.getpid())
        now = time.monotonic()
        ignore = {member.watcher for member in self.supervisor.members if member.watcher}
        later = processes.movement(roots, ignore)
        operations = [member.operations for member in self.supervisor.members]
        if later is None or self.supervisor.job.device != "cpu":
            same = self.settled = operations == self.operations
        else:
            same = self.before is not None and self.before.still(later)
            self.settled = same and self.before is not None and self.before.settled(later)
        self.before, self.operations = later, operations
        if not same:
            self.since = None
            self.first = None
            return False
        self.since = self.since if self.since is not None else now
        return True

    def _compare(self, now: float) -> None:
        supervisor = self.supervisor
        waiting = [member for member in supervisor.members if not member.done]
        self.first_at = now
        stacks = self.ask(waiting)
        if stacks is None or not self._all_communicate(waiting):
            self.first = None
            self.first_at = now + 0.3
            return
        if self.first is None or self.first != stacks:
            self.first = stacks
            return
        if self.seconds() < self._needed(waiting) or not self.settled:
            return
        for member in waiting:
            if not (member.role == "rank" and supervisor.job.launcher):
                member.outcome = "hung"
            member.stack = (member.sample or {}).get("stack")
            member.ended = supervisor.elapsed()
        self.found_after = self.seconds()
        supervisor.reason = "hang"

    def _needed(self, waiting: list[Member]) -> float:
        needed = 0.3
        if any((member.sample or {}).get("stack", {}).get("threads") for member in waiting):
            needed = STILL_WITH_THREADS
        if self.supervisor.job.launcher:
            needed = max(needed, LAUNCHER_STILL)
        if self.before is None or self.supervisor.job.device != "cpu":
            needed = max(needed, ACCELERATOR_STILL)
        return needed

    def _all_communicate(self, waiting: list[Member]) -> bool:
        """True when every process whose code has not ended is inside a communication call, and somebody is."""
        ranks = [member for member in waiting if not (member.role == "rank" and self.supervisor.job.launcher)]
        if not ranks:
            return False
        if self.supervisor.job.launcher and not self._launcher_waits():
            return False
        return all((member.sample or {}).get("stack", {}).get("call") for member in ranks)

    def _launcher_waits(self) -> bool:
        stack = (self.supervisor.ranks[0].sample or {}).get("stack") or {}
        return self.supervisor.ranks[0].done or stack.get("innermost") in _LAUNCHER_WAITS

    def ask(self, members: list[Member]) -> list[Any] | None:
        """Ask where these members stand; their answers are kept as `sample`. None when one did not answer."""
        self.asked += 1
        for member in members:
            member.sample = None
            if member.channel is not None:
                with contextlib.suppress(OSError):
                    member.channel.send({"do": "sample", "id": self.asked})
        give_up = time.monotonic() + 0.7
        while time.monotonic() < give_up and any(not (m.sample or m.done) for m in members):
            for key, _ in self.supervisor.selector.select(0.02):
                key.data()
        for member in members:
            if member.sample is None and not member.done:
                self._ask_without_lock(member)
        if any(member.sample is None for member in members):
            return None
        return [(member.pid, member.sample["stack"]) for member in members if member.sample]

    def _ask_without_lock(self, member: Member) -> None:
        """A thread that holds the interpreter lock keeps the listener from answering; a signal handler needs no lock."""
        number = getattr(signal, "SIGRTMAX", None)
        if number is not None and member.channel is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(member.pid, number)


_LAUNCHER_WAITS = ("wait", "join", "select", "poll", "_wait_for_tstate_lock", "sleep", "_recv", "monitor", "_poll", "get")


def _describe_stray(pid: int) -> str:
    """`pid command line` of a process that a rank left behind; empty for the runtime's own helpers."""
    with contextlib.suppress(OSError):
        with open(f"/proc/{pid}/comm") as file:
            if file.read().strip() == processes.HELPER_NAME:
                return ""
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            command = file.read(300).replace(bytes(1), b" ").decode(errors="replace").strip()
            return "" if "resource_tracker" in command else f"{pid} {command}"
    return ""


def _close_descriptors() -> None:
    """Close whatever a freshly forked rank has of its supervisor's: sockets, other ranks' pipes."""
    for name in os.listdir("/proc/self/fd" if processes.LINUX else "/dev/fd"):
        if int(name) > 2:
            with contextlib.suppress(OSError):
                os.close(int(name))


def serve(sock: socket.socket, fork: bool) -> None:
    """Be the supervisor of the run that the client at the other end of `sock` orders."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Supervisor(Channel(sock)).carry_out(fork)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), fork=False)
