"""What `nodes.Nodes` asks of the process that holds its hosts, and what it is answered. `node` None is `login`."""

from __future__ import annotations

import json
from typing import Any

import msgspec


class Run(msgspec.Struct, tag=True):
    """Start a command; the answer is its process id."""

    node: int | None
    command: list[str]
    environment: dict[str, str]
    directory: str


class Signal(msgspec.Struct, tag=True):
    pid: int
    number: int


class Kill(msgspec.Struct, tag=True):
    """SIGKILL every process on a node; the answer is how many there were."""

    node: int


class Shield(msgspec.Struct, tag=True):
    """Replace what a node lets in by these routing rules."""

    node: int
    rules: list[str]


Order = Run | Signal | Kill | Shield


class Answer(msgspec.Struct, omit_defaults=True):
    """What an order has brought, or why it failed."""

    done: int | None = None
    failed: str = ""


def pack(message: Order | Answer) -> bytes:
    """As bytes; names that are not UTF-8 survive it."""
    return json.dumps(msgspec.to_builtins(message)).encode()


def unpack(data: bytes, kind: Any) -> Any:
    """The message of this kind. Raises ValueError for anything else."""
    return msgspec.convert(json.loads(data), kind)
