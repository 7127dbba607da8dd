"""Says, while a run goes on, for whom the others wait: a rank that does something of its own, perhaps for ever.

It is no hang as long as that rank may still come, so the run is left alone. What is known without a question (which calls
each rank has begun, and when) decides whether the ranks are asked where they are.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from . import processes
from .hang_detector import AskMembers
from .member import Member, RunState, counterpart, others
from .messages import Begin, Place
from .places import dumped, held_in, said_of
from .report import Collective, Frame
from .words import at, names, one_or_more

EVERY = 0.5
STARTING = 1.0  # Seconds in which no rank is asked whether it waits in init_process_group already
AGAIN = 4
"""Somebody who waits on is told so after so many times the time of the last word."""
SELDOM = 8.0
"""Seconds between two questions at most and at least: one that leads to nothing is asked again after twice the time."""
MEETING = "init_process_group"
Dump = Callable[[Member], list[tuple[int, str]]]
"""The stacks of a member and of the processes that it has forked, by process id, as Python's fault handler writes them."""


@dataclass(frozen=True)
class Wait:
    """Ranks that wait in one call for others that have not begun it, since `began` by `time.monotonic()`.

    Without a `line`, the call is init_process_group.
    """

    call: str
    line: tuple[object, ...]
    number: int
    late: tuple[Member, ...]
    began: float
    told: bool

    @property
    def is_message(self) -> bool:
        """The other side of a send calls recv."""
        return self.call.startswith(("send", "recv"))

    def came(self) -> list[Member]:
        """The late ones that have begun the call meanwhile."""
        if not self.line:
            return [one for one in self.late if one.met]
        return [one for one in self.late if one.reached.get(self.line, 0) >= self.number]

    def has_ended(self) -> bool:
        """True when the late ones have begun the call, or have ended."""
        return all(one.done or one in self.came() for one in self.late)


