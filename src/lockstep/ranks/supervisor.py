"""One run: starts the ranks, watches them, decides how each ended, and leaves nothing behind.

Theory of operation. The client (whatever called `run`) holds one end of a socket, this process the
other. Every rank is a child of this process and speaks to it over a socket of its own; what a rank says is data about
itself and never a verdict. This process runs no user's code. It is the subreaper of its ranks, so that whatever they
detach comes back to it.

- A rank ends a run badly when it raises, leaves with a status, is killed or breaks a limit. The others get a short
  grace to tell their own story, and are then stopped.
- A hang is found, not waited for: see `hang_detector`.
- Deadlines stand behind that for everything else: processor time for loops, stillness for sleepers, wall time for all.
- Ranks that are stopped are killed, after a signal and the job's grace when it has one: their handlers run as under torchrun.
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

from . import leftovers, meeting, network, processes, wire
from .channel import Channel, ChannelError, whole
from .comparison import Comparison
from .draws import drawn
from .folder import make_folder, remove_run_folder
from .hang_detector import TICK, Hang, HangDetector, Stacks
from .job import Job, Meeting
from .latecomers import Latecomers
from .limits import THREADS, Break, Decision, EndAll, Kill, Limits, UsedUp
from .member import Member, RunState, line_of
from .messages import (
    Alive,
    Arguments,
    Ask,
    Begin,
    ChildEnded,
    Drawn,
    End,
    Ended,
    Events,
    Exit,
    Explained,
    Finished,
    FromRank,
    Go,
    Hello,
    IsRank,
    Leave,
    MadeGroup,
    Mark,
    NotFinite,
    Notice,
    Observe,
    Observed,
    Order,
    Output,
    Raised,
    Refused,
    Replica,
    Returned,
    Role,
    Sample,
    Show,
    Shown,
    Stop,
    ToClient,
    Waited,
    Watcher,
    read,
)  # fmt: skip
from .nodes import LAST_WORDS_SECONDS, NodeZero, OtherNodes
from .output import OutputPipe
from .report import Outcome, RunEnd, Why
from .reporting import FAULT_SIGNAL
from .words import names, one_or_more

GRACE = 0.8
ANSWER_SECONDS = 0.7
NUMBERS_IN_MEMORY = 16
"""How much larger numbers and lists are in memory than as text."""
MAX_TOLD = 64 << 20
USUAL_MESSAGE = 4 << 10
"""Bytes. A rank may tell of any number of collectives, but not of any number of books."""
ALIVE_SECONDS = 1.0
DUMPED = 8
"""Processes of a late rank that are asked for their stack."""
DUMP_SECONDS = 0.3
NOTICE_SECONDS = 1.0
WORK = "work"
ENDED_BY_ITSELF = (Outcome.RETURNED, Outcome.RAISED, Outcome.EXITED, Outcome.CRASHED)


class Supervisor:
    """Carries out one job for one client."""

    def __init__(self, client: Channel, job: Job) -> None:
        self.client, self.job = client, job
        self.run = RunState(job)
        self.selector = selectors.DefaultSelector()
        self.door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.fork_server: Channel | None = None
        self.pipes: list[OutputPipe] = []
        self.statuses: dict[int, int] = {}
        self.arguments: list[tuple[Any, bytes]] = []
        """The target's arguments: the same for all ranks, or each rank's own."""
        self.secret = ""
        self.directory = ""
        self.store: Any = None
        self.listening: socket.socket | None = None
        self.port = 0
        self.network = network.Network()
        self.said_alive = 0.0
        self.asked = 0
        self.stops: list[int] = []
        """The signals by which the client has been told to end the run."""
        self.leaving = False
        """The ranks have been told to go, and what they say of their end is no outcome of the run."""
        self.still_for: float | None = None
        self.comparison = Comparison(job.world_size)
        self.hang_detector = HangDetector(self.run, self.ask)
        self.latecomers = Latecomers(self.run, functools.partial(self.ask, insist=False), self.dump)
        self.dumped: dict[int, int] = {}
        """How much of a member's fault file was written on demand."""
        self.limits = Limits(self.run)
        self.node = 0
        self.hosts: list[str] = []
        """The names of the nodes' machines, where each has its own."""
        self.others: OtherNodes | None = None
        self.node_zero: NodeZero | None = None

    # From start to end -----------------------------------------------------------------------------------------

    def carry_out(self, arguments: int, fork: bool) -> None:
        """Receive the `arguments`, so many, do the job, report."""
        try:
            self.network = network.enter(self.job)
            if self.job.meeting is not None:
                self._take_arguments(arguments)  # the client has nothing else to say from now on
                self._meet(self.job.meeting)
        except network.NotRun as missing:
            self.tell(Refused(str(missing)))
            return
        processes.close_to_others(True)
        processes.adopt_orphans()
        if self.job.process_limit:
            processes.limit_threads_in_sandbox(THREADS)
        signal.signal(signal.SIGTERM, lambda *_: self._end_run(Why.INTERRUPTED))
        shared_memory = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
        self.directory = make_folder()
        if not self.job.directory:
            self.job.directory = os.path.join(self.directory, WORK)
            os.mkdir(self.job.directory)
        try:
            self._listen()
            here = self.job.world_size if self.job.meeting is None else self.job.per_node
            for number in range(1 if self.job.launcher else here):
                self._start(self.node * here + number, fork)
            self._take_arguments(arguments)
            self._open_store()
            self.run.began = self.run.last_word = time.monotonic()
            if self.node_zero is not None:
                self._watch_for(self.node_zero)
            else:
                self._watch()
        finally:
            self._finish(shared_memory)

    def _meet(self, place: Meeting) -> None:
        """Find the other nodes, which are elsewhere. Raises NotRun when they do not come."""
        self.selector.register(self.client, selectors.EVENT_READ, self._hear_client)
        party = meeting.find(self.job, place)
        began, told = time.monotonic(), ""
        try:
            while not party.look():
                self._say_alive()
                self.hear(TICK)
                waited = time.monotonic() - began
                if self.run.end is not None or waited > place.patience:
                    why = f"after {waited:.0f} s" if self.run.end is None else "interrupted"
                    raise network.NotRun(f"{why}: {party.missing()}")
                if isinstance(party, meeting.Host):
                    for said in party.turned_away:
                        self.tell(Notice(said))
                    party.turned_away.clear()
                if waited > NOTICE_SECONDS and told != (now := party.missing()):
                    told = now
                    self.tell(Notice(now))
        except BaseException:
            party.close()
            raise
        self.node = party.node
        if isinstance(party, meeting.Guest):
            assert party.link is not None and party.began is not None
            self.port, self.hosts = party.began.port, party.began.hosts
            self.network = meeting.Between(place.host, party.link)
            self.job.deadline = None  # node 0's
            self.node_zero = NodeZero(party.link, self.selector, self._end_by)
            return
        self._listen_for_store()
        self.hosts = party.start(self.port, socket.gethostname())
        links = [party.links[number] for number in sorted(party.links)]
        self.network = meeting.Between(place.host, links[0])
        self.others = OtherNodes(self.run, links, self.selector, self, self._end_by)

    def _end_by(self, end: RunEnd) -> None:
        """Another node has ended the run."""
        if self.run.end is None:
            self.run.end = end

    def _take_arguments(self, count: int) -> None:
        """Receive what the ranks are given. They have been forked by now: what was here before, each would have in memory."""
        while len(self.arguments) < count:
            given = self.client.wait()
            if given is None:
                self._end_run(Why.CLIENT_GONE)
                return
            arguments: Arguments = read(Arguments, given[0])
            self.arguments.append((arguments.kwargs, given[1]))
            self.secret = arguments.secret or self.secret

    def _end_run(self, why: Why, limit: float = 0.0) -> None:
        """Note why the run ends, the first time; a client that is gone needs no other reason."""
        if self.run.end is None or why is Why.CLIENT_GONE:
            self.run.end = RunEnd(why, limit)

    def _listen(self) -> None:
        self.door.bind(os.path.join(self.directory, "attach"))
        self.door.listen(128)
        self.door.setblocking(False)
        self.selector.register(self.door, selectors.EVENT_READ, self._welcome)
        if self.job.meeting is None:
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
        member = Member(Role.RANK, rank, pid)
        self.run.members.append(member)
        for stream, (readable, writable) in zip(("stdout", "stderr"), pipes, strict=True):
            os.close(writable)
            os.set_blocking(readable, False)
            pipe = OutputPipe(member, stream, readable)
            self.pipes.append(pipe)
            self.selector.register(readable, selectors.EVENT_READ, functools.partial(self._hear_output, pipe))

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
        if self.job.launcher or self.node_zero is not None:
            return
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        listening = self._listen_for_store()
        self.store = TCPStore(
            self.network.address, self.port, None, True, timeout=datetime.timedelta(minutes=30),
            wait_for_workers=False, master_listen_fd=listening.detach(),
        )  # fmt: skip

    def _listen_for_store(self) -> socket.socket:
        """The port is known before the store is there: that has a thread, and no rank is forked from a process with one."""
        if self.listening is None:
            self.listening = socket.create_server(("" if self.job.meeting else self.network.address, 0), backlog=1024)
            self.port = self.listening.getsockname()[1]
        return self.listening

    def _watch(self) -> None:
        run = self.run
        while run.end is None and not all(member.done for member in (*run.ranks, *run.elsewhere)):
            self._say_alive()
            self.hear(TICK)
            if self.others is not None:
                self.others.look()
            self._look_at_ends()
            for decision in self.limits.look(self.hang_detector.seconds()):
                self._decide(decision)
            if run.end is not None:
                continue
            if run.failed_at is None:
                self._end_in(self.hang_detector.look())
                if run.end is None:
                    self._notice(self.latecomers.look())
            elif self._others_have_spoken(run.failed_at):
                self._end_run(Why.FAILED)
        self._notice(self.latecomers.look() if run.end is None else "")

    def _watch_for(self, node_zero: NodeZero) -> None:
        """Watch the ranks of this machine, and tell node 0, until it decides."""
        while self.run.end is None and node_zero.end is None:
            self._say_alive()
            self.hear(TICK)
            self._look_at_ends()
            for decision in self.limits.look(self.hang_detector.seconds()):
                self._decide(decision)
            while node_zero.questions:
                question = node_zero.questions.pop(0)
                asked = [one for one in self.run.ranks if one.rank in question.ranks]
                self.ask(asked, question.insist)
                node_zero.answer(question, asked)
            node_zero.look(self.hang_detector.pulse())
        if node_zero.end is None:  # this node was told to end
            node_zero.send(Stop(self.stops[0] if self.stops else 0))
        elif node_zero.end.why is not Why.ALL_DONE and self.run.end is None:
            self.run.end = RunEnd(node_zero.end.why)
            self.stops = self.stops or [node_zero.end.signal]

    def _notice(self, text: str) -> None:
        if text:
            self.tell(Notice(text))

    def _decide(self, decision: Decision) -> None:
        """Do what a limit asks for."""
        match decision:
            case Break(member, outcome):
                self._break(member, outcome)
            case Kill(pids):
                processes.kill(pids)
            case EndAll():
                processes.end_all(os.getpid(), self.statuses)
                self.run.end = RunEnd(Why.FAILED)
            case UsedUp(end):
                hang = self.hang_detector.look_once_more() if end.why is Why.IDLE else None
                self._end_in(hang) if hang is not None else self._time_out(end)

    def _break(self, member: Member, outcome: Outcome) -> None:
        """End a member that has broken a limit."""
        if not member.done:
            self.ask([member])
        member.stack = member.sample
        self.end(member, outcome, None)
        if member.role is Role.WORKER:  # The launcher is told by its own means, but the limit is the cause.
            self.run.failed_at = self.run.failed_at or time.monotonic()
        processes.kill([member.pid])

    def _time_out(self, end: RunEnd) -> None:
        if self.run.end is not None or self.run.failed_at is not None:
            return
        self._stop_where_they_stand(Outcome.TIMED_OUT)
        self.run.end = end

    def _stop_where_they_stand(self, outcome: Outcome) -> None:
        """Ask those that have not finished where they stand, and end their code there."""
        waiting = self.run.unfinished()
        self.ask(waiting)
        for member in waiting:
            if not member.done:
                member.stop_here(outcome, self.run.elapsed())
                member.stopped = (
                    outcome is Outcome.TIMED_OUT and member.node is None and processes.is_stopped(member.pid)
                )

    def _end_in(self, hang: Hang | None) -> None:
        if hang is not None:
            for member in hang.members:
                member.stop_here(Outcome.HUNG, self.run.elapsed())
            self.still_for = hang.seconds
            self._end_run(Why.HANG)

    def _say_alive(self) -> None:
        """The client hears from here all the time, so that it knows when a rank has stopped or killed this process."""
        now = time.monotonic()
        if now - self.said_alive > ALIVE_SECONDS:
            self.said_alive = now
            self.tell(Alive(os.getpid()))

    def _others_have_spoken(self, failed_at: float) -> bool:
        """After a failure: true when nobody moves any more, or the grace is over."""
        now = time.monotonic()
        waited = now - max(failed_at, self.run.last_word)
        return now - failed_at > GRACE or (waited > TICK and self.hang_detector.for_now())

    def hear(self, seconds: float) -> None:
        """Take what arrives, from anybody; return after `seconds` if nothing does."""
        for key, _ in self.selector.select(seconds):
            key.data()

    def ask(self, members: list[Member], insist: bool = True) -> Stacks | None:
        """Ask where these members stand; see `hang_detector.AskMembers`. Who stays silent is asked by a signal, to `insist`."""
        self.asked += 1
        for member in members:
            member.sample = None
        elsewhere = [member for member in members if member.node is not None]
        if self.others is not None and elsewhere:
            self.others.ask(self.asked, elsewhere, insist)
        for member in members:
            if member.channel is not None:
                with contextlib.suppress(OSError):
                    member.channel.send(Ask(self.asked))

        def silent() -> list[Member]:
            return [one for one in members if one.sample is None and not one.gone and (self.leaving or not one.done)]

        give_up = time.monotonic() + (2 * ANSWER_SECONDS if elsewhere else ANSWER_SECONDS)
        while time.monotonic() < give_up and silent():
            self.hear(0.02)
        for member in silent() if insist else ():
            if member.node is None and not processes.is_stopped(member.pid):
                _ask_without_lock(member)
        if any(member.sample is None for member in members):
            return None
        return [(member.pid, member.sample) for member in members]

    def dump(self, member: Member) -> list[tuple[int, str]]:
        """See `latecomers.Dump`. Only processes that have the fault handler answer: a rank's forks have its own."""
        path = os.path.join(self.directory, f"fault-{member.pid}")
        pids = [member.pid] if member.sample is None else []
        found: list[tuple[int, str]] = []
        for pid in [*pids, *processes.descendants(member.pid)][:DUMPED]:
            if FAULT_SIGNAL is None or not processes.has_open(pid, path) or not processes.catches(pid, FAULT_SIGNAL):
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

    def _moved(self) -> None:
        """Something arrived, so the run moves."""
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
                self.tell(Output(pipe.member.rank or 0, pipe.stream, pipe.text(data)))

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
            with contextlib.suppress(ValueError):
                self._take_from(channel, read(FromRank, whole(message)), blob)
        member = self._member(channel)
        if member is not None and not member.done:
            told = 0 if self.job.watch_replicas else channel.header_bytes - member.observed_headers
            member.says_too_much |= told > MAX_TOLD and told > channel.messages * USUAL_MESSAGE

    def _take_from(self, channel: Channel, message: Any, blob: bytes) -> None:
        if isinstance(message, Hello):
            self._admit(channel, message)
        elif channel is self.fork_server:
            if isinstance(message, ChildEnded):
                self.statuses[message.pid] = message.code
        elif (member := self._member(channel)) is not None:
            self.take(member, message, blob)

    def _admit(self, channel: Channel, hello: Hello) -> None:
        """Let a process in. Who it is, is asked of the system where that can be: a rank may only be itself."""
        pid = _peer(channel.socket) or hello.pid
        if hello.role is Role.RANK:
            member = next((one for one in self.run.ranks if one.pid == pid and one.channel is None), None)
            if member is None:
                return
            member.channel = channel
            rank = member.rank or 0
            environment = self.job.rank_environment(
                rank, self.network.address, self.port, self.network.environment(rank)
            )
            kwargs, blob = self.arguments[rank % len(self.arguments)]
            channel.send(Go(self.job, environment, kwargs), blob)
        elif self.job.launcher and hello.role is Role.FORK_SERVER and self.fork_server is None:
            self.fork_server = channel
        elif self.job.launcher and hello.role is Role.WORKER:
            self.run.members.append(Member(Role.WORKER, hello.rank, pid, channel))

    def take(self, member: Member, message: Any, blob: bytes) -> None:
        """What a rank has said, here or on another node."""
        if isinstance(message, Sample):
            member.sample = message.stack if message.id == self.asked else member.sample
            return
        if isinstance(message, Watcher):
            member.watcher = message.thread
            return
        self._moved()
        if self.leaving and isinstance(message, (Returned, Raised, Exit)):
            return
        match message:
            case Begin() | Mark() | End() | Waited() | MadeGroup() if not member.says_too_much:
                member.events.append(message)
                member.operations += isinstance(message, Begin)
                if isinstance(message, Begin):
                    self._note_call(member, message)
                member.accelerated |= isinstance(message, Begin) and message.device not in ("", "cpu", "meta")
                self._relay(member, message)
            case Replica():
                if member.rank is not None and self.job.watch_replicas:
                    self.comparison.take(member.rank, message)
                    self._relay(member, message)
            case NotFinite():
                if member.rank is not None and self.job.watch_replicas:
                    self.comparison.take_not_finite(member.rank, message)
                    self._relay(member, message)
            case IsRank():
                if member.role is Role.WORKER:
                    member.rank = message.rank
            case Observe(name, value):
                if self._has_room(member, value, blob):
                    self.tell(Observed(self.run.members.index(member), name, value), blob)
            case Show(value):
                if self._has_room(member, value, blob):
                    self.tell(Shown(self.run.members.index(member), value), blob)
                    self._answer(member)
            case Returned():
                self.end(member, Outcome.RETURNED, 0)
            case Raised():
                member.error = leftovers.cut(message)
                self.end(member, Outcome.RAISED, 1)
            case Exit():
                member.frames = leftovers.frames(message.frames)
                member.error = leftovers.cut(Raised("", message.message, message.frames)) if message.message else None
                member.because = leftovers.cut(message.because) if message.because else None
                self.end(member, Outcome.EXITED, message.code)

    def _has_room(self, member: Member, value: Any, blob: bytes) -> bool:
        """Count what a member tells of itself: true as long as that is not too much."""
        text = len(str(value))
        member.observed_headers += text
        member.observed += len(blob) + NUMBERS_IN_MEMORY * text
        member.says_too_much |= member.observed > self.job.observation_limit
        return not member.says_too_much

    def _answer(self, member: Member) -> None:
        """Give a member the number that is due after what it has shown."""
        number = drawn(self.secret, member.rank or 0, member.shown)
        member.shown += 1
        if member.channel is not None:
            with contextlib.suppress(OSError):
                member.channel.send(Drawn(number))

    def _relay(self, member: Member, message: Any) -> None:
        if self.node_zero is not None:
            self.node_zero.relay(member.rank or 0, message)

    def _note_call(self, member: Member, call: Begin) -> None:
        member.last, member.last_at = call, time.monotonic()
        member.reached[line_of(call, member.rank)] = call.group_number

    def _hear_client(self) -> None:
        messages = self.client.receive()
        if messages is None:
            self.selector.unregister(self.client)
            self._end_run(Why.CLIENT_GONE)
        elif messages:  # a client has nothing else to say
            self.stops += [read(Stop, message).signal for message, _ in messages]
            if self.node_zero is not None and len(self.stops) == 1:  # node 0 ends it for all
                self.node_zero.send(Stop(self.stops[0]))
            else:
                self._end_run(Why.INTERRUPTED)

    def tell(self, message: ToClient, blob: bytes = b"") -> None:
        """Say something to the client; when it is gone, the run ends."""
        try:
            self.client.send(message, blob)
        except OSError:
            self._end_run(Why.CLIENT_GONE)

    # How they end ----------------------------------------------------------------------------------------------

    def end(self, member: Member, outcome: Outcome, code: int | None) -> None:
        """Note how a member's code has ended, the first time that this is said."""
        if member.outcome is not None:
            return
        member.outcome, member.code, member.ended = outcome, code, self.run.elapsed()
        self._relay(member, Ended(outcome, code))
        fine = outcome is Outcome.RETURNED or (outcome is Outcome.EXITED and code == 0 and not self.job.is_function)
        if not fine and member.role is Role.RANK and self.run.failed_at is None:
            self.run.failed_at = time.monotonic()

    def _look_at_ends(self) -> None:
        processes.reap(self.statuses)
        for member in self.run.members:
            if member.gone:
                continue
            if member.pid not in self.statuses and (member.role is Role.RANK or self._fork_server_knows(member)):
                continue
            code = self.statuses.get(member.pid)
            member.gone = True
            self._drain(member)
            if member.outcome is None:
                self.end(member, Outcome.CRASHED if code is not None and code < 0 else Outcome.EXITED, code)
            elif member.outcome is Outcome.RETURNED:
                member.code = code
            self._moved()

    def _fork_server_knows(self, member: Member) -> bool:
        """Whether the fork server will still tell how this worker ended; without it, a worker that is gone is just gone."""
        return (self.fork_server is not None and self.fork_server.fileno() >= 0) or os.path.exists(
            f"/proc/{member.pid}"
        )

    def _drain(self, member: Member) -> None:
        """Take what a process said before it went; its last words may still be on the way."""
        channel = member.channel
        if channel is not None and channel.fileno() >= 0:
            channel.socket.setblocking(False)
            while channel.fileno() >= 0 and _readable(channel):
                self._hear(channel)
        for pipe in [one for one in self.pipes if one.member is member]:
            self._hear_output(pipe)

    # The end of it all -----------------------------------------------------------------------------------------

    def _finish(self, shared_memory: set[str]) -> None:
        run, seconds = self.run, self.run.elapsed()
        crossed = self._crossed()  # as long as the ranks' connections are open
        if run.end is not None and run.end.why is Why.INTERRUPTED:
            self._stop_where_they_stand(Outcome.INTERRUPTED)
        if self.others is not None:
            self.others.end(Why.ALL_DONE if run.end is None else run.end.why, self.stops[0] if self.stops else 0)
        if run.end is None and all(member.outcome in (Outcome.RETURNED, Outcome.EXITED) for member in run.ranks):
            self._let_leave()
        left = processes.descendants(os.getpid())
        known = {member.pid for member in run.members}
        mapped = processes.shared_memory_files(left)
        stray = [text for pid in left if pid not in known and (text := _describe_stray(pid))]
        working = [member for member in run.ranks if member.outcome not in ENDED_BY_ITSELF and not member.gone]
        for member in run.ranks:
            if not member.done:
                member.outcome = Outcome.STOPPED
        self._give_grace(working)
        immortal = processes.end_all(os.getpid(), self.statuses)
        self.said_alive = 0.0
        self._say_alive()
        if not processes.LINUX:
            for member in run.members:
                with contextlib.suppress(OSError):
                    os.killpg(member.pid, signal.SIGKILL)
        for member in run.members:
            self._drain(member)
        self.store = None
        faults = {
            member.pid: leftovers.text_of(
                os.path.join(self.directory, f"fault-{member.pid}"), self.dumped.get(member.pid, 0)
            )
            for member in run.members
        }
        temporary: list[str] = []
        with contextlib.suppress(OSError):  # A rank may have removed it.
            temporary = whole(sorted(os.listdir(os.path.join(self.directory, "tmp")))[: leftovers.LISTED])
        temporary += whole(leftovers.files(os.path.join(self.directory, WORK)))
        remove_run_folder(self.directory)
        for path in mapped:
            if os.path.basename(path) not in shared_memory:
                with contextlib.suppress(OSError):
                    os.unlink(path)
        if self.others is not None:
            give_up = time.monotonic() + self.job.grace + LAST_WORDS_SECONDS
            while not self.others.all_finished() and time.monotonic() < give_up and len(self.stops) < 3:
                self.hear(TICK)
                self._say_alive()
                self.others.look()
            stray, temporary = [*stray, *self.others.stray], [*temporary, *self.others.temporary]
        if self.node_zero is not None:
            self.node_zero.finish([one.report(faults[one.pid]) for one in run.members], stray, temporary)
            self._wait_for_explanation(self.node_zero)
        self._report(seconds, faults, stray, temporary, immortal, crossed)

    def _crossed(self) -> list[list[int]] | None:
        """The bytes that have crossed between the ranks, of a job that wants them; in a network of its own they can't be seen."""
        if not self.job.count_bytes or self.job.network is not None:
            return None
        return wire.between([[member.pid, *processes.descendants(member.pid)] for member in self.run.ranks])

    def _wait_for_explanation(self, node_zero: NodeZero) -> None:
        """Until node 0 has said what it has found: when every other node has ended its ranks, too."""
        give_up = time.monotonic() + self.job.grace + 2 * LAST_WORDS_SECONDS
        while not node_zero.gone and node_zero.explained is None and time.monotonic() < give_up and len(self.stops) < 3:
            self.hear(TICK)
            self._say_alive()
            node_zero.look(None)

    def _pass_on_explanation(self, others: OtherNodes) -> None:
        """Tell the other nodes what the client makes of the run."""
        while (said := self.client.wait()) is not None:
            with contextlib.suppress(ValueError):
                others.explained(read(Explained, said[0]))
                return

    def _give_grace(self, working: list[Member]) -> None:
        """Tell these ranks by a signal that they are to end, and give them the job's grace for it, as torchrun does.

        Those whose code had ended leave, so that who waits for them in a collective fails and can end, too. The
        grace is over early when all are gone, when all that are left wait for each other, and when the user asks again.
        """
        end, stops = self.run.end, len(self.stops)
        if not self.job.grace or (end is None and self.run.failed_at is None):
            return
        if end is not None and end.why in (Why.HANG, Why.CLIENT_GONE):
            return
        self.leaving = True
        self._say_leave()
        number = self.stops[0] if self.stops and self.stops[0] else signal.SIGTERM
        for member in working:
            processes.signal_main_thread(member.pid, number)  # in another thread it would not wake the one that sleeps
        began = time.monotonic()
        said = False
        while time.monotonic() < began + self.job.grace and len(self.stops) == stops and end is self.run.end:
            self.hear(TICK)
            self._say_alive()
            self._look_at_ends()
            left = [member for member in self.run.ranks if not member.gone]
            if not left or (self.hang_detector.for_now() and self._all_wait(left)):
                return
            if not said and time.monotonic() > began + NOTICE_SECONDS:
                said = True
                who, name = names(member.rank or 0 for member in left), signal.Signals(number).name
                self.tell(Notice(
                    f"{who.capitalize()} got {name} and {one_or_more(left, 'has', 'have')} {self.job.grace:g} s to end. "
                    "A second Ctrl-C ends the run at once."
                ))  # fmt: skip

    def _all_wait(self, members: list[Member]) -> bool:
        """True when each of these is inside a communication call, where no handler of Python's runs."""
        return self.ask(members) is not None and all(member.sample and member.sample.call for member in members)

    def _say_leave(self) -> None:
        for member in self.run.members:
            if member.channel is not None and not member.gone:
                with contextlib.suppress(OSError):
                    member.channel.send(Leave())

    def _let_leave(self) -> None:
        """Give the ranks leave to go, and a moment for what they clean up themselves."""
        self._say_leave()
        patience = time.monotonic() + 1.0
        while time.monotonic() < patience and not all(member.gone for member in self.run.ranks):
            self.hear(0.005)
            self._look_at_ends()

    def _send_events(self, index: int, events: list[Begin | End | Waited | Mark | MadeGroup]) -> None:
        try:
            self.client.send(Events(index, events))
        except ChannelError:  # too large for one message, or, alone, for any
            middle = len(events) // 2
            for part in (events[:middle], events[middle:]) if middle else ():
                self._send_events(index, part)

    def _report(
        self, seconds: float, faults: dict[int, str], stray: list[str], temporary: list[str], immortal: list[int],
        crossed: list[list[int]] | None,
    ) -> None:  # fmt: skip
        with contextlib.suppress(OSError):
            everyone = [*self.run.members, *self.run.elsewhere]
            for index, member in enumerate(everyone if self.node_zero is None else ()):
                events = list(member.events)
                for at in range(0, len(events), 2000):
                    self._send_events(index, events[at : at + 2000])
            self.client.send(Finished(
                self.run.end or RunEnd(Why.ALL_DONE), seconds, self.run.began, self.still_for, stray[:20], temporary,
                immortal, crossed, self.comparison.found(), [member.report(faults.get(member.pid, "")) for member in everyone],
                self.node, self.hosts, self.node_zero.explained if self.node_zero is not None else None,
            ))  # fmt: skip
            if self.others is not None:
                self._pass_on_explanation(self.others)


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
    client = Channel(sock)
    said = client.wait()
    if said is not None:
        order: Order = read(Order, said[0])
        Supervisor(client, order.job).carry_out(order.arguments, fork)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), fork=False)
    os._exit(0)  # All is reported; the interpreter's own ending, with torch in it, takes its time.
