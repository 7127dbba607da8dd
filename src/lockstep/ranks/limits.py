"""What a run may take at most: memory, processor time, processes, output, wall time; and what becomes of who takes more.

A rank that breaks a limit of its own is ended by it. What the run as a whole has used up ends the run, with the stacks of all
who had not finished. A hang is `stillness`'s; here stands only what is left when it cannot be proved.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from . import processes
from .member import Member
from .stillness import TICK

if TYPE_CHECKING:
    from .supervisor import Supervisor

CROWD_TICK = 0.5
"""Seconds between two looks at all processes: that reads all of /proc."""
MANY_THREADS = 60
"""So many more of them on the machine than at the last look, and the next look comes at once."""
THREADS = 600
"""The kernel's own limit in a sandbox, for a run that has one of processes: more than it may need."""


class Limits:
    """Measures the members of a run against what its job allows."""

    def __init__(self, run: Supervisor) -> None:
        self.run = run
        self.measured = self.counted = 0.0
        self.threads = 0

    def look(self) -> None:
        """Measure, unless that was done only just now; end who has broken a limit."""
        run, job, now = self.run, self.run.job, time.monotonic()
        if now - self.measured < TICK:
            return
        self.measured = now
        for member in run.members:
            if not member.gone:
                self._look_at(member)
        threads = processes.threads() if job.process_limit else 0
        if job.process_limit and (now - self.counted > CROWD_TICK or threads > self.threads + MANY_THREADS):
            self.counted, self.threads = now, threads
            self._look_at_crowd(job.process_limit)
        if job.deadline and run.elapsed() > job.deadline:
            self._time_out(f"deadline {job.deadline:g}")
        elif job.idle_limit and run.still.seconds() > job.idle_limit and run.failed_at is None:
            if run.still.look_once_more():
                run.still.mark()
                run.reason = "hang"
            else:
                self._time_out(f"idle {job.idle_limit:g}")

    def _look_at(self, member: Member) -> None:
        job = self.run.job
        member.peak_memory = max(member.peak_memory, processes.private_memory(member.pid))
        member.cpu = processes.cpu_seconds(member.pid) or member.cpu
        if member.done:
            return
        if job.memory_limit and member.peak_memory > job.memory_limit:
            self._break(member, "out of memory")
        elif member.says_too_much or (job.output_limit and member.printed > job.output_limit):
            self._break(member, "too much output")
        elif job.cpu_limit and member.cpu > job.cpu_limit:
            self._time_out(f"cpu {job.cpu_limit:g}")

    def _look_at_crowd(self, most: int) -> None:
        """All that the ranks have started: how many processes there are, and what those hold that are no ranks."""
        run, job = self.run, self.run.job
        parents = processes.parents()
        everybody = processes.descendants(os.getpid(), parents)
        members = {member.pid for member in run.members}
        started = [pid for pid in everybody if pid not in members]
        if len(everybody) > most:
            # Before anything else: they multiply, and every one takes a share of the processor.
            processes.kill(started)
            self._break(self._busiest(parents), "too many processes")
            processes.end_all(os.getpid(), run.statuses)
            run.reason = "failed"
            return
        busy = sum(map(processes.cpu_seconds, started))
        at_birth = processes.private_memory(os.getpid())  # what a fork shares with us until it writes
        held = sum(max(0, processes.private_memory(pid) - at_birth) for pid in started)
        if job.memory_limit and held > job.memory_limit:
            self._break(self._busiest(parents), "out of memory")
            processes.kill(started)
        elif job.cpu_limit and busy > job.cpu_limit and not job.launcher:  # its processes are its ranks
            self._time_out(f"cpu {job.cpu_limit:g}")

    def _busiest(self, parents: dict[int, int]) -> Member | None:
        """Of those that have not finished, who has started the most."""
        unfinished = self.run.unfinished()
        return max(unfinished, key=lambda member: len(processes.descendants(member.pid, parents)), default=None)

    def _break(self, member: Member | None, outcome: str) -> None:
        run = self.run
        if member is None:
            return
        if not member.done:
            run.still.ask([member])
        member.stack = member.sample
        run.end(member, outcome, None)
        if member.role == "worker":  # The launcher is told by its own means, but the limit is the cause.
            run.failed_at = run.failed_at or time.monotonic()
        processes.kill([member.pid])

    def _time_out(self, why: str) -> None:
        run = self.run
        if run.reason or run.failed_at is not None:
            return
        waiting = run.unfinished()
        run.still.ask(waiting)
        for member in waiting:
            if not member.done:
                member.stop_here("timed out", run.elapsed())
                member.stopped = processes.is_stopped(member.pid)
        run.reason = why
