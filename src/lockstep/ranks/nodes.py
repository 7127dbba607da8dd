"""What the supervisors of a run's nodes say to each other, when each node is a machine of its own.

Theory of operation. Every node's supervisor starts, watches and ends its own ranks. Node 0's is told what all others'
ranks do (`Relay`) and how still their machines are (`Pulse`), may ask where they stand (`AskNode`), and alone decides when
the run ends (`EndRun`) and why. A node that falls silent or hangs up ends the run on all others, within seconds. At the
end each node reports how its ranks ended, and node 0 tells them in a line what it has found.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import time
from collections.abc import Callable
from typing import Any

from .channel import ChannelError, whole
from .meeting import SILENT_SECONDS, Link
from .member import Member, RunState
from .messages import (
    Alive,
    AskNode,
    Begin,
    End,
    Ended,
    EndRun,
    Explained,
    FromNode,
    MadeGroup,
    Mark,
    MemberReport,
    NodeFinished,
    Pulse,
    Relay,
    Relayed,
    Role,
    Said,
    Samples,
    Stop,
    ToNode,
    Waited,
    read,
)  # fmt: skip
from .report import Outcome, RunEnd, Why

ALIVE_SECONDS = 1.0
LAST_WORDS_SECONDS = 10.0
"""After all ranks have been ended: how long the other side may take to say so."""


class OtherNodes:
    """On node 0: the other nodes, and their ranks as far as they are known here."""

    def __init__(
        self,
        run: RunState,
        links: list[Link],
        selector: selectors.BaseSelector,
        supervisor: Any,
        end_run: Callable[[RunEnd], None],
    ) -> None:
        self.run, self.links, self.selector, self.supervisor, self.end_run = run, links, selector, supervisor, end_run
        self.finished: set[int] = set()
        self.stray: list[str] = []
        self.temporary: list[str] = []
        self.said_alive = 0.0
        for link in links:
            first = link.node * run.job.per_node
            run.elsewhere += [
                Member(Role.RANK, rank, 0, node=link.node) for rank in range(first, first + run.job.per_node)
            ]
            selector.register(link.channel, selectors.EVENT_READ, lambda link=link: self._hear(link))

    def look(self) -> None:
        """Note who has fallen silent; be heard."""
        now = time.monotonic()
        for link in list(self.links):
            if now - link.heard > SILENT_SECONDS:
                self._lose(link, f"has not answered for {SILENT_SECONDS:.0f} s: its network or its machine is down")
        if now - self.said_alive > ALIVE_SECONDS:
            self.said_alive = now
            self._tell(Alive(os.getpid()))

    def ask(self, number: int, members: list[Member], insist: bool) -> None:
        """Ask where these of their ranks stand; `Samples` will come."""
        for link in self.links:
            if ranks := [one.rank or 0 for one in members if one.node == link.node]:
                self._send(link, AskNode(number, ranks, insist))

    def end(self, why: Why, signal: int) -> None:
        """Have them end their ranks."""
        self._tell(EndRun(why, signal))

    def all_finished(self) -> bool:
        """True when every node that is still there has ended its ranks."""
        return all(link.node in self.finished for link in self.links)

    def explained(self, message: Explained) -> None:
        """The last word."""
        self._tell(message)

    def _tell(self, message: Any) -> None:
        for link in list(self.links):
            self._send(link, message)

    def _send(self, link: Link, message: Any) -> None:
        try:
            link.channel.send(message)
        except OSError:
            self._lose(link, "is gone: its connection has ended")

    def _hear(self, link: Link) -> None:
        if link not in self.links:
            return
        try:
            messages = link.channel.receive()
            if messages is None:
                self._lose(link, "is gone: its connection has ended")
            for raw, _ in messages or ():
                link.heard = time.monotonic()
                self._take(link, read(FromNode, whole(raw)))
        except (ChannelError, ValueError):
            self._lose(link, "has said what no node says")

    def _take(self, link: Link, message: Any) -> None:
        match message:
            case Pulse():
                self.run.pulses[link.node] = (time.monotonic(), message)
            case Relay(said):
                for one in said:
                    if (member := self._member(link, one.rank)) is not None:
                        self._take_said(link, member, one.message)
            case Samples(number, stacks):
                for rank, stack in stacks:
                    member = self._member(link, rank)
                    if member is not None and number == self.supervisor.asked:
                        member.sample = stack
            case Stop(signal):
                self.supervisor.stops.append(signal)
                self.end_run(RunEnd(Why.INTERRUPTED, node=link.name))
            case NodeFinished():
                self.finished.add(link.node)
                self.stray += [f"{link.host}: {text}" for text in message.stray]
                self.temporary += [f"{link.host}: {text}" for text in message.temporary]
                for report in message.members:
                    if report.rank is not None and (member := self._member(link, report.rank)) is not None:
                        member.told = report

    def _take_said(self, link: Link, member: Member, message: Relayed) -> None:
        if isinstance(message, Ended):
            self.supervisor.end(member, message.outcome, message.code)
            self.run.last_word = time.monotonic()
            return
        if isinstance(message, (Begin, End, Waited, Mark, MadeGroup)):
            message.time += link.behind
        if isinstance(message, Waited):
            message.since += link.behind
        self.supervisor.take(member, message, b"")

    def _member(self, link: Link, rank: int) -> Member | None:
        return next((one for one in self.run.elsewhere if one.node == link.node and one.rank == rank), None)

    def _lose(self, link: Link, how: str) -> None:
        if link not in self.links:
            return
        self.links.remove(link)
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(link.channel)
        link.channel.close()
        if link.node in self.finished:
            return
        for member in self.run.elsewhere:
            if member.node == link.node and not member.done:
                member.stop_here(Outcome.LOST, self.run.elapsed())
        self.end_run(RunEnd(Why.NODE_LOST, node=f"{link.name} {how}"))


class NodeZero:
    """On another node: node 0, which decides."""

    def __init__(self, link: Link, selector: selectors.BaseSelector, end_run: Callable[[RunEnd], None]) -> None:
        self.link, self.selector, self.end_run = link, selector, end_run
        self.said: list[Said] = []
        self.questions: list[AskNode] = []
        self.end: EndRun | None = None
        self.explained: Explained | None = None
        self.gone = False
        selector.register(link.channel, selectors.EVENT_READ, self._hear)

    def relay(self, rank: int, message: Relayed) -> None:
        """Have node 0 know what a rank here has said."""
        self.said.append(Said(rank, message))

    def look(self, pulse: Pulse | None) -> None:
        """Tell what is to be told."""
        if self.said:
            said, self.said = self.said, []
            for at in range(0, len(said), 2000):
                self.send(Relay(said[at : at + 2000]))
        if pulse is not None:
            self.send(pulse)
        if time.monotonic() - self.link.heard > SILENT_SECONDS:
            self._lose(f"has not answered for {SILENT_SECONDS:.0f} s: its network or its machine is down")

    def answer(self, question: AskNode, members: list[Member]) -> None:
        """These are those that were asked for, and have been asked."""
        known = [(one.rank or 0, one.sample) for one in members if one.sample is not None]
        self.send(Samples(question.id, known))

    def finish(self, members: list[MemberReport], stray: list[str], temporary: list[str]) -> None:
        """All here have ended."""
        self.look(None)
        self.send(NodeFinished(members, stray, temporary))

    def send(self, message: Any) -> None:
        """Say something, as long as node 0 is there."""
        if not self.gone:
            try:
                self.link.channel.send(message)
            except OSError:
                self._lose("is gone: its connection has ended")

    def _hear(self) -> None:
        try:
            messages = self.link.channel.receive()
            if messages is None:
                self._lose("is gone: its connection has ended")
            for raw, _ in messages or ():
                self.link.heard = time.monotonic()
                self._take(read(ToNode, whole(raw)))
        except (ChannelError, ValueError):
            self._lose("has said what no node says")

    def _take(self, message: Any) -> None:
        match message:
            case AskNode():
                self.questions.append(message)
            case EndRun():
                self.end = message
            case Explained():
                self.explained = message

    def _lose(self, how: str) -> None:
        if self.gone:
            return
        self.gone = True
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(self.link.channel)
        self.link.channel.close()
        if self.end is None:
            self.end_run(RunEnd(Why.NODE_LOST, node=f"{self.link.name} {how}"))
