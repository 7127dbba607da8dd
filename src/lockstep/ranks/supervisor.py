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
import selectors
import signal
import socket
import subprocess
import sys
import time
import traceback
from typing import Any

from . import leftovers, meeting, messages, network, processes, wire
from .channel import Channel, ChannelError, whole
from .conversation import LAST_ANSWER_SECONDS, Conversation
from .folder import make_folder, remove_run_folder
from .hang_detector import TICK, HangDetector, ends_by_itself
from .job import Job, Meeting
from .latecomers import Latecomers
from .limits import THREADS, Break, Decision, EndAll, Kill, Limits, UsedUp
from .member import Member, RunState
from .messages import Role, read
from .nodes import LAST_WORDS_SECONDS, NodeZero, OtherNodes
from .output import OutputPipe
from .report import Outcome, RunEnd, Why
from .words import names, one_or_more

GRACE = 0.8
ALIVE_SECONDS = 1.0
NOTICE_SECONDS = 1.0
WORK = "work"
ENDED_BY_ITSELF = (Outcome.RETURNED, Outcome.RAISED, Outcome.EXITED, Outcome.CRASHED)


class Supervisor:
    """Carries out one job for one client."""

    def __init__(self, client: Channel, job: Job, niceness: int = 0) -> None:
        self.client, self.job, self.niceness = client, job, niceness
        self.run = RunState(job)
        self.directory = ""
        self.store: Any = None
        self.listening: socket.socket | None = None
        self.port = 0
        self.network = network.Network()
        self.said_alive = 0.0
        self.talk = Conversation(self.run, self.tell)
        self.hang_detector = HangDetector(self.run, self.talk.ask)
        self.latecomers = Latecomers(self.run, functools.partial(self.talk.ask, insist=False), self.talk.dump)
        self.limits = Limits(self.run)
        self.node = 0
        self.hosts: list[str] = []  # The names of the nodes' machines, where each has its own
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
            self._take_arguments(arguments)  # a client that still sends would find us gone, and not hear why
            self.tell(messages.Refused(str(missing)))
            return
        processes.close_to_others(True)
        processes.adopt_orphans()
        if self.job.process_limit:
            processes.limit_threads_in_sandbox(THREADS)
        signal.signal(signal.SIGTERM, lambda *_: self.run.end_by(RunEnd(Why.INTERRUPTED)))
        shared_memory = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
        self.directory = make_folder()
        if not self.job.directory:
            self.job.directory = os.path.join(self.directory, WORK)
            os.mkdir(self.job.directory)
        try:
            self.talk.open(self.directory)
            self.talk.environment = self._environment
            if self.job.meeting is None:
                self.talk.selector.register(self.client, selectors.EVENT_READ, self._hear_client)
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
        self.talk.selector.register(self.client, selectors.EVENT_READ, self._hear_client)
        party = meeting.find(self.job, place)
        meeting.gather(party, self._wait_for_nodes, self._notice)
        self.node = party.node
        if isinstance(party, meeting.Guest):
            assert party.link is not None and party.began is not None
            self.port, self.hosts = party.began.port, party.began.hosts
            self.network = meeting.Between(place.host, party.link)
            self.job.deadline = None  # node 0's
            self.node_zero = NodeZero(self.run, party.link, self.talk)
            return
        self._listen_for_store()
        self.hosts = party.start(self.port, socket.gethostname())
        links = [party.links[number] for number in sorted(party.links)]
        self.network = meeting.Between(place.host, links[0])
        self.others = OtherNodes(self.run, links, self.talk)

    def _wait_for_nodes(self) -> bool:
        """A moment; false when the run has been ended."""
        self._say_alive()
        self.talk.hear(TICK)
        return self.run.end is None

    def _environment(self, rank: int) -> dict[str, str]:
        return self.job.rank_environment(rank, self.network.address, self.port, self.network.environment(rank))

    def _take_arguments(self, count: int) -> None:
        """Receive what the ranks are given. They have been forked by now: what was here before, each would have in memory."""
        while len(self.talk.arguments) < count:
            given = self.client.wait()
            if given is None:
                self.run.end_by(RunEnd(Why.CLIENT_GONE))
                return
            arguments: messages.Arguments = read(messages.Arguments, given[0])
            self.talk.arguments.append((arguments.kwargs, given[1]))
            self.talk.secret = arguments.secret or self.talk.secret

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
            self.talk.read_output(OutputPipe(member, stream, readable))

    def _become_rank(self, rank: int, pipes: list[tuple[int, int]]) -> None:
        try:
            processes.queue_up(self.niceness)
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
            if self.others is not None:
                self.others.look()
            self._look()
            if run.end is not None:
                continue
            if run.failed_at is None:
                self._end_in(self.hang_detector.look())
                if run.end is None:
                    self._notice(self.latecomers.look())
            elif self._others_have_spoken(run.failed_at):
                self._see_where_they_stand()
                self.run.end_by(RunEnd(Why.FAILED))
        self._notice(self.latecomers.look() if run.end is None else "")

    def _watch_for(self, node_zero: NodeZero) -> None:
        """Watch the ranks of this machine, and tell node 0, until it decides."""
        while self.run.end is None and node_zero.end is None:
            self._look()
            node_zero.answer()
            node_zero.look(self.hang_detector.pulse())
        if node_zero.end is None and self.run.end is not None and self.run.end.why is Why.CLIENT_GONE:
            node_zero.link.close()  # who typed the command here was killed: nobody has told this node to end
        elif node_zero.end is None:  # this node was told to end
            node_zero.stop(self.run.signal)
        elif node_zero.end.why is not Why.ALL_DONE and self.run.end is None:
            self.run.end = RunEnd(node_zero.end.why)
            self.run.stops = self.run.stops or [node_zero.end.signal]

    def _look(self) -> None:
        """Hear what is said on this machine, and hold it against the limits."""
        self._say_alive()
        self.talk.hear(TICK)
        self.talk.look_at_ends()
        for decision in self.limits.look(self.hang_detector.seconds()):
            self._decide(decision)

    def _notice(self, text: str) -> None:
        if text:
            self.tell(messages.Notice(text))

    def _decide(self, decision: Decision) -> None:
        match decision:
            case Break(member, outcome):
                self._break(member, outcome)
            case Kill(pids):
                processes.take_the_processor()  # they may be many, and making more
                processes.kill(pids)
            case EndAll():
                processes.end_all(os.getpid(), self.talk.statuses, breeding=True)
                self.run.end = RunEnd(Why.FAILED)
            case UsedUp(end):
                hang = self.hang_detector.look_once_more() if end.why is Why.IDLE else None
                self._end_in(hang) if hang is not None else self._time_out(end)

    def _break(self, member: Member, outcome: Outcome) -> None:
        if not member.done:
            self.talk.ask([member], seconds=LAST_ANSWER_SECONDS)
        member.stack = member.sample
        self.talk.end(member, outcome, None)
        if member.role is Role.WORKER:  # The launcher is told by its own means, but the limit is the cause.
            self.run.failed_at = self.run.failed_at or time.monotonic()
        processes.kill([member.pid])

    def _time_out(self, end: RunEnd) -> None:
        if self.run.end is not None or self.run.failed_at is not None:
            return
        self._stop_where_they_stand(Outcome.TIMED_OUT)
        self.run.end = end

    def _see_where_they_stand(self) -> None:
        """Ask those that have not finished, and let them be."""
        waiting = self.run.unfinished()
        self.talk.ask(waiting, insist=False)
        for member in waiting:
            member.stack = member.sample

    def _stop_where_they_stand(self, outcome: Outcome) -> None:
        """Ask those that have not finished where they stand, and end their code there."""
        waiting = self.run.unfinished()
        self.talk.ask(waiting, seconds=LAST_ANSWER_SECONDS)
        for member in waiting:
            if not member.done:
                member.stop_here(outcome, self.run.elapsed())
                timed_out_here = outcome is Outcome.TIMED_OUT and member.node is None
                member.stopped = timed_out_here and processes.is_stopped(member.pid)

    def _end_in(self, hang: list[Member] | None) -> None:
        if hang is not None:
            for member in hang:
                member.stop_here(Outcome.HUNG, self.run.elapsed())
            self.run.end_by(RunEnd(Why.HANG))

    def _say_alive(self) -> None:
        """The client hears from here all the time, so that it knows when a rank has stopped or killed this process."""
        now = time.monotonic()
        if now - self.said_alive > ALIVE_SECONDS:
            self.said_alive = now
            self.tell(messages.Alive(os.getpid()))

    def _others_have_spoken(self, failed_at: float) -> bool:
        """After a failure: true when nobody moves any more, or the grace is over."""
        now = time.monotonic()
        waited = now - max(failed_at, self.run.last_word)
        return now - failed_at > GRACE or (waited > TICK and self.hang_detector.for_now())

    def _hear_client(self) -> None:
        received = self.client.receive()
        if received is None:
            self.talk.selector.unregister(self.client)
            self.run.end_by(RunEnd(Why.CLIENT_GONE))
        elif received:  # a client has nothing else to say
            self.run.stops += [read(messages.Stop, message).signal for message, _ in received]
            if self.node_zero is not None and len(self.run.stops) == 1:  # node 0 ends it for all
                self.node_zero.stop(self.run.stops[0])
            else:
                self.run.end_by(RunEnd(Why.INTERRUPTED))

    def tell(self, message: messages.ToClient, blob: bytes = b"") -> None:
        """Say something to the client; when it is gone, the run ends."""
        try:
            self.client.send(message, blob)
        except OSError:
            self.run.end_by(RunEnd(Why.CLIENT_GONE))

    # The end of it all -----------------------------------------------------------------------------------------

    def _finish(self, shared_memory: set[str]) -> None:
        run, seconds = self.run, self.run.elapsed()
        crossed = self._crossed()  # as long as the ranks' connections are open
        if run.end is not None and run.end.why is Why.INTERRUPTED:
            self._stop_where_they_stand(Outcome.INTERRUPTED)
        if self.others is not None:
            self.others.end(Why.ALL_DONE if run.end is None else run.end.why, run.signal)
        if run.end is None and all(member.outcome in (Outcome.RETURNED, Outcome.EXITED) for member in run.ranks):
            self._let_leave()
        left = processes.descendants(os.getpid())
        known = {member.pid for member in run.members}
        mapped = processes.shared_memory_files(left)
        stray = [text for pid in left if pid not in known and (text := _describe_stray(pid))]
        working = [member for member in run.ranks if member.outcome not in ENDED_BY_ITSELF and not member.gone]
        for member in run.ranks:
            if not member.done:
                member.outcome, member.ended = Outcome.STOPPED, self.run.elapsed()
        self._give_grace(working)
        immortal = processes.end_all(os.getpid(), self.talk.statuses)
        self.said_alive = 0.0
        self._say_alive()
        if not processes.LINUX:
            for member in run.members:
                with contextlib.suppress(OSError):
                    os.killpg(member.pid, signal.SIGKILL)
        for member in run.members:
            self.talk.drain(member)
        self.store = None
        faults = {member.pid: self.talk.fault(member) for member in run.members}
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
            while not self.others.all_finished() and time.monotonic() < give_up and len(self.run.stops) < 3:
                self.talk.hear(TICK)
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
        known = processes.parents()
        return wire.between([[member.pid, *processes.descendants(member.pid, known)] for member in self.run.ranks])

    def _wait_for_explanation(self, node_zero: NodeZero) -> None:
        """Until node 0 has said what it has found: when every other node has ended its ranks, too."""
        give_up = time.monotonic() + self.job.grace + 2 * LAST_WORDS_SECONDS
        while node_zero.is_expected() and time.monotonic() < give_up and len(self.run.stops) < 3:
            self.talk.hear(TICK)
            self._say_alive()
            node_zero.look(None)

    def _pass_on_explanation(self, others: OtherNodes) -> None:
        """Tell the other nodes what the client makes of the run."""
        while (said := self.client.wait()) is not None:
            with contextlib.suppress(ValueError):
                others.explain(read(messages.Explained, said[0]))
                return

    def _give_grace(self, working: list[Member]) -> None:
        """Tell these ranks by a signal that they are to end, and give them the job's grace for it, as torchrun does.

        Those whose code had ended leave, so that who waits for them in a collective fails and can end, too. The
        grace is over early when all are gone, when all that are left wait for each other, and when the user asks again.
        """
        end, stops = self.run.end, len(self.run.stops)
        if not self.job.grace or (end is None and self.run.failed_at is None):
            return
        if end is not None and end.why in (Why.HANG, Why.CLIENT_GONE):
            return
        self.talk.leaving = True
        self.talk.say_leave()
        number = self.run.signal or signal.SIGTERM
        for member in working:
            processes.signal_main_thread(member.pid, number)  # in another thread it would not wake the one that sleeps
        began = time.monotonic()
        said = False
        while time.monotonic() < began + self.job.grace and len(self.run.stops) == stops and end is self.run.end:
            self.talk.hear(TICK)
            self._say_alive()
            self.talk.look_at_ends()
            left = [member for member in self.run.ranks if not member.gone]
            if not left or (self.hang_detector.for_now() and self._all_wait(left)):
                return
            if not said and time.monotonic() > began + NOTICE_SECONDS:
                said = True
                who, name = names(member.rank or 0 for member in left), signal.Signals(number).name
                self.tell(messages.Notice(
                    f"{who.capitalize()} got {name} and {one_or_more(left, 'has', 'have')} {self.job.grace:g} s to end. "
                    f"{'A second ' if stops else ''}Ctrl-C ends the run at once."
                ))  # fmt: skip

    def _all_wait(self, members: list[Member]) -> bool:
        """True when each of these is inside a communication call, where no handler of Python's runs."""
        return self.talk.ask(members) is not None and all(
            one.sample and one.sample.call and not ends_by_itself(one.sample, self.job) for one in members
        )

    def _let_leave(self) -> None:
        """Give the ranks leave to go, and a moment for what they clean up themselves."""
        self.talk.say_leave()
        patience = time.monotonic() + 1.0
        while time.monotonic() < patience and not all(member.gone for member in self.run.ranks):
            self.talk.hear(0.005)
            self.talk.look_at_ends()

    def _send_events(self, index: int, events: list[messages.Event]) -> None:
        try:
            self.client.send(messages.Events(index, events))
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
            self.client.send(messages.Finished(
                self.run.end or RunEnd(Why.ALL_DONE), seconds, self.run.began, stray[:20], temporary,
                immortal, crossed, self.talk.comparison.found(), [member.report(faults.get(member.pid, "")) for member in everyone],
                self.node, self.hosts, self.node_zero.explained if self.node_zero is not None else None,
            ))  # fmt: skip
            if self.others is not None:
                self._pass_on_explanation(self.others)


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
        order: messages.Order = read(messages.Order, said[0])
        Supervisor(client, order.job, order.niceness).carry_out(order.arguments, fork)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), fork=False)
    os._exit(0)  # All is reported; the interpreter's own ending, with torch in it, takes its time.
