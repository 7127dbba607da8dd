"""Decides whether a run can still move: a hang is found, not waited for.

Two kinds of evidence are needed. The operating system says how often each thread was given the processor and how many
bytes each process has moved: nothing has happened for a while. The ranks say where they stand: each is inside a
communication call or has finished, and the same again a moment later. Either alone proves nothing, on a loaded machine
or for somebody who sleeps; both together, with nothing on its way between them, leave nobody who could move the others.

Of an accelerator's work the system tells nothing. There it takes the ranks' own proof: each waits for a call that another
has not begun; and a long time, unless they are all in calls that do nothing but wait.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from . import processes
from .job import Job
from .member import Member, RunState, others
from .messages import Begin, Pulse, Role, StackReport

TICK = 0.1
LAUNCHER_STILL = 1.0  # Seconds of stillness that are needed where a launcher polls its workers
IN_FLIGHT_STILL = {"": 0.0, "tcp": 2.0, "udp": 11.0}
"""... where bytes lie in a socket's queue (nobody reads them, or the link is slow), or a name server may answer."""
UNPROVEN_STILL = 15.0
"""... where the system does not tell whether a process moves: no /proc, or the work is on an accelerator."""
DEADLOCK_STILL = 1.0
"""... there too, once each is inside the very call that another has not begun."""
ACCELERATED_PATIENCE = 5.0  # So many times a limit for stillness holds where an accelerator is in use
RENDEZVOUS_SECONDS = 1.5
"""... in a rendezvous, whose host asks its own store for the others again and again, and so never stands still."""
BETWEEN_MACHINES_STILL = 2.0
"""... where ranks are on several machines: what is on its way between two of them, neither shows."""
FRESH_SECONDS = 1.0  # A machine that has not told for so long how still it is may be anything
LONGEST_LIMIT = 60.0
"""A wait that the program itself has limited to so many seconds is no hang before. With more, it is explained like any."""
STARVED = 0.2  # A rank that spent this share of a time in the queue for a processor has not had that time

MEETINGS = ("init_process_group", "monitored_barrier")  # They end when all have come
COMPUTES_TOO = ("backward", "DDP()", "forward")  # The call of a rank that may begin further ones before it waits

Stacks = list[tuple[int, StackReport | None]]  # Where members stand: process id and stack of each
AskMembers = Callable[[list[Member]], Stacks | None]
"""Asks members where they stand, and keeps each answer as `Member.sample`; None when one did not answer."""


