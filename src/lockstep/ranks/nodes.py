"""What the supervisors of a run's nodes say to each other, when each node is a machine of its own.

Theory of operation. Every node's supervisor starts, watches and ends its own ranks. Node 0's is told what all others'
ranks do (`Relay`) and how still their machines are (`Pulse`), may ask where they stand (`AskNode`), and alone decides when
the run ends (`EndRun`) and why. A node that falls silent or hangs up ends the run on all others, within seconds. At the
end each node reports how its ranks ended, and node 0 tells them in a line what it has found.
"""

from __future__ import annotations

import os
import time
from functools import partial
from typing import Any

from . import messages
from .conversation import Conversation
from .link import Link
from .member import Member, RunState
from .messages import Role
from .report import Outcome, RunEnd, Why

ALIVE_SECONDS = 1.0
LAST_WORDS_SECONDS = 10.0  # After all ranks have been ended: how long the other side may take to say so


class OtherNodes:
    """On node 0: the other nodes, and their ranks as far as they are known here."""

    def __init__(self, run: RunState, links: list[Link], talk: Conversation) -> None:
        self.run, self.links, self.talk = run, links, talk
        self.finished: set[int] = set()
        self.stray: list[str] = []
        self.temporary: list[str] = []
        self.said_alive = 0.0
        for link in links:
            first = link.node * run.job.per_node
            run.elsewhere += [
                Member(Role.RANK, rank, 0, node=link.node) for rank in range(first, first + run.job.per_node)
            ]
            link.open(talk.selector, messages.FromNode, partial(self._take, link), partial(self._lose, link))
        talk.ask_elsewhere = self.ask

    def look(self) -> None:
        """Note who has fallen silent; be heard."""
        for link in list(self.links):
            link.look()
        now = time.monotonic()
        if now - self.said_alive > ALIVE_SECONDS:
            self.said_alive = now
            self._tell(messages.Alive(os.getpid()))

    def ask(self, number: int, members: list[Member], insist: bool) -> None:
        """Ask where these of their ranks stand; `Samples` will come."""
        for link in list(self.links):
            if ranks := [one.rank or 0 for one in members if one.node == link.node]:
                link.send(messages.AskNode(number, ranks, insist))

    def end(self, why: Why, signal: int) -> None:
        """Have them end their ranks."""
        self._tell(messages.EndRun(why, signal))

    def explain(self, explained: messages.Explained) -> None:
        self._tell(explained)

    def all_finished(self) -> bool:
        """True when every node that is still there has ended its ranks."""
        return all(link.node in self.finished for link in self.links)

    def _tell(self, message: messages.EndRun | messages.Alive | messages.Explained) -> None:
        for link in list(self.links):
            link.send(message)

    def _take(self, link: Link, message: Any) -> None:
        match message:
            case messages.Pulse():
                self.run.pulses[link.node] = (time.monotonic(), message)
            case messages.Relay(said):
                for one in said:
                    if (member := self._member(link, one.rank)) is not None:
                        self._take_said(link, member, one.message)
            case messages.Samples(number, stacks):
                for rank, stack in stacks:
                    member = self._member(link, rank)
                    if member is not None and number == self.talk.asked:
                        member.sample = stack
            case messages.Stop(signal):
                self.run.stops.append(signal)
                self.run.end_by(RunEnd(Why.INTERRUPTED, node=link.name))
            case messages.NodeFinished():
                self.finished.add(link.node)
                self.stray += [f"{link.host}: {text}" for text in message.stray]
                self.temporary += [f"{link.host}: {text}" for text in message.temporary]
                for report in message.members:
                    if report.rank is not None and (member := self._member(link, report.rank)) is not None:
                        member.told = report

    def _take_said(self, link: Link, member: Member, message: messages.Relayed) -> None:
        if isinstance(message, messages.Ended):
            self.talk.end(member, message.outcome, message.code)
            self.run.last_word = time.monotonic()
            return
        if isinstance(message, messages.Event):
            message.time += link.behind
        if isinstance(message, messages.Waited):
            message.since += link.behind
        self.talk.take(member, message, b"")

    def _member(self, link: Link, rank: int) -> Member | None:
        return next((one for one in self.run.elsewhere if one.node == link.node and one.rank == rank), None)

    def _lose(self, link: Link, how: str) -> None:
        self.links.remove(link)
        if link.node in self.finished:
            return
        for member in self.run.elsewhere:
            if member.node == link.node and not member.done:
                member.stop_here(Outcome.LOST, self.run.elapsed())
        self.run.end_by(RunEnd(Why.NODE_LOST, node=how))


class NodeZero:
    """On another node: node 0, which decides."""

    def __init__(self, run: RunState, link: Link, talk: Conversation) -> None:
        self.run, self.link, self.talk = run, link, talk
        self.said: list[messages.Said] = []
        self.questions: list[messages.AskNode] = []
        self.end: messages.EndRun | None = None
        self.explained: messages.Explained | None = None
        link.open(talk.selector, messages.ToNode, self._take, self._lose)
        talk.relay = self.relay

    def relay(self, rank: int, message: messages.Relayed) -> None:
        """Have node 0 know what a rank here has said."""
        self.said.append(messages.Said(rank, message))

    def look(self, pulse: messages.Pulse | None) -> None:
        """Tell what is to be told."""
        if self.said:
            said, self.said = self.said, []
            for at in range(0, len(said), 2000):
                self.link.send(messages.Relay(said[at : at + 2000]))
        if pulse is not None:
            self.link.send(pulse)
        self.link.look()

    def answer(self) -> None:
        """Ask the ranks here what node 0 wants to know."""
        while self.questions:
            question = self.questions.pop(0)
            members = [one for one in self.run.ranks if one.rank in question.ranks]
            self.talk.ask(members, question.insist)
            known = [(one.rank or 0, one.sample) for one in members if one.sample is not None]
            self.link.send(messages.Samples(question.id, known))

    def is_expected(self) -> bool:
        """True as long as it may still say what it has found."""
        return not self.link.lost and self.explained is None

    def finish(self, members: list[messages.MemberReport], stray: list[str], temporary: list[str]) -> None:
        """All here have ended."""
        self.look(None)
        self.link.send(messages.NodeFinished(members, stray, temporary))

    def stop(self, signal: int) -> None:
        """This node was told to end."""
        self.link.send(messages.Stop(signal))

    def _take(self, message: Any) -> None:
        match message:
            case messages.AskNode():
                self.questions.append(message)
            case messages.EndRun():
                self.end = message
            case messages.Explained():
                self.explained = message

    def _lose(self, how: str) -> None:
        if self.end is None:
            self.run.end_by(RunEnd(Why.NODE_LOST, node=how))
