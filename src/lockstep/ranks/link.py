"""A connection to another node of the run: what is said over it, and how it is lost."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Callable
from typing import Any

from .channel import Channel, ChannelError, whole
from .messages import read

SILENT_SECONDS = 10.0
"""A node that has said nothing for so long, though it speaks all the time, can't be reached any more."""


class Link:
    """To a node with this number on a machine with this name, whose clock is this many ns behind ours."""

    def __init__(self, node: int, host: str, channel: Channel, behind: int = 0) -> None:
        self.node, self.host, self.channel, self.behind = node, host, channel, behind
        self.heard = time.monotonic()
        self.lost = False
        channel.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # a peer that goes without a word would fill it up for 15 minutes
            channel.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SILENT_SECONDS * 1000))

    @property
    def name(self) -> str:
        """`node 1 (beta)`."""
        return f"node {self.node} ({self.host})"

    def open(
        self, selector: selectors.BaseSelector, kind: Any, take: Callable[[Any], None], forget: Callable[[str], None]
    ) -> None:
        """Have each message of this `kind` taken, and hear, once, how the node was lost."""
        self.selector, self.kind, self.take, self.forget = selector, kind, take, forget
        selector.register(self.channel, selectors.EVENT_READ, self._hear)

    def send(self, message: Any) -> None:
        """Say something, as long as the node is there."""
        if not self.lost:
            try:
                self.channel.send(message)
            except OSError:
                self._lose("is gone: its connection has ended")

    def look(self) -> None:
        """Lose a node that has fallen silent."""
        if time.monotonic() - self.heard > SILENT_SECONDS:
            self._lose(f"has not answered for {SILENT_SECONDS:.0f} s: its network or its machine is down")

    def _hear(self) -> None:
        if self.lost:
            return
        try:
            messages = self.channel.receive()
            if messages is None:
                self._lose("is gone: its connection has ended")
            for raw, _ in messages or ():
                self.heard = time.monotonic()
                self.take(read(self.kind, whole(raw)))
        except (ChannelError, ValueError):
            self._lose("has said what no node says")

    def close(self) -> None:
        """End it without a word: the other node takes this one for lost."""
        self.lost = True
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(self.channel)
        self.channel.close()

    def _lose(self, how: str) -> None:
        if self.lost:
            return
        self.close()
        self.forget(f"{self.name} {how}")
