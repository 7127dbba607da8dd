"""How the nodes of a run find each other when each is a machine of its own, with a supervisor of its own.

All are given one address. Node 0 listens there, the others connect and try again until it does. Each proves to the other
that it knows the job's secret, which is never sent, and nothing that comes over the connection is ever run: `messages`
are numbers and text. When all have come, node 0 says at which port its ranks' store listens. Who comes too early, too
late or with another command line is told why, in words.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import hmac
import secrets
import socket
import struct
import time
from collections.abc import Callable

from .channel import Channel, ChannelError, whole
from .job import Job, Meeting
from .link import Link
from .messages import Challenge, FromNode, Join, Start, ToNode, TurnedAway, Welcome, read
from .network import Network, NotRun

VERSION = 1  # Of what nodes say to each other: two that differ in it don't try
STRANGER_BYTES = 1 << 14  # How much is read from whoever has not proven anything
STRANGER_SECONDS = 10.0
AGAIN_SECONDS = 0.2
CONNECT_SECONDS = 3.0
NOTICE_SECONDS = 1.0  # After so long the user is told who is missing


class Host:
    """Node 0, until all others have come."""

    node = 0

    def __init__(self, job: Job, meeting: Meeting, listening: socket.socket) -> None:
        self.job, self.meeting, self.listening = job, meeting, listening
        self.strangers: dict[Channel, tuple[str, float]] = {}
        self.links: dict[int, Link] = {}
        self.turned_away: list[str] = []  # What the user should know of those that were, and has not been told

    def look(self) -> bool:
        """Take those that come; true when all have."""
        with contextlib.suppress(BlockingIOError, ConnectionError):
            sock, _ = self.listening.accept()
            channel, nonce = Channel(sock), secrets.token_hex(16)
            sock.setblocking(True)
            with contextlib.suppress(OSError):
                channel.send(Challenge(nonce))
                sock.setblocking(False)
                self.strangers[channel] = (nonce, time.monotonic())
        for channel, (nonce, since) in list(self.strangers.items()):
            self._hear(channel, nonce, since)
        for number, link in list(self.links.items()):  # one that has gone again may come again
            if link.channel.receive() is None:
                del self.links[number]
        return len(self.links) == self.job.nodes - 1

    def missing(self) -> str:
        here, nodes = len(self.links) + 1, self.job.nodes
        return (
            f"{here} of {nodes} nodes {'is' if here == 1 else 'are'} here. The others have to run the same command, with their own "
            f"--node-rank if you give one, and reach {self.meeting.host}:{self.meeting.port}."
        )

    def start(self, port: int, own: str) -> list[str]:
        """Tell all that it begins; the names of the machines, by node."""
        hosts = [own, *(self.links[number].host for number in sorted(self.links))]
        for link in self.links.values():
            link.channel.socket.setblocking(True)
            link.heard = time.monotonic()
            with contextlib.suppress(OSError):
                link.channel.send(Start(port, hosts))
        self.close()
        return hosts

    def close(self) -> None:
        self.listening.close()
        for channel in self.strangers:
            channel.close()
        self.strangers.clear()

    def _hear(self, channel: Channel, nonce: str, since: float) -> None:
        messages = None
        with contextlib.suppress(ChannelError):
            messages = channel.receive()
        if messages == [] and channel.pending() < STRANGER_BYTES and time.monotonic() < since + STRANGER_SECONDS:
            return
        del self.strangers[channel]
        try:
            message = read(FromNode, whole(messages[0][0])) if messages else None
        except ValueError:
            message = None
        if not isinstance(message, Join):
            channel.close()
            return
        why = self._refusal(message, nonce)
        channel.socket.setblocking(True)
        with contextlib.suppress(OSError):
            if why:
                self.turned_away.append(f"A node on {message.host} was turned away: {why}.")
                channel.send(TurnedAway(why))
                channel.close()
                return
            number = message.node or min(set(range(1, self.job.nodes)) - self.links.keys())
            channel.send(Welcome(_proof(self.meeting, message.nonce, "node 0"), number))
            channel.socket.setblocking(False)
            self.links[number] = Link(number, message.host, channel, time.monotonic_ns() - message.time)

    def _refusal(self, join: Join, nonce: str) -> str:
        job = self.job
        if join.version != VERSION:
            return "it has another version of Lockstep than node 0"
        if not hmac.compare_digest(join.answer, _proof(self.meeting, nonce, "node")):
            return "it does not know the job's secret: LOCKSTEP_SECRET and --rdzv-id must be the same on all nodes"
        if join.nodes != job.nodes:
            return f"it was started with --nnodes {join.nodes}, node 0 with --nnodes {job.nodes}"
        if join.per_node != job.per_node:
            return f"it starts {join.per_node} ranks and node 0 {job.per_node}: give all the same --nproc-per-node"
        if join.node is not None and not 0 < join.node < job.nodes:
            return f"its --node-rank is {join.node}; it must be a number from 0 to {job.nodes - 1}"
        if join.node in self.links:
            return f"there is a node {join.node} already: give each its own --node-rank"
        return "" if len(self.links) < job.nodes - 1 else f"all {job.nodes} nodes are here already"


class Guest:
    """Another node than 0, until node 0 says that all have come."""

    def __init__(self, job: Job, meeting: Meeting, host: str) -> None:
        self.job, self.meeting, self.host = job, meeting, host
        self.node = meeting.node or 0
        self.link: Link | None = None
        self.again = 0.0
        self.error = "no answer yet"
        self.nonce = secrets.token_hex(16)
        self.began: Start | None = None

    def look(self) -> bool:
        """Get on with it; true when all have come. Raises NotRun when node 0 does not want this node."""
        now = time.monotonic()
        if self.link is None:
            if now >= self.again:
                self.again = now + AGAIN_SECONDS
                self._connect()
            return False
        try:
            messages = self.link.channel.receive()
            for message, _ in messages or ():
                self._take(self.link, read(ToNode, whole(message)))
        except (ChannelError, ValueError):
            messages, self.error = None, "what answers there is no node of a Lockstep run"
        except OSError as error:
            messages, self.error = None, _said(error)
        if messages is None and self.began is None:
            self.link.channel.close()
            self.link, self.again = None, now + AGAIN_SECONDS
        return self.began is not None

    def missing(self) -> str:
        at = f"{self.meeting.host}:{self.meeting.port}"
        if self.link is not None and self.node:
            return f"This is node {self.node}. Node 0 at {at} waits for other nodes."
        return f"Waiting for node 0 at {at}: {self.error}."

    def close(self) -> None:
        if self.link is not None:
            self.link.channel.close()

    def _connect(self) -> None:
        try:
            sock = socket.create_connection((self.meeting.host, self.meeting.port), CONNECT_SECONDS)
        except socket.gaierror:
            raise NotRun(f"there is no host with the name {self.meeting.host}") from None
        except OSError as error:
            self.error = _said(error)
            return
        sock.setblocking(False)
        self.link = Link(0, self.meeting.host, Channel(sock))

    def _take(self, link: Link, message: object) -> None:
        match message:
            case Challenge(nonce):
                link.channel.socket.setblocking(True)
                link.channel.send(Join(
                    _proof(self.meeting, nonce, "node"), self.nonce, self.job.nodes, self.job.per_node, self.host,
                    time.monotonic_ns(), self.meeting.node, VERSION,
                ))  # fmt: skip
                link.channel.socket.setblocking(False)
            case TurnedAway(why):
                raise NotRun(f"node 0 at {self.meeting.host}:{self.meeting.port} has turned this node away: {why}")
            case Welcome(answer, node):
                if not hmac.compare_digest(answer, _proof(self.meeting, self.nonce, "node 0")):
                    raise NotRun(
                        f"what answers at {self.meeting.host}:{self.meeting.port} does not know the job's secret"
                    )
                self.node = node
            case Start() if self.node:
                link.channel.socket.setblocking(True)
                link.host = message.hosts[0]
                link.heard = time.monotonic()
                self.began = message


def find(job: Job, meeting: Meeting) -> Host | Guest:
    """What this machine is. Raises NotRun when it can't be what it was told to be."""
    if meeting.node:
        return Guest(job, meeting, socket.gethostname())
    try:
        found = socket.getaddrinfo(meeting.host, meeting.port, type=socket.SOCK_STREAM)
    except socket.gaierror:
        raise NotRun(f"there is no host with the name {meeting.host}") from None
    family, _, _, _, address = found[0]
    try:
        if meeting.node is None:
            with socket.socket(family, socket.SOCK_STREAM) as trial:  # only an address of this machine can be bound
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                trial.bind(address)
        listening = socket.create_server(("", meeting.port), family=family)
    except OSError as error:
        if meeting.node is None and error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
            return Guest(job, meeting, socket.gethostname())
        raise NotRun(f"node 0 can't listen at port {meeting.port}: {_said(error)}") from None
    listening.setblocking(False)
    return Host(job, meeting, listening)


