"""Fast `spawn` for a launcher under watch: children forked from a clean process instead of a new interpreter each.

A launcher that a learner writes starts its ranks with `torch.multiprocessing.spawn`. Each of those would import torch
anew, seconds apiece. Before any of the learner's code runs, a launcher forks a nursery: a process with torch imported
and nothing done. `spawn` is then served from there with the semantics it promises: the arguments are pickled by the
launcher and unpickled by the child, the child gets the launcher's environment and folder of that moment, it imports
the target by name, and it has no state but that. Each child is watched as a rank is, and leaves by `os._exit`.

It builds on parts of `multiprocessing` that are its own business. Where one is missing (another Python), `available`
says so, and `spawn` stays what it is: slower, and its children are not watched.

Pickle is used here between a launcher and its own children, as `multiprocessing` does: both are the learner's.
"""

from __future__ import annotations

import array
import contextlib
import io
import json
import os
import selectors
import signal
import socket
import struct
import sys
import traceback
from multiprocessing import context, process, reduction, resource_tracker, spawn, util
from typing import Any

from . import processes, reporting
from .channel import Channel
from .job import Job

_SIZE = struct.Struct("q")
_MOST_DESCRIPTORS = 240


def available() -> bool:
    """True when this Python's `multiprocessing` has all that a nursery needs (3.10 to 3.14 have)."""
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


def open_nursery(channel: Channel, directory: str, job: Job) -> None:
    """Fork the nursery of this launcher, which speaks over `channel`, and have `spawn` served from it from now on."""
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


def _ask(nursery: socket.socket, descriptors: list[int], number: int | None) -> tuple[int, int]:
    """Order a child; returns the pipe that tells of its end and the one that takes what was pickled for it."""
    tracker = resource_tracker._resource_tracker._fd  # type: ignore[attr-defined]
    status_read, status_write = os.pipe()
    data_read, data_write = os.pipe()
    try:
        order = json.dumps(
            {
                "environment": dict(os.environ),
                "directory": os.getcwd(),
                "number": number,
                "tracker": tracker is not None,
            }
        ).encode()
        memory = os.memfd_create("order")
        os.write(memory, order)
        shared = [] if tracker is None else [tracker]
        sent = array.array("i", [memory, data_read, status_write, *shared, *descriptors])
        nursery.sendmsg([b"!"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, sent)])
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
    """The nursery's own life: fork a child for each request, report each child's end, until the launcher is gone."""
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    supervisor = reporting.attach(directory, "nursery", None)
    selector = selectors.DefaultSelector()
    selector.register(requests, selectors.EVENT_READ)
    selector.register(wake_read, selectors.EVENT_READ)
    children: dict[int, int] = {}
    while True:
        for key, _ in selector.select():
            if key.fileobj is requests:
                data, ancillary, _, _ = requests.recvmsg(1, socket.CMSG_SPACE(_MOST_DESCRIPTORS * 4))
                if not data:
                    os._exit(0)
                received = array.array("i")
                for _, _, payload in ancillary:
                    received.frombytes(payload)
                ours = (wake_read, wake_write, supervisor.fileno())
                pid, status = _fork_child(requests, directory, job, list(received), ours)
                children[pid] = status
            else:
                os.read(wake_read, 4096)
        with contextlib.suppress(ChildProcessError):
            while children:
                pid, raw = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    break
                status = children.pop(pid, -1)
                if status >= 0:
                    code = os.waitstatus_to_exitcode(raw)
                    with contextlib.suppress(OSError):
                        supervisor.send({"event": "ended", "pid": pid, "code": code})
                    with contextlib.suppress(OSError):
                        os.write(status, _SIZE.pack(code))
                    os.close(status)


def _fork_child(
    requests: socket.socket, directory: str, job: Job, received: list[int], inherited: tuple[int, ...]
) -> tuple[int, int]:
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
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        requests.close()
        for descriptor in (*inherited, status_write):
            os.close(descriptor)
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
        order = json.loads(stream.read())
    if order["tracker"]:
        resource_tracker._resource_tracker._fd = descriptors.pop(0)  # type: ignore[attr-defined]
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["directory"])
    reporting.reseed()
    reporting.open_streams()
    reporting.fault_file(directory)
    _report_the_end(reporting.record(reporting.attach(directory, "worker", order["number"]), job))
    forkserver._forkserver._inherited_fds = descriptors  # type: ignore[attr-defined]  # where `DupFd` looks for them
    return int(spawn._main(data_read, os.dup(data_read)) or 0)


def _report_the_end(book: Any) -> None:
    """Have this process say how its function ended, before whatever started it turns that into an exit code."""
    run = process.BaseProcess.run
    this = os.getpid()

    def lockstep_run(self: process.BaseProcess) -> None:
        try:
            run(self)
        except BaseException as error:
            if os.getpid() == this:
                reporting.report(book, _own(error))
            raise
        if os.getpid() == this:
            book.send({"event": "returned"})

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