class Clock:
    """Since when some processes have not moved."""

    def __init__(self) -> None:
        self.before: processes.Movement | None = None
        self.since: float | None = None
        self.settled = False

    def reset(self) -> None:
        self.before, self.since, self.settled = None, None, False

    def look(self, later: processes.Movement, now: float) -> bool:
        """Compare with the observation before: true when nothing has moved between the two."""
        same = self.before is not None and self.before.still(later)
        self.settled = same and self.before is not None and self.before.settled(later)
        self.before = later
        self.since = (self.since if self.since is not None else now) if same else None
        return same

    def guess(self, same: bool, now: float) -> bool:
        """For where the system does not tell: `same` says that no rank has begun a communication call meanwhile."""
        self.settled = same
        self.since = (self.since if self.since is not None else now) if same else None
        return same

    def seconds(self) -> float:
        """For how long nothing has moved, as far as is known."""
        return time.monotonic() - self.since if self.since is not None else 0.0


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks stood at one moment of a rendezvous, and for how long each had queued for a processor by then."""

    stacks: Stacks
    since: float
    queued: list[float]

    def same(self, later: Rendezvous) -> bool:
        """True when they stand where they stood, and nobody has been kept from getting on."""
        seconds = later.since - self.since
        kept = any(after - before > STARVED * seconds for before, after in zip(self.queued, later.queued, strict=True))
        return self.stacks == later.stacks and not kept


class HangDetector:
    """Watches one run, and decides whether it hangs. It reads the run and changes nothing in it."""

    def __init__(self, run: RunState, ask: AskMembers) -> None:
        self.run, self.job, self.ask = run, run.job, ask
        self.clock = Clock()
        self.everyone = Clock()  # In launcher mode the launcher too, which may poll while its workers hang.
        self.looked = 0.0
        self.stacks: Stacks | None = None
        self.ask_again = 0.0
        self.operations: list[int] = []
        self.rendezvous: Rendezvous | None = None

    def seconds(self) -> float:
        """For how long nothing at all has moved in this run, as far as is known.

        A rank that sleeps while an accelerator works for it looks idle too; there a second counts for less.
        """
        accelerated = any(member.accelerated for member in self.run.members)
        return self.everyone.seconds() / (ACCELERATED_PATIENCE if accelerated else 1.0)

    def still_for(self) -> float:
        """For how long nothing has moved on any machine; 0 when one has not told lately."""
        here, now = self.clock.seconds(), time.monotonic()
        pulses = [self.run.pulses.get(one.node or 0, (0.0, Pulse())) for one in self.run.elsewhere]
        return min([here, *(0.0 if now - at > FRESH_SECONDS else pulse.seconds for at, pulse in pulses)])

    def pulse(self) -> Pulse | None:
        """On a node whose run is watched by another: how still it is here, at most once every TICK."""
        now = time.monotonic()
        if now - self.looked < TICK:
            return None
        self.looked = now
        if now - self.run.last_word < TICK or any(member.channel is None for member in self.run.ranks):
            self.clock.reset()
            self.everyone.reset()
        still = self._nothing_moves()
        meeting = any(not one.operations for one in self.run.members)
        queued = [(one.rank or 0, processes.seconds_in_queue(one.pid)) for one in self.run.members if meeting]
        return Pulse(
            self.clock.seconds() if still else 0.0, still and self.clock.settled, self._needed() if still else 0.0,
            self.clock.before is not None, queued, meeting and self._strangers(),
        )  # fmt: skip

    def look(self) -> list[Member] | None:
        """Observe, at most once every TICK: the hang, when the run hangs."""
        now = time.monotonic()
        if now - self.looked < TICK:
            return None
        if now - self.run.last_word < TICK or any(member.channel is None for member in self.run.ranks):
            self.clock.reset()
            self.everyone.reset()
            self.stacks = None
            return None
        self.looked = now
        if not self._nothing_moves() or (self.run.elsewhere and not self.still_for()):
            self.stacks = None
            return self._look_at_rendezvous(now)
        if self.still_for() < 2 * TICK or now < self.ask_again:
            return None
        self.ask_again = now + 2 * TICK
        stacks = self.ask(self.run.unfinished())
        waiting = self._stuck()
        if stacks is None or not waiting:
            self.stacks = None
            self.ask_again = now + 5 * TICK
            return None
        if self.stacks != stacks:
            self.stacks = stacks
            return None
        pulses = [pulse for _, pulse in self.run.pulses.values()]
        settled = self.clock.settled and all(pulse.settled for pulse in pulses)
        proven = self.clock.before is not None and all(pulse.proven for pulse in pulses)
        if not settled or not (proven or each_waits_for_another(waiting, self.run.everyone)):
            return None
        needed = max([self._needed(), *(pulse.needed for pulse in pulses)])
        if not proven and not self.run.elsewhere and each_waits_for_another(waiting, self.run.everyone, inside=True):
            needed = max(self.job.patience, DEADLOCK_STILL)
        return waiting if self.still_for() >= needed else None

    def _look_at_rendezvous(self, now: float) -> list[Member] | None:
        """The hang, when all wait for each other in a rendezvous and have had every chance to get on."""
        if now - self.run.last_word < RENDEZVOUS_SECONDS or now < self.ask_again:
            return None
        self.ask_again = now + 1.0
        stacks = self.ask(self.run.unfinished())
        waiting = self._waiting()
        meeting = all(member.sample and member.sample.call == "init_process_group" for member in waiting)
        if stacks is None or not meeting or not self._stuck() or self._strangers():
            self.rendezvous = None
            return None
        later = Rendezvous(stacks, now, [self._in_queue(member) for member in waiting])
        if self.rendezvous is None or not self.rendezvous.same(later):
            self.rendezvous = later
            return None
        stood = now - self.rendezvous.since
        return None if stood < RENDEZVOUS_SECONDS else waiting

    def _in_queue(self, member: Member) -> float:
        if member.node is None:
            return processes.seconds_in_queue(member.pid)
        _, pulse = self.run.pulses.get(member.node, (0.0, Pulse()))
        return dict(pulse.queued).get(member.rank or 0, 0.0)

    def _strangers(self) -> bool:
        """True when there are processes that have not said who they are: ranks on their way, perhaps."""
        if any(pulse.strangers for _, pulse in self.run.pulses.values()):
            return True
        known = {member.pid for member in self.run.members}
        found = [pid for pid in processes.descendants(os.getpid()) if pid not in known]
        return any(not processes.is_helper(pid) and not processes.is_janitor(pid) for pid in found)

    def look_once_more(self) -> list[Member] | None:
        """At the limit for stillness: the hang, when all wait for each other, though a thread of theirs might have moved."""
        if self.ask(self.run.unfinished()) is None or not (waiting := self._stuck()):
            return None
        proven = self.clock.before is not None or each_waits_for_another(waiting, self.run.everyone)
        return waiting if proven else None

    def for_now(self) -> bool:
        """True when nothing has moved between the last two looks."""
        return self._nothing_moves() and self.clock.settled and self.still_for() > TICK / 2

    def _waiting(self) -> list[Member]:
        """The ranks whose code has not ended: with a launcher its workers, else the ranks themselves."""
        return [member for member in self.run.unfinished() if not self._only_launches(member)]

    def _only_launches(self, member: Member) -> bool:
        """True for a launcher, unless it is a rank as well."""
        return self.job.launcher and member.role is Role.RANK and not member.operations

    def _nothing_moves(self) -> bool:
        now = time.monotonic()
        everybody = processes.descendants(os.getpid())
        ignore = {member.watcher for member in self.run.members if member.watcher}
        operations = [member.operations for member in self.run.members]
        same_operations, self.operations = operations == self.operations, operations
        movement = processes.movement(everybody, ignore)
        if movement is None:
            self.everyone.guess(same_operations, now)
            return self.clock.guess(same_operations, now)
        self.everyone.look(movement, now)
        if self._accelerated():
            self.clock.before = None
            return self.clock.guess(same_operations, now)
        launcher = self.run.ranks[0]
        return self.clock.look(movement.without(launcher.pid) if self._only_launches(launcher) else movement, now)

    def _accelerated(self) -> bool:
        """True when a rank of this machine computes on an accelerator: it may sleep, and its work go on."""
        for member in self.run.members:
            if self.job.device != "cpu" and not member.accelerated and not member.gone:
                member.accelerated = processes.holds_accelerator(member.pid)
        return any(member.accelerated for member in self.run.members)

    def _needed(self) -> float:
        """For how long nothing may move before it is a hang."""
        job = self.job
        if self.clock.before is None:
            return max(job.patience, UNPROVEN_STILL)
        pids = [member.pid for member in self.run.members if not member.gone]
        patience = job.patience if job.meeting is None else max(job.patience, BETWEEN_MACHINES_STILL)
        needed = max(patience, IN_FLIGHT_STILL[processes.in_flight([*pids, os.getpid()])])
        return max(needed, LAUNCHER_STILL) if job.launcher else needed

    def _stuck(self) -> list[Member]:
        """Those whom nobody can free, when every process whose code has not ended is inside a communication call.

        A wait that the program itself has limited ends, and may free whoever communicates with that rank.
        """
        if self._only_launches(self.run.ranks[0]) and not self._launcher_waits():
            return []
        waiting = self._waiting()
        unable = self.clock.seconds() < (self.job.idle_limit or float("inf"))
        stacks = [member.sample or StackReport() for member in waiting]
        if not all(stack.call and not (unable and stack.threads) for stack in stacks):
            return []
        free = [member for member, stack in zip(waiting, stacks, strict=True) if ends_by_itself(stack, self.job)]
        stuck = [member for member in waiting if member not in free]
        while free and (freed := [member for member in stuck if _communicates_with(member, free)]):
            free = [*free, *freed]
            stuck = [member for member in stuck if member not in freed]
        return stuck

    def _launcher_waits(self) -> bool:
        """True when the launcher sleeps in a library's function, as those do that wait for processes."""
        launcher = self.run.ranks[0]
        asleep = self.everyone.before is None or launcher.pid not in self.everyone.before.awake
        return launcher.done or (asleep and launcher.sample is not None and bool(launcher.sample.innermost))


