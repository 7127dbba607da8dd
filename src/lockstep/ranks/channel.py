"""Messages between processes that do not trust each other: a JSON header and raw bytes, never a pickle.

A message is `!II` (header bytes, blob bytes), the header as JSON, then the blob. Tensors and arrays travel in the blob;
the header holds a note of their type, shape and place instead. Decoding reads numbers and text and runs no code,
whatever the sender wrote. Everything has a size limit, since the sender may be anybody's submission.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import msgspec

HEADER = struct.Struct("!II")
MAX_HEADER = 16 << 20
MAX_BLOB = 256 << 20
MAX_DEPTH = 64  # Of lists and dictionaries within each other: whoever walks through a message must not run out of stack
_TENSOR = "$tensor"
_PLAIN = (bool, int, float, str, type(None))


class ChannelError(Exception):
    """What came through the channel is no message, or is too large to be one."""


def encode(value: Any) -> tuple[Any, bytes]:
    """Turn an observation into (JSON tree, blob).

    Accepts None, bool, int, float, str, lists, tuples, sets of these, dictionaries with text keys, torch tensors of
    any dtype and device (moved to the CPU), and numpy arrays. Anything else raises TypeError naming its type.
    """
    blobs: list[bytes] = []
    size = 0

    def walk(item: Any) -> Any:
        nonlocal size
        if type(item) in _PLAIN:
            return item
        for plain in (bool, int, float, str):  # a subclass becomes what it is a kind of
            if isinstance(item, plain):
                return plain(item)
        if isinstance(item, dict):
            return {_escape(str(key)): walk(inner) for key, inner in item.items()}
        if isinstance(item, (list, tuple, set, frozenset)):
            return [walk(inner) for inner in item]
        note, data = _tensor_bytes(item)
        note["at"] = size
        blobs.append(data)
        size += len(data)
        return {_TENSOR: note}

    tree = walk(value)
    return tree, b"".join(blobs)


def _escape(key: str) -> str:
    """Keys with a dollar sign get another, so that none is taken for a note."""
    return f"${key}" if key.startswith("$") else key


def _tensor_bytes(item: Any) -> tuple[dict[str, Any], bytes]:
    import numpy
    import torch

    if isinstance(item, (numpy.ndarray, numpy.generic)):
        item = torch.from_numpy(numpy.ascontiguousarray(item))
    if not isinstance(item, torch.Tensor):
        kind = type(item).__name__
        raise TypeError(f"an observation holds numbers, text, lists, dictionaries and tensors, not {kind}")
    with torch.no_grad():
        plain = item.detach().to("cpu").to_dense() if item.is_sparse else item.detach().to("cpu")
        plain = plain.contiguous().clone(memory_format=torch.contiguous_format)
        data = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return {"dtype": str(plain.dtype).removeprefix("torch."), "shape": list(plain.shape), "bytes": len(data)}, data


def decode(tree: Any, blob: bytes) -> Any:
    """Rebuild the value of `encode`; tensors come back as torch tensors that own their memory.

    Raises ChannelError when a note does not fit the blob. What comes out is not larger than what came in: a tensor has
    all its bytes in the blob, and no two have the same.
    """
    left = len(blob)

    def rebuild(item: Any) -> Any:
        nonlocal left
        if isinstance(item, list):
            return [rebuild(inner) for inner in item]
        if not isinstance(item, dict):
            return item
        if set(item) != {_TENSOR}:
            return {key[1:] if key.startswith("$") else key: rebuild(inner) for key, inner in item.items()}
        tensor, used = _tensor(item[_TENSOR], blob)
        left -= used
        if left < 0:
            raise ChannelError("its tensors are larger than the message")
        return tensor

    return rebuild(tree)


def _tensor(note: Any, blob: bytes) -> tuple[Any, int]:
    import torch

    try:
        dtype = getattr(torch, str(note["dtype"]))
        start, length = int(note["at"]), int(note["bytes"])
        shape = [int(extent) for extent in note["shape"]]
        if not isinstance(dtype, torch.dtype) or start < 0 or length < 0 or start + length > len(blob):
            raise ValueError("outside its message")
        if len(shape) > MAX_DEPTH:
            raise ValueError("too many dimensions")
        if not length:
            if 0 not in shape:
                raise ValueError("it has no bytes")
            return torch.empty(shape, dtype=dtype), 0
        return torch.frombuffer(bytearray(blob[start : start + length]), dtype=dtype).reshape(shape), length
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ChannelError(f"a tensor does not fit its message: {error}") from None


def whole(value: Any) -> Any:
    """The same with halves of surrogate pairs replaced in all texts: JSON can hold them, and no file can."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [whole(item) for item in value]
    if isinstance(value, dict):
        return {whole(key): whole(item) for key, item in value.items()}
    return value


