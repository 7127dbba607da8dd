"""What the processes of a run print, on its way to the client."""

from __future__ import annotations

import codecs
import os

from .member import Member


class OutputPipe:
    """One stream of one process, read as text and counted."""

    def __init__(self, member: Member, stream: str, descriptor: int) -> None:
        self.member, self.stream, self.descriptor = member, stream, descriptor
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def read(self) -> bytes | None:
        """What is in the pipe, but no more at a time than a pipe holds: others wait for their turn. None at its end."""
        try:
            data = os.read(self.descriptor, 1 << 20)
        except BlockingIOError:
            return b""
        except OSError:
            return None
        self.member.printed += len(data)
        return data or None

    def text(self, data: bytes) -> str:
        """What was read, as text; a character that is not complete comes with the next piece."""
        return self._decoder.decode(data)
