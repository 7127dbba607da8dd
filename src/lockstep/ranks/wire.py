"""How many bytes have crossed between the ranks of a run, as the kernel counts them: what a rank says has no part in it.

Linux tells of every TCP connection how much has arrived on it (`tcpi_bytes_received`, asked by netlink's sock_diag), and
`/proc/PID/fd` whose it is. Only connections that are open are told of; a process group's are, because the recorder keeps
every group until its process leaves.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .processes import sockets

_SOCK_DIAG, _BY_FAMILY, _DUMP = 4, 20, 0x301
_DONE, _ERROR = 3, 2
_INFO = 2
_MESSAGE = struct.Struct("IHHII")
_ATTRIBUTE = struct.Struct("HH")
_INODE, _ATTRIBUTES = 68, 72
_RECEIVED = 128  # Where in struct tcp_info `tcpi_bytes_received` stands


@dataclass(frozen=True)
class _Connection:
    """One end of a TCP connection: its own address and its peer's, and the bytes that have come in."""

    here: bytes
    there: bytes
    inode: int
    received: int


def between(ranks: Sequence[Sequence[int]]) -> list[list[int]] | None:
    """`between(ranks)[a][b]`: the bytes that have arrived at rank b from rank a. `ranks[r]` are the processes of rank r.

    None where the system doesn't tell.
    """
    try:
        ends = [end for family in (socket.AF_INET, socket.AF_INET6) for end in _connections(family)]
    except (OSError, AttributeError, struct.error):
        return None
    whose = {inode: rank for rank, pids in enumerate(ranks) for pid in pids for inode in sockets(pid)}
    owner = {(end.here, end.there): whose[end.inode] for end in ends if end.inode in whose}
    found = [[0] * len(ranks) for _ in ranks]
    for end in ends:
        sender, receiver = owner.get((end.there, end.here)), whose.get(end.inode)
        if sender is not None and receiver is not None and sender != receiver:
            found[sender][receiver] += end.received
    return found


def _connections(family: int) -> Iterator[_Connection]:
    """The TCP connections of this network namespace. Raises OSError where the kernel doesn't tell."""
    request = struct.pack("BBBxI48x", family, socket.IPPROTO_TCP, 1 << (_INFO - 1), 0xFFFFFFFF)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as kernel:
        kernel.settimeout(2.0)
        kernel.send(_MESSAGE.pack(_MESSAGE.size + len(request), _BY_FAMILY, _DUMP, 1, 0) + request)
        while True:
            data = kernel.recv(1 << 20)
            while data:
                length, kind, *_ = _MESSAGE.unpack_from(data)
                body, data = data[_MESSAGE.size : length], data[(length + 3) & ~3 :]
                if kind == _DONE:
                    return
                if kind == _ERROR:
                    raise OSError("the kernel doesn't tell of its sockets")
                yield _connection(body)


def _connection(message: bytes) -> _Connection:
    """Read a `struct inet_diag_msg` with its attributes."""
    ports, source, destination = message[4:8], message[8:24], message[24:40]
    (inode,) = struct.unpack_from("I", message, _INODE)
    received, at = 0, _ATTRIBUTES
    while at + _ATTRIBUTE.size <= len(message):
        length, kind = _ATTRIBUTE.unpack_from(message, at)
        if kind == _INFO and length >= _ATTRIBUTE.size + _RECEIVED + 8:
            (received,) = struct.unpack_from("Q", message, at + _ATTRIBUTE.size + _RECEIVED)
        at += max(_ATTRIBUTE.size, (length + 3) & ~3)
    return _Connection(source + ports[:2], destination + ports[2:], inode, received)