def _too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for item in level for inner in (item.values() if isinstance(item, dict) else item)
                 if isinstance(inner, (dict, list))]  # fmt: skip
        if not level:
            return False
    return True


class Channel:
    """One end of a message stream over a socket. Sending is safe from several threads."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self._lock = threading.RLock()  # a signal handler may send while this thread does
        self._buffer = bytearray()
        self.messages = 0
        self.received = 0
        self.header_bytes = 0

    def fileno(self) -> int:
        """The socket's file descriptor, so that `selectors` can wait on the channel."""
        return self.socket.fileno()

    def pending(self) -> int:
        """How many bytes of an unfinished message have come."""
        return len(self._buffer)

    def send(self, message: Any, blob: bytes = b"") -> None:
        """Send one of `messages`, or a dictionary; raises OSError when the other end is gone."""
        header = json.dumps(msgspec.to_builtins(message), separators=(",", ":")).encode()
        if len(header) > MAX_HEADER or len(blob) > MAX_BLOB:
            raise ChannelError(f"a message of {len(header) + len(blob):,} bytes is too large to send")
        data = HEADER.pack(len(header), len(blob)) + header + blob
        with self._lock:
            self.socket.sendall(data)

    def receive(self) -> list[tuple[dict[str, Any], bytes]] | None:
        """Read once from the socket and return the messages that are complete now; None at the end of the stream."""
        try:
            data = self.socket.recv(1 << 20)
        except (BlockingIOError, InterruptedError):
            return []
        except OSError:
            return None
        if not data:
            return None
        self._buffer += data
        self.received += len(data)
        return list(self._complete())

    def wait(self) -> tuple[dict[str, Any], bytes] | None:
        """Block until one message is there; None at the end of the stream. For channels read one message at a time.

        Nothing of the next one is read: a process that is forked in between shall not have it in its memory.
        """
        while True:
            for message in self._complete(limit=1):
                return message
            try:
                data = self.socket.recv(min(self._missing(), 1 << 16))
            except InterruptedError:
                continue
            except OSError:
                return None
            if not data:
                return None
            self._buffer += data

    def _missing(self) -> int:
        """How many bytes the message that has begun still needs, as far as is known; one at least."""
        if len(self._buffer) < HEADER.size:
            return HEADER.size - len(self._buffer)
        header, blob = HEADER.unpack_from(self._buffer)
        return max(1, HEADER.size + int(header) + int(blob) - len(self._buffer))

    def _complete(self, limit: int | None = None) -> Iterator[tuple[dict[str, Any], bytes]]:
        count = 0
        while len(self._buffer) >= HEADER.size and (limit is None or count < limit):
            header_size, blob_size = HEADER.unpack_from(self._buffer)
            if header_size > MAX_HEADER or blob_size > MAX_BLOB:
                raise ChannelError("something that is no message came through the channel")
            end = HEADER.size + header_size + blob_size
            if len(self._buffer) < end:
                return
            raw = bytes(self._buffer[HEADER.size : HEADER.size + header_size])
            blob = bytes(self._buffer[HEADER.size + header_size : end])
            del self._buffer[:end]
            try:
                message = json.loads(raw)
            except (ValueError, RecursionError):
                raise ChannelError("something that is no message came through the channel") from None
            nested = raw.count(b"[") + raw.count(b"{") > MAX_DEPTH
            if not isinstance(message, dict) or (nested and _too_deep(message)):
                raise ChannelError("something that is no message came through the channel")
            count += 1
            self.messages += 1
            self.header_bytes += header_size
            yield message, blob

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.close()
