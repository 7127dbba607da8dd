"""Decides whether a run can still move: a hang is found, not waited for.

Two kinds of evidence are needed. The operating system says how often each thread was given the processor and how many
bytes each process has moved: nothing has happened for a while. The ranks say where they stand: each is inside a
communication call or has finished, and the same again a moment later. Either alone proves nothing, on a loaded machine
or for somebody who sleeps; both together, with nothing on its way between them, leave nobody who could move the others.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import processes
from .member import Member

if TYPE_CHECKING:
    from .supervisor import Supervisor

TICK = 0.1
LAUNCHER_STILL = 1.0
"""Seconds of stillness that are needed where a launcher polls its workers."""
IN_FLIGHT_STILL = {"": 0.0, "tcp": 2.0, "udp": 11.0}
"""... where bytes lie in a socket's queue (nobody reads them, or the link is slow), or a name server may answer."""
UNPROVEN_STILL = 15.0
"""... where the system does not tell whether a process moves: no /proc, or the work is on an accelerator."""
RENDEZVOUS_SECONDS = 1.5
"""... in a rendezvous, whose host asks its own store for the others again and again, and so never stands still."""
STARVED = 0.2
"""A rank that spent this share of a time in the queue for a processor has not had that time."""
ANSWER_SECONDS = 0.7


class Clock:
    """Since when some processes have not moved."""

    def __init__(self) -> None:
        self.before: processes.Movement | None = None
        self.since: float | None = None
        self.settled = False

    def reset(self) -> None:
        """Something moved."""
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

    stacks: list[Any]
    since: float
    queued: list[float]

    def same(self, later: Rendezvous) -> bool:
        """True when they stand where they stood, and nobody has been kept from getting on."""
        seconds = later.since - self.since
        kept = any(after - before > STARVED * seconds for before, after in zip(self.queued, later.queued, strict=True))
        return self.stacks == later.stacks and not kept


