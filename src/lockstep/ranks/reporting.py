"""How a process of a run, a rank or a worker that a rank has spawned, reports to the supervisor: it connects, has its
communication recorded, and tells of the error that ends it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import os
import random
import re
import signal
import socket
import sys
import traceback
from typing import Any

from .channel import Channel
from .job import Job
from .messages import Exit, Hello, Raised, Role

HIGH = 800  # of the 1024 that a process may have as a rule
FAULT_SIGNAL = getattr(signal, "SIGRTMAX", None)


def attach(directory: str, role: Role, rank: int | None) -> Channel:
    """Connect this process to the supervisor that waits in `directory`, and say who it is."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(os.path.join(directory, "attach"))
    channel = Channel(socket.socket(fileno=_out_of_reach(sock.detach())))
    channel.send(Hello(role, rank, os.getpid()))
    return channel


def _out_of_reach(descriptor: int) -> int:
    """The same file under a high number: some programs begin with `os.closerange(3, 256)`."""
    try:
        high = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, HIGH)
    except OSError:  # a low limit
        return descriptor
    os.close(descriptor)
    return high


def reseed() -> None:
    """Random state of its own, as a fresh interpreter has it: forked ranks would all begin with the same."""
    import torch

    torch.seed()
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def open_streams() -> None:
    """Fresh text streams over the descriptors 0, 1 and 2; line by line, so that a kill loses nothing said before."""
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]


def fault_file(directory: str) -> None:
    """Where the stack goes when this process crashes, or holds the interpreter lock and cannot answer."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    file = _out_of_reach(os.open(os.path.join(directory, f"fault-{os.getpid()}"), flags, 0o666))
    faulthandler.enable(file, all_threads=False)
    if FAULT_SIGNAL is not None:
        faulthandler.register(FAULT_SIGNAL, file, all_threads=False)


def record(channel: Channel, job: Job) -> Any:
    """Start to record this process's communication."""
    from . import recorder

    made = recorder.Recorder(channel, tuple(job.hidden), job.timeline)
    if job.watch_replicas:
        from .replicas import ReplicaWatch

        ReplicaWatch(made).start()
    if job.mark_steps:
        from .steps import StepMarks

        StepMarks(made).start()
    recorder.start(made)
    return made


def report(recorder: Any, error: BaseException) -> None:
    """Say that the code ended in this exception."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
        recorder.send(Exit(error.code or 0, _frames(recorder, error), because=_caught(recorder, error)))
        return
    if isinstance(error, SystemExit):
        print(error.code, file=sys.stderr, flush=True)
        recorder.send(Exit(1, _frames(recorder, error), str(error.code), _caught(recorder, error)))
        return
    recorder.send(_raised(recorder, error))


def _raised(recorder: Any, error: BaseException) -> Raised:
    return Raised(type(error).__name__, _message(error), _frames(recorder, error), _traceback(recorder, error))


def _caught(recorder: Any, error: SystemExit) -> Raised | None:
    """The exception that was being handled when the code called sys.exit."""
    caught = error.__cause__ or error.__context__
    return _raised(recorder, caught) if caught is not None and not isinstance(caught, SystemExit) else None


def _message(error: BaseException) -> str:
    with contextlib.suppress(Exception):
        if isinstance(error, SyntaxError):
            return f"{error.msg} (line {error.lineno})" if error.lineno else error.msg
        return str(error)[:20_000] + _unused(error)
    return ""


def _unused(error: BaseException) -> str:
    """The names of parameters of which DDP gives only the numbers, in the words that it has for them in debug mode."""
    found = re.search(r"\nParameter indices( which did not receive grad for rank \d+: )([\d ]+)", str(error))
    if not found or "\nParameters which" in str(error):
        return ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        ddp: Any = frame.f_locals.get("self")
        with contextlib.suppress(AttributeError, IndexError, KeyError):
            named = ddp._build_debug_param_to_name_mapping(ddp._build_params_for_reducer()[0])
            return f"\nParameters{found[1]}{', '.join(named[int(number)] for number in found[2].split())}"
    return ""


def _frames(recorder: Any, error: BaseException) -> list[list[Any]]:
    frames = [
        [frame.filename, frame.lineno, frame.name]
        for frame in traceback.extract_tb(error.__traceback__)
        if recorder.is_users(frame.filename)
    ]
    if isinstance(error, SyntaxError) and error.filename and recorder.is_users(error.filename):
        frames.append([error.filename, error.lineno or 1, "<module>"])
    said = _message(error)
    if said.startswith("Caught "):  # in a process of a DataLoader, whose traceback is in the message
        found = re.findall(r'^  File "(.+)", line (\d+), in (.+)$', said, re.MULTILINE)
        frames += [[file, int(line), name] for file, line, name in found if recorder.is_users(file)]
    return frames


def _traceback(recorder: Any, error: BaseException) -> str:
    """The traceback as Python would print it, cut to the user's frames."""
    with contextlib.suppress(Exception):
        printed = traceback.TracebackException.from_exception(error)
        one: traceback.TracebackException | None = printed
        while one is not None:
            one.stack = traceback.StackSummary.from_list(
                [frame for frame in one.stack if recorder.is_users(frame.filename)]
            )
            one = one.__cause__ or one.__context__
        return "".join(printed.format())[:100_000]
    return f"{type(error).__name__}: {_message(error)}\n"