def gather(party: Host | Guest, wait: Callable[[], bool], tell: Callable[[str], None]) -> None:
    """Until all have come. `wait` lets a moment pass, and is false when the run has been ended; `tell` tells the user.

    Raises NotRun when they do not come.
    """
    began, told = time.monotonic(), ""
    try:
        while not party.look():
            goes_on = wait()
            waited = time.monotonic() - began
            if not goes_on or waited > party.meeting.patience:
                raise NotRun(f"{f'after {waited:.0f} s' if goes_on else 'interrupted'}: {party.missing()}")
            while isinstance(party, Host) and party.turned_away:
                tell(party.turned_away.pop(0))
            if waited > NOTICE_SECONDS and told != (now := party.missing()):
                told = now
                tell(now)
    except BaseException:
        party.close()
        raise


class Between(Network):
    """This machine's own network, for ranks that reach those of other machines through it.

    gloo is told the interface through which the nodes reach each other, so that it does not depend on what a machine's
    name leads to on the machine itself (on Debian, an address that no other machine can reach).
    """

    def __init__(self, address: str, link: Link) -> None:
        self.address = address
        self.interface = _interface(link.channel.socket.getsockname()[0])

    def environment(self, rank: int) -> dict[str, str]:
        return {"GLOO_SOCKET_IFNAME": self.interface} if self.interface else {}


def _interface(address: str) -> str:
    """The network interface that has this IPv4 address; empty when it is not found."""
    get_address = 0x8915  # SIOCGIFADDR
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                found = fcntl.ioctl(any_, get_address, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return ""


def _proof(meeting: Meeting, nonce: str, who: str) -> str:
    return hmac.new(meeting.secret.encode(), f"{who}:{nonce}".encode(), hashlib.sha256).hexdigest()


def _said(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "it doesn't answer (is the port blocked, or the machine off?)"
    if isinstance(error, ConnectionRefusedError):
        return "no program listens there yet"
    return (error.strerror or str(error)).lower()
