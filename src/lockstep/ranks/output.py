"""What the processes of a run print, on its way to the client."""

from __future__ import annotations

import codecs
import os
from typing import TYPE_CHECKING

from .member import Member

if TYPE_CHECKING:
    from .supervisor import Supervisor


class Printer:
    """Passes on what one process prints, as text, and counts it."""

    def __init__(self, supervisor: Supervisor, member: Member, stream: str, descriptor: int) -> None:
        self.supervisor, self.member, self.stream, self.descriptor = supervisor, member, stream, descriptor
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.closed = False

    def read(self) -> None:
        """Take what is in the pipe, but no more at a time than a pipe holds: others wait for their turn."""
        if self.closed:
            return
        try:
            data = os.read(self.descriptor, 1 << 20)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.closed = True
            self.supervisor.selector.unregister(self.descriptor)
            os.close(self.descriptor)
            return
        self.member.printed += len(data)
        self.supervisor.moved()
        limit = self.supervisor.job.output_limit
        if not limit or self.member.printed <= limit + len(data):
            self.supervisor.tell(
                {
                    "event": "output",
                    "rank": self.member.rank or 0,
                    "stream": self.stream,
                    "text": self.decoder.decode(data),
                }
            )