class Stillness:
    """Watches one run for its supervisor."""

    def __init__(self, supervisor: Supervisor) -> None:
        self.supervisor = supervisor
        self.clock = Clock()
        self.everyone = Clock()  # In launcher mode the launcher too, which may poll while its workers hang.
        self.looked = 0.0
        self.asked = 0
        self.stacks: list[Any] | None = None
        self.ask_again = 0.0
        self.operations: list[int] = []
        self.rendezvous: Rendezvous | None = None
        self.found_after: float | None = None

    def seconds(self) -> float:
        """For how long nothing at all has moved in this run, as far as is known."""
        return self.everyone.seconds()

    def look(self) -> bool:
        """Observe, at most once every TICK. True when the run hangs; its members are then marked."""
        supervisor = self.supervisor
        now = time.monotonic()
        if now - self.looked < TICK:
            return False
        if now - supervisor.last_word < TICK or any(member.channel is None for member in supervisor.ranks):
            self._moved()
            return False
        self.looked = now
        if not self._nothing_moves():
            self.stacks = None
            return self._rendezvous_stands(now)
        if self.clock.seconds() < 2 * TICK or now < self.ask_again:
            return False
        self.ask_again = now + 2 * TICK
        waiting = self._waiting()
        stacks = self.ask(supervisor.unfinished())
        if stacks is None or not self._all_communicate(waiting):
            self.stacks = None
            self.ask_again = now + 5 * TICK
            return False
        if self.stacks != stacks:
            self.stacks = stacks
            return False
        if not self.clock.settled or self.clock.seconds() < self._needed(waiting):
            return False
        self.mark(waiting)
        return True

    def _rendezvous_stands(self, now: float) -> bool:
        """True when all wait for each other in a rendezvous, and have had every chance to get on."""
        supervisor = self.supervisor
        if now - supervisor.last_word < RENDEZVOUS_SECONDS or now < self.ask_again:
            return False
        self.ask_again = now + 1.0
        waiting = self._waiting()
        stacks = self.ask(supervisor.unfinished())
        meeting = all((member.sample or {}).get("call") == "init_process_group" for member in waiting)
        if stacks is None or not meeting or not self._all_communicate(waiting) or self._strangers():
            self.rendezvous = None
            return False
        later = Rendezvous(stacks, now, [processes.seconds_in_queue(member.pid) for member in waiting])
        if self.rendezvous is None or not self.rendezvous.same(later):
            self.rendezvous = later
            return False
        if now - self.rendezvous.since < RENDEZVOUS_SECONDS:
            return False
        self.mark(waiting)
        self.found_after = now - self.rendezvous.since
        return True

    def _strangers(self) -> bool:
        """True when there are processes that have not said who they are: ranks on their way, perhaps."""
        known = {member.pid for member in self.supervisor.members}
        found = [pid for pid in processes.descendants(os.getpid()) if pid not in known]
        return any(not processes.is_helper(pid) and not processes.is_janitor(pid) for pid in found)

    def look_once_more(self) -> bool:
        """At the limit for stillness: true when all wait for each other, though a thread of theirs might have moved."""
        waiting = self._waiting()
        return self.ask(self.supervisor.unfinished()) is not None and self._all_communicate(waiting)

    def mark(self, waiting: list[Member] | None = None) -> None:
        """These members hang where they stand."""
        for member in self._waiting() if waiting is None else waiting:
            member.stop_here("hung", self.supervisor.elapsed())
        self.found_after = self.clock.seconds()

    def for_now(self) -> bool:
        """True when nothing has moved between the last two looks."""
        return self._nothing_moves() and self.clock.settled and self.clock.seconds() > TICK / 2

    def _moved(self) -> None:
        self.clock.reset()
        self.everyone.reset()
        self.stacks = None

    def _waiting(self) -> list[Member]:
        """The ranks whose code has not ended: with a launcher its workers, else the ranks themselves."""
        return [member for member in self.supervisor.unfinished() if not self._only_launches(member)]

    def _only_launches(self, member: Member) -> bool:
        """True for a launcher, unless it is a rank as well."""
        return self.supervisor.job.launcher and member.role == "rank" and not member.operations

    def _nothing_moves(self) -> bool:
        supervisor = self.supervisor
        now = time.monotonic()
        everybody = processes.descendants(os.getpid())
        ignore = {member.watcher for member in supervisor.members if member.watcher}
        operations = [member.operations for member in supervisor.members]
        same_operations, self.operations = operations == self.operations, operations
        movement = processes.movement(everybody, ignore)
        if movement is None or supervisor.job.device != "cpu":
            self.everyone.guess(same_operations, now)
            return self.clock.guess(same_operations, now)
        self.everyone.look(movement, now)
        if self._only_launches(supervisor.ranks[0]):
            movement = movement.without(supervisor.ranks[0].pid)
        return self.clock.look(movement, now)

    def _needed(self, waiting: list[Member]) -> float:
        job = self.supervisor.job
        if self.clock.before is None or job.device != "cpu":
            return max(job.patience, UNPROVEN_STILL)
        pids = [member.pid for member in self.supervisor.members if not member.gone]
        needed = max(job.patience, IN_FLIGHT_STILL[processes.in_flight([*pids, os.getpid()])])
        return max(needed, LAUNCHER_STILL) if job.launcher else needed

    def _all_communicate(self, waiting: list[Member]) -> bool:
        """True when every process whose code has not ended is inside a communication call, and somebody is."""
        if self._only_launches(self.supervisor.ranks[0]) and not self._launcher_waits():
            return False
        unable = self.clock.seconds() < (self.supervisor.job.idle_limit or float("inf"))
        for member in waiting:
            stack = member.sample or {}
            if not stack.get("call") or (unable and stack.get("threads")):
                return False
        return bool(waiting)

    def _launcher_waits(self) -> bool:
        """True when the launcher sleeps in a library's function, as those do that wait for processes."""
        launcher = self.supervisor.ranks[0]
        asleep = self.everyone.before is None or launcher.pid not in self.everyone.before.awake
        return launcher.done or (asleep and bool((launcher.sample or {}).get("innermost")))

    def ask(self, members: list[Member]) -> list[Any] | None:
        """Ask where these members stand; their answers are kept as `sample`. None when one did not answer."""
        self.asked += 1
        for member in members:
            member.sample = None
            if member.channel is not None:
                with contextlib.suppress(OSError):
                    member.channel.send({"do": "sample", "id": self.asked})

        def silent() -> list[Member]:
            return [member for member in members if member.sample is None and not member.done]

        give_up = time.monotonic() + ANSWER_SECONDS
        while time.monotonic() < give_up and silent():
            self.supervisor.hear(0.02)
        for member in silent():
            if not processes.is_stopped(member.pid):
                _ask_without_lock(member)
        if any(member.sample is None for member in members):
            return None
        return [(member.pid, member.sample) for member in members]


def _ask_without_lock(member: Member) -> None:
    """A thread that holds the interpreter lock keeps the listener from answering; a signal handler needs no lock."""
    number = getattr(signal, "SIGRTMAX", None)
    if number is not None and processes.catches(member.pid, number):
        with contextlib.suppress(ProcessLookupError):
            os.kill(member.pid, number)
