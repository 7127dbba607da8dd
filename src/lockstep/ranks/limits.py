"""What a run may take at most: memory, processor time, processes, output, wall time; and what becomes of who takes more.

A rank that breaks a limit of its own is ended by it. What the run as a whole has used up ends the run, with the stacks of all
who had not finished. A hang is the `hang_detector`'s; here stands only what is left when it cannot be proved.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

from . import processes
from .hang_detector import TICK
from .member import Member, RunState
from .report import Outcome, RunEnd, Why

CROWD_TICK = 0.5  # Seconds between two looks at all processes: that reads all of /proc
MANY_THREADS = 60  # When the machine has this many threads more than at the last look, the next look comes at once
THREADS = 600  # The kernel's own limit in a sandbox, for a run that has one of processes: more than it may need


@dataclass(frozen=True)
class Break:
    """End this member: it has broken a limit of its own."""

    member: Member
    outcome: Outcome


@dataclass(frozen=True)
class Kill:
    """End these processes, which a rank has started."""

    pids: list[int]


@dataclass(frozen=True)
class EndAll:
    """End every process of the run at once: they multiply."""


@dataclass(frozen=True)
class UsedUp:
    """End the run: it has used up what it had."""

    end: RunEnd


Decision = Break | Kill | EndAll | UsedUp


class Limits:
    """Measures the members of a run against what its job allows."""

    def __init__(self, run: RunState) -> None:
        self.run, self.job = run, run.job
        self.measured = self.counted = 0.0
        self.threads = 0
        self.started = 0.0
        """Processor seconds of what a launcher has started. Each of its ranks may be an interpreter that imports torch, on a
        loaded machine: the run gets twice these seconds more, up to three times its deadline in all.
        """

    def look(self, still_for: float) -> Iterator[Decision]:
        """Measure, unless that was done only just now. Each decision is to be carried out before the next is taken.

        `still_for` is for how many seconds nothing has moved in the run.
        """
        run, job, now = self.run, self.job, time.monotonic()
        if now - self.measured < TICK:
            return
        self.measured = now
        for member in run.members:
            if not member.gone:
                yield from self._look_at(member)
        threads = processes.threads() if job.process_limit else 0
        if job.process_limit and (now - self.counted > CROWD_TICK or threads > self.threads + MANY_THREADS):
            self.counted, self.threads = now, threads
            yield from self._look_at_crowd(job.process_limit)
        if job.deadline and run.elapsed() > job.deadline + 2 * min(self.started, job.deadline):
            yield UsedUp(RunEnd(Why.DEADLINE, job.deadline))
        elif job.idle_limit and still_for > job.idle_limit and run.failed_at is None:
            yield UsedUp(RunEnd(Why.IDLE, job.idle_limit))

    def _look_at(self, member: Member) -> Iterator[Decision]:
        job = self.job
        member.peak_memory = max(member.peak_memory, processes.private_memory(member.pid))
        # What a launcher has waited for are its ranks.
        member.cpu = processes.cpu_seconds(member.pid, alone=job.launcher) or member.cpu
        if member.done:
            return
        if job.memory_limit and member.peak_memory > job.memory_limit:
            yield Break(member, Outcome.OUT_OF_MEMORY)
        elif member.says_too_much or (job.output_limit and member.printed > job.output_limit):
            yield Break(member, Outcome.TOO_MUCH_OUTPUT)
        elif job.cpu_limit and member.cpu > job.cpu_limit:
            yield UsedUp(RunEnd(Why.CPU, job.cpu_limit))

    def _look_at_crowd(self, most: int) -> Iterator[Decision]:
        """All that the ranks have started: how many processes there are, and what those hold that are no ranks."""
        job = self.job
        parents = processes.parents()
        everybody = processes.descendants(os.getpid(), parents)
        members = {member.pid for member in self.run.members}
        started = [pid for pid in everybody if pid not in members]
        if len(everybody) > most:
            # Before anything else: they multiply, and every one takes a share of the processor.
            yield Kill(started)
            yield from self._break_busiest(parents, Outcome.TOO_MANY_PROCESSES)
            yield EndAll()
            return
        busy = sum(map(processes.cpu_seconds, started))
        at_birth = processes.private_memory(os.getpid())  # what a fork shares with us until it writes
        held = sum(max(0, processes.private_memory(pid) - at_birth) for pid in started)
        if job.launcher:
            waited_for = sum(processes.cpu_seconds(pid) - processes.cpu_seconds(pid, alone=True) for pid in members)
            self.started = max(self.started, busy + waited_for)
        if job.memory_limit and held > job.memory_limit:
            yield from self._break_busiest(parents, Outcome.OUT_OF_MEMORY)
            yield Kill(started)
        elif job.cpu_limit and busy > job.cpu_limit and not job.launcher:  # its processes are its ranks
            yield UsedUp(RunEnd(Why.CPU, job.cpu_limit))

    def _break_busiest(self, parents: dict[int, int], outcome: Outcome) -> Iterator[Decision]:
        """Of the members that have not finished, the one that has started the most processes."""
        unfinished = self.run.unfinished()
        if unfinished:
            yield Break(max(unfinished, key=lambda one: len(processes.descendants(one.pid, parents))), outcome)
