"""Fast `spawn` for a launcher under watch: children forked from a clean process instead of a new interpreter each.

A launcher that a user writes starts its ranks with `torch.multiprocessing.spawn`. Each of those would import torch
anew, seconds apiece. Before any of the user's code runs, a launcher forks a fork server: a process with torch imported
and nothing done. `spawn` is then served from there with the semantics it promises: the arguments are pickled by the
launcher and unpickled by the child, the child gets the launcher's environment and folder of that moment, it imports
the target by name, and it has no state but that. Each child is watched as a rank is, and leaves by `os._exit`.

It builds on parts of `multiprocessing` that are its own business. Where one is missing (another Python), `available`
says so, and `spawn` stays what it is: slower, and its children are not watched.

Pickle is used here between a launcher and its own children, as `multiprocessing` does: both are the user's.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import signal
import socket
import struct
import sys
import traceback
from dataclasses import dataclass
from multiprocessing import context, process, reduction, resource_tracker, spawn, util
from typing import Any

from . import processes, reporting
from .channel import Channel
from .fork_loop import ForkLoop
from .job import Job
from .messages import ChildEnded, Role

_SIZE = struct.Struct("q")
_MOST_DESCRIPTORS = 240


@dataclass(frozen=True)
class _Order:
    """What a new child gets from its launcher: `number` is the rank that it will most likely be."""

    environment: dict[str, str]
    directory: str
    number: int | None
    tracker: bool


def available() -> bool:
    """True when this Python's `multiprocessing` has all that a fork server needs (3.10 to 3.14 have)."""
    try:
        from multiprocessing import forkserver, popen_forkserver
    except ImportError:
        return False
    needed = (
        (popen_forkserver, "Popen"), (popen_forkserver, "_DupFd"), (forkserver, "_forkserver"), (spawn, "_main"),
        (spawn, "get_preparation_data"), (context, "SpawnProcess"), (reduction, "dump"),
        (context, "set_spawning_popen"), (util, "Finalize"), (util, "close_fds"), (os, "memfd_create"),
    )  # fmt: skip
    return all(hasattr(module, name) for module, name in needed) and hasattr(context.SpawnProcess, "_Popen")


def open_fork_server(channel: Channel, directory: str, job: Job) -> None:
    """Fork the fork server of this launcher, which speaks over `channel`, and have `spawn` served from it from now on."""
    if not available():
        return
    from multiprocessing import popen_forkserver

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if not pid:
        ours.close()
        channel.close()
        processes.call_helper()
        try:
            _serve(theirs, directory, job)
        finally:
            os._exit(1)
    theirs.close()

    class Popen(popen_forkserver.Popen):
        """What `multiprocessing` holds of one child."""

        method = "spawn"
        DupFd = popen_forkserver._DupFd

        def _launch(self, process_obj: Any) -> None:
            prepared = spawn.get_preparation_data(process_obj._name)
            buffer = io.BytesIO()
            context.set_spawning_popen(self)
            try:
                reduction.dump(prepared, buffer)
                reduction.dump(process_obj, buffer)
            finally:
                context.set_spawning_popen(None)
            self.sentinel, write = _ask(ours, self._fds, _number(process_obj))  # type: ignore[attr-defined]
            close = util.close_fds  # type: ignore[attr-defined]
            self.finalizer = util.Finalize(self, close, (write, self.sentinel))
            with open(write, "wb", closefd=False) as stream:
                stream.write(buffer.getbuffer())
            self.pid = _read(self.sentinel)

    context.SpawnProcess._Popen = staticmethod(Popen)  # type: ignore[method-assign, assignment]


def _number(process_obj: Any) -> int | None:
    """Which of its processes this is to `mp.spawn`: the rank that it will most likely be."""
    arguments = getattr(process_obj, "_args", ())
    if getattr(getattr(process_obj, "_target", None), "__module__", "") == "torch.multiprocessing.spawn":
        return next((argument for argument in arguments if type(argument) is int), None)
    return None