def ends_by_itself(stack: StackReport, job: Job) -> bool:
    """True for a wait with a limit of the program's own that is soon over: before the run is ended for doing nothing."""
    return 0 < stack.limited <= min(LONGEST_LIMIT, job.idle_limit or LONGEST_LIMIT)


def each_waits_for_another(waiting: list[Member], members: list[Member], *, inside: bool = False) -> bool:
    """True when each of these has an operation open that another member, which belongs to it, has not begun.

    With `inside` it must be the one whose end the rank's main thread waits for, and the call one that only waits: then
    there is nothing left, whatever the accelerators do, that could begin the missing calls.
    """
    begun = {
        member.rank: {_identity(one, member.rank) for one in member.events if isinstance(one, Begin)}
        for member in members
    }
    return all(_waits_for_another(member, begun, inside) for member in waiting)


def _waits_for_another(member: Member, begun: dict[int | None, set[tuple[object, ...]]], inside: bool) -> bool:
    sample = member.sample or StackReport()
    if sample.call in MEETINGS:
        return not inside
    if inside and sample.call in COMPUTES_TOO:
        return False
    open_ = {sample.operation} if inside else {*sample.pending, sample.operation}
    return any(
        _identity(one, member.rank) not in begun.get(other, set())
        for one in member.events
        if isinstance(one, Begin) and one.number in open_
        for other in others(one, member.rank)
    )


def _communicates_with(member: Member, some: list[Member]) -> bool:
    """True unless what the member waits for is known, and none of these belongs to it."""
    sample, ranks = member.sample or StackReport(), {one.rank for one in some}
    open_ = {*sample.pending, sample.operation}
    calls = [others(one, member.rank) for one in member.events if isinstance(one, Begin) and one.number in open_]
    return sample.operation is None or not calls or any(not named or not ranks.isdisjoint(named) for named in calls)


def _identity(call: Begin, rank: int | None) -> tuple[object, ...]:
    """The same for the calls that belong together on different ranks."""
    if call.kind not in ("send", "recv"):
        return call.group, call.group_number, call.kind
    ends = (rank, *others(call, rank))
    return call.group, "message", call.group_number, ends if call.kind == "send" else ends[::-1]