class Latecomers:
    """Watches one run for ranks that keep others waiting. It reads the run and changes nothing in it."""

    def __init__(self, run: RunState, ask: AskMembers, dump: Dump) -> None:
        self.run, self.ask, self.dump = run, ask, dump
        self.next = 0.0
        self.pause = EVERY
        self.wait: Wait | None = None
        self.again = 0.0
        """When to say that the wait goes on."""
        self.told: set[tuple[object, ...]] = set()
        self.meeting: float | None = None
        """Since when some ranks are known to wait in init_process_group while others are elsewhere."""

    def look(self) -> str:
        """What to tell the user now; mostly nothing."""
        now, after = time.monotonic(), self.run.job.late_after
        if self.wait is not None:
            return self._look_for_the_end(self.wait, now)
        if after is None or now < self.next:
            return ""
        self.next = now + min(EVERY, after / 2)
        calls = [member for member in self.run.everyone if self._waits_long(member, now - after)]
        if calls:
            said = self._tell(calls, now)
        elif all(_has_slept(member, now - after) for member in self.run.unfinished()):
            said = self._stalled(now)
        else:
            return self._look_at_meeting(now, after)
        if self.wait is None:
            self.pause = min(2 * self.pause, SELDOM)
            self.next = now + self.pause
        return said

    def _look_for_the_end(self, wait: Wait, now: float) -> str:
        if not wait.has_ended():
            return self._still(wait, now)
        self.wait = None
        came = [one.rank or 0 for one in wait.came()]
        if not came or not wait.told:
            return ""  # how a rank ended is told at the end
        did = "answered" if wait.is_message else f"called {wait.call}"
        return f"{names(came).capitalize()} {did} after {now - wait.began:.0f} s: the wait is over."

    def _still(self, wait: Wait, now: float) -> str:
        """That the wait goes on, and where the late ranks are now."""
        if not wait.told or now < self.again:
            return ""
        self.again = wait.began + AGAIN * (now - wait.began)
        late = [one for one in wait.late if not one.done and one not in wait.came()]
        self.ask(late)
        who = names(one.rank or 0 for one in late)
        did = f"answered {wait.call}" if wait.is_message else f"called {wait.call}"
        said = [f"After {now - wait.began:.0f} s, {who} still {one_or_more(late, 'has', 'have')} not {did}."]
        return "\n".join([*said, *(f"  rank {one.rank}{_node(one)} is {self._place(one)}" for one in late)])

    def _look_at_meeting(self, now: float, after: float) -> str:
        """Before the first call: for whom do the others wait in init_process_group?"""
        apart = [one for one in self.run.unfinished() if one.last is None]
        if len(apart) < 2 or self.run.elapsed() < min(after, STARTING):
            self.pause, self.meeting = EVERY, None
            return ""
        self.ask(apart)
        there = [one for one in apart if one.sample is not None and one.sample.call == MEETING]
        late = [one for one in apart if _is_elsewhere(one) and not one.met]
        self.pause = EVERY if there and late else min(2 * self.pause, SELDOM)
        self.next = now + self.pause
        if not there or not late:
            self.meeting = None
            return ""
        self.meeting = now if self.meeting is None else self.meeting
        if now - self.meeting < after:
            return ""
        self.wait = Wait(MEETING, (), 0, tuple(late), self.meeting, told=True)
        self.again = self.meeting + AGAIN * (now - self.meeting)
        frame = there[0].sample.frame if there[0].sample is not None else None
        return self._said(there, late, now - self.meeting, MEETING, frame, [self._place(one) for one in late])

    @staticmethod
    def _said(
        waiting: list[Member], late: list[Member], seconds: float, called: str, frame: Place, where: list[str]
    ) -> str:
        has = one_or_more(waiting, "has", "have")
        return "\n".join([
            f"{names(one.rank or 0 for one in waiting).capitalize()} {has} waited {seconds:.0f} s in {called}"
            f"{at(Frame.of(frame))} for {names(one.rank or 0 for one in late)}. The run goes on.",
            *(f"  rank {one.rank}{_node(one)} is {place}" for one, place in zip(late, where, strict=True)),
        ])  # fmt: skip

    def _waits_long(self, member: Member, since: float) -> bool:
        """True when its latest call was begun before `since`, and a rank that has to make it too has not begun it."""
        return not member.done and member.last is not None and member.last_at < since and bool(self._missing(member))

    def _missing(self, member: Member) -> list[Member]:
        call = member.last
        assert call is not None
        line = counterpart(call, member.rank)
        ranks = others(call, member.rank)
        return [
            one
            for one in self.run.everyone
            if one.rank in ranks and not one.done and one.reached.get(line, 0) < call.group_number
        ]

    def _tell(self, waiting: list[Member], now: float) -> str:
        late = {id(one): one for member in waiting for one in self._missing(member)}
        self.ask([*waiting, *(one for one in late.values() if one not in waiting)])
        first = next(
            (member for member in waiting if _is_in(member) and any(map(_is_elsewhere, self._missing(member)))), None
        )
        if first is None or first.last is None:
            return self._stalled(now)
        call = first.last
        line = counterpart(call, first.rank)
        missing = [one for one in self._missing(first) if _is_elsewhere(one)]
        same = [
            one for one in waiting if _is_in(one) and one.last is not None and counterpart(one.last, one.rank) == line
        ]
        called = _called(first, call)
        where = [self._place(one) for one in missing]
        subject = (call.frame, *sorted(where))
        self.wait = Wait(called, line, call.group_number, tuple(missing), first.last_at, subject not in self.told)
        if subject in self.told:  # A loop comes here again and again: it was said once.
            return ""
        self.told.add(subject)
        self.again = first.last_at + AGAIN * (now - first.last_at)
        return self._said(same, missing, now - first.last_at, called, call.frame, where)

    def _stalled(self, now: float) -> str:
        """That all ranks wait in calls, and that it is no hang only because threads of theirs might free them."""
        apart = self.run.unfinished()
        self.ask(apart)
        active = [one.rank or 0 for one in apart if one.sample is not None and one.sample.threads]
        where = [
            f"rank {one.rank} waits in {_called(one, one.last)}{at(Frame.of(one.last.frame))}"
            for one in apart
            if one.last is not None and _is_in(one)
        ]
        if not active or len(where) < len(apart) or tuple(where) in self.told:
            return ""
        self.told.add(tuple(where))
        since = now - max(one.last_at for one in apart)  # not empty: some are active
        running = one_or_more(active, "A thread of {} still runs", "Threads of {} still run").format(names(active))
        might = f"{running} and might end this, so the run goes on; Ctrl-C ends it."
        return "\n  ".join([f"No rank has made a call for {since:.0f} s. {might}", *where])

    def _place(self, member: Member) -> str:
        """Where a late rank is, by its own word or by the fault handler's, with the processes it has forked."""
        own = Frame.of(member.sample.frame) if member.sample is not None else None
        texts = self.dump(member) if member.node is None else []
        stacks = [
            (pid, dumped(text.rpartition("(most recent call first)")[2])) for pid, text in texts
        ]  # the last of each
        frame = own or next((frame for pid, frame in stacks if pid == member.pid), None)
        held = held_in(member.sample.detail) if member.sample is not None else ""
        said = [(_at(frame) if frame else "in a library's code") + (f": it waits in {held}" if held else "")]
        said += [f"its process {pid} is {_at(frame)}" for pid, frame in stacks if pid != member.pid and frame]
        return "; ".join(said)


def _node(member: Member) -> str:
    return f" on node {member.node}" if member.node is not None else ""


def _at(frame: Frame) -> str:
    return f"at {frame.short}" + (f"   {frame.text}" if frame.text else "")


def _is_in(member: Member) -> bool:
    """True when it is inside its latest call, or waits for it."""
    sample, last = member.sample, member.last
    if sample is None or last is None or not sample.call:
        return False
    return last.number == sample.operation or last.number in sample.pending


def _has_slept(member: Member, since: float) -> bool:
    """True when it has made no call since then, and does not compute now: then it may be asked, at no cost to anybody."""
    asleep = member.node is not None or processes.is_asleep(member.pid)
    return asleep and member.last is not None and member.last_at < since


def _is_elsewhere(member: Member) -> bool:
    """True when it does something other than to communicate, or cannot say what."""
    return member.sample is None or not member.sample.call


def _called(member: Member, call: Begin) -> str:
    """A call of this rank, as its caller knows it."""
    collective = Collective(
        member.rank or 0, call.number, call.kind, call.group, call.group_number, call.nbytes, tuple(call.shape), call.dtype,
        start=0.0, inside=call.inside, of_kind=call.of_kind,
    )  # fmt: skip
    return said_of(collective, member.sample.call if member.sample else "")
