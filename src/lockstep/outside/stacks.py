"""Stacks as py-spy shows them, of a living process or in a text that was kept: which call a rank is in, and where."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass

from ..ranks.calls import CALLS, inside_of
from ..ranks.report import Frame

TRIES = 4  # A stack that is read while it changes may make no sense: it is read again
PATIENCE = 20.0
_LIBRARY = re.compile(r"[/\\](site|dist)-packages[/\\]|[/\\]lib(64)?[/\\]python\d|^<")
_TORCHS = re.compile(r"[/\\]torch[/\\](?!utils[/\\]data)")
_DISTRIBUTED = re.compile(r"[/\\]torch[/\\].*distributed(?![/\\]checkpoint[/\\])")
_WORK = re.compile(r"\.wait\(\)")


class NotPermitted(Exception):
    """This user may not read that process. The message says what to do."""


class NoSampler(Exception):
    """py-spy is not installed."""


@dataclass(frozen=True)
class Thread:
    """One thread's frames, innermost first, libraries' included."""

    name: str
    frames: tuple[Frame, ...]
    is_main: bool = False

    @property
    def users(self) -> tuple[Frame, ...]:
        return tuple(frame for frame in self.frames if is_users(frame.file))

    @property
    def call(self) -> str:
        """The communication call that it is in, as `all_reduce` or `backward`; empty when it is in none."""
        call = ""
        communicates: bool | None = None
        for frame in self.frames:
            name = frame.function.rpartition(".")[2]
            if is_users(frame.file):
                waits = frame is self.frames[0] and _WORK.search(frame.text)  # a Work's wait has no frame of its own
                return call if communicates else "wait" if waits else ""
            if name == "_engine_run_backward" or _DISTRIBUTED.search(frame.file):
                communicates = communicates is not False
                if (not call or not name.startswith("_")) and name not in ("wrapper", "wait") and call != "backward":
                    call = CALLS.get(name, name)
            elif communicates is None and not _TORCHS.search(frame.file):
                communicates = False
            if (part := inside_of(frame.file, name)) in ("DDP()", "backward"):
                call = part
        return call if communicates else ""


def is_users(file: str) -> bool:
    """True for a file that is neither Python's, whichever Python that is, nor an installed library's."""
    return not _LIBRARY.search(file)


def main_thread(threads: Sequence[Thread] | None) -> Thread | None:
    return next((thread for thread in threads or () if thread.is_main), None)


def sampler() -> str:
    """Where py-spy is: beside this Python, or on PATH. Raises NoSampler."""
    found = shutil.which("py-spy", path=os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")]))
    if found is None:
        raise NoSampler("py-spy is not installed, which reads other processes' stacks: pip install py-spy")
    return found


def sample(pid: int, py_spy: str) -> tuple[Thread, ...] | None:
    """The process's stacks, read without stopping it; None when it is gone or is no Python. Raises NotPermitted."""
    command = [py_spy, "dump", "--nonblocking", "--json", "--pid", str(pid)]
    for _ in range(TRIES):
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            return None
        if done.returncode == 0:
            return _from_json(done.stdout, pid)
        if re.search(r"permission denied|operation not permitted", done.stderr, re.IGNORECASE):
            raise NotPermitted(
                f"the system does not let you read process {pid}. Run it as root (sudo), or allow it: sysctl "
                "kernel.yama.ptrace_scope=0; a container needs --cap-add=SYS_PTRACE"
            )
        if "find python version" in done.stderr.lower():
            return None
    return None


def _from_json(text: str, pid: int) -> tuple[Thread, ...] | None:
    try:
        folder = os.readlink(f"/proc/{pid}/cwd")
    except OSError:
        folder = ""
    try:
        return tuple(
            Thread(
                str(thread.get("thread_name") or ""),
                tuple(
                    Frame(os.path.join(folder, one["filename"]) if one["filename"][0] != "<" else one["filename"],
                          int(one["line"]), str(one["name"]))
                    for one in thread["frames"]
                ),
                thread.get("os_thread_id") == (pid or thread["pid"]),
            )
            for thread in json.loads(text)
        )  # fmt: skip
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return None


def from_text(text: str) -> tuple[Thread, ...] | None:
    """The stacks in what `py-spy dump` has printed, as text or as JSON; None when it is neither."""
    if text.lstrip()[:1] == "[":
        return _from_json(text, 0)
    if not re.search(r"^Process \d+:", text, re.MULTILINE):
        return None
    threads = []
    for part in re.split(r"^Thread ", text, flags=re.MULTILINE)[1:]:
        head, _, rest = part.partition("\n")
        name = head.partition('"')[2].rstrip('"')
        found = re.findall(r"^ {4}(\S.*) \((.+):(\d+)\)$", rest, re.MULTILINE)
        frames = tuple(Frame(_long(file), int(line), function) for function, file, line in found)
        threads.append(Thread(name, frames, name == "MainThread"))
    return tuple(threads)


def _long(short: str) -> str:
    """py-spy prints a library's file without the folder that it is installed in."""
    top = short.partition("/")[0].removesuffix(".py")
    if top in ("torch", "numpy"):
        return f"/site-packages/{short}"
    return f"/lib/python3/{short}" if top in sys.stdlib_module_names else short