def _ask(fork_server: socket.socket, descriptors: list[int], number: int | None) -> tuple[int, int]:
    """Order a child; returns the pipe that tells of its end and the one that takes what was pickled for it."""
    tracker = resource_tracker._resource_tracker._fd  # type: ignore[attr-defined]
    status_read, status_write = os.pipe()
    data_read, data_write = os.pipe()
    try:
        order = pickle.dumps(_Order(dict(os.environ), os.getcwd(), number, tracker is not None))
        memory = os.memfd_create("order")
        os.write(memory, order)
        shared = [] if tracker is None else [tracker]
        socket.send_fds(fork_server, [b"!"], [memory, data_read, status_write, *shared, *descriptors])
        os.close(memory)
    finally:
        os.close(status_write)
        os.close(data_read)
    return status_read, data_write


def _read(descriptor: int) -> int:
    data = b""
    while len(data) < _SIZE.size:
        part = os.read(descriptor, _SIZE.size - len(data))
        if not part:
            raise EOFError("the process that starts children is gone")
        data += part
    return int(_SIZE.unpack(data)[0])


def _serve(requests: socket.socket, directory: str, job: Job) -> None:
    """The fork server's own life: fork a child for each request, report each child's end, until the launcher is gone."""
    loop = ForkLoop(requests)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    supervisor = reporting.attach(directory, Role.FORK_SERVER, None)
    children: dict[int, int] = {}
    while True:
        if loop.wait().request:
            data, received, _, _ = socket.recv_fds(requests, 1, _MOST_DESCRIPTORS)
            if not data:
                os._exit(0)
            pid, status = _fork_child(loop, supervisor, directory, job, received)
            children[pid] = status
        ended: dict[int, int] = {}
        processes.reap(ended)
        for pid, code in ended.items():
            with contextlib.suppress(OSError):
                supervisor.send(ChildEnded(pid, code))
            with contextlib.suppress(OSError, KeyError), open(children.pop(pid), "wb", buffering=0) as status_pipe:
                status_pipe.write(_SIZE.pack(code))


def _fork_child(loop: ForkLoop, supervisor: Channel, directory: str, job: Job, received: list[int]) -> tuple[int, int]:
    memory, data_read, status_write, *descriptors = received
    pid = os.fork()
    if pid:
        for descriptor in (memory, data_read, *descriptors):
            os.close(descriptor)
        with contextlib.suppress(OSError):
            os.write(status_write, _SIZE.pack(pid))
        return pid, status_write
    code = 1
    try:
        loop.leave()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        supervisor.close()
        os.close(status_write)
        code = _child(directory, job, memory, data_read, descriptors)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            util._exit_function()  # type: ignore[attr-defined]
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _child(directory: str, job: Job, memory: int, data_read: int, descriptors: list[int]) -> int:
    from multiprocessing import forkserver

    os.lseek(memory, 0, os.SEEK_SET)
    with open(memory, "rb") as stream:
        order: _Order = pickle.load(stream)
    if order.tracker:
        resource_tracker._resource_tracker._fd = descriptors.pop(0)  # type: ignore[attr-defined]
    os.environ.clear()
    os.environ.update(order.environment)
    os.chdir(order.directory)
    reporting.reseed()
    reporting.open_streams()
    reporting.fault_file(directory)
    _report_the_end(reporting.record(reporting.attach(directory, Role.WORKER, order.number), job))
    forkserver._forkserver._inherited_fds = descriptors  # type: ignore[attr-defined]  # where `DupFd` looks for them
    return int(spawn._main(data_read, os.dup(data_read)) or 0)


def _report_the_end(recorder: Any) -> None:
    """Have this process say how its function ended, before whatever started it turns that into an exit code."""
    run = process.BaseProcess.run
    this = os.getpid()

    def lockstep_run(self: process.BaseProcess) -> None:
        try:
            run(self)
        except BaseException as error:
            if os.getpid() == this:
                reporting.report(recorder, _own(error))
            raise
        if os.getpid() == this:
            recorder.returned()

    process.BaseProcess.run = lockstep_run  # type: ignore[method-assign]


def _own(error: BaseException) -> BaseException:
    """`mp.spawn` saves its function's exception for the launcher, and leaves by `sys.exit(1)`."""
    if isinstance(error, SystemExit) and error.__context__ is not None and error.__traceback__ is not None:
        place = error.__traceback__
        while place.tb_next is not None:
            place = place.tb_next
        if place.tb_frame.f_globals.get("__name__") == "torch.multiprocessing.spawn":
            return error.__context__
    return error
