"""A rank's own process: from the fork to the moment it leaves.

It takes the environment that torchrun would have given it, runs the target, reports how that ended, and then waits.
It does not leave on its own: while another rank still expects it in a collective, its open connections keep that rank
waiting in plain sight instead of failing with "Connection closed by peer", so the supervisor can say who was expected
and had already finished. When everyone is done it leaves by `os._exit`: an orderly end of the interpreter aborts now
and then after gloo was used (torch 2.13), and a rank's success must not depend on that.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import importlib
import importlib.util
import linecache
import logging
import multiprocessing.util
import os
import random
import runpy
import signal
import socket
import sys
import tempfile
import threading
import traceback
import types
import weakref
from pathlib import Path
from typing import Any

from .channel import Channel, decode
from .job import Job

FAULT_SIGNAL = getattr(signal, "SIGRTMAX", None)


def attach(directory: str, role: str, rank: int | None) -> Channel:
    """Connect this process to the supervisor that waits in `directory`, and say who it is."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(os.path.join(directory, "attach"))
    channel = Channel(sock)
    channel.send({"event": "hello", "pid": os.getpid(), "role": role, "rank": rank})
    return channel


def main(directory: str, rank: int) -> None:
    """Be rank `rank` of the run whose supervisor waits in `directory`. Never returns."""
    channel = attach(directory, "rank", rank)
    order = channel.wait()
    if order is None:
        os._exit(1)
    message, blob = order
    job = Job(**message["job"])
    prepare(job, message["environment"], directory)
    if job.launcher:
        from . import nursery

        nursery.open_nursery(channel, directory, job)
    recorder = record(channel, job)
    try:
        _run(recorder, job.target, decode(message["kwargs"], blob))
    except BaseException as error:
        report(recorder, error)
    _leave(recorder)


def prepare(job: Job, environment: dict[str, str], directory: str) -> None:
    """Give this process the environment, folder, streams and fault file of a rank."""
    import torch

    os.environ.clear()
    os.environ.update(environment)
    os.environ["TMPDIR"] = os.path.join(directory, "tmp")
    tempfile.tempdir = None  # It may have been asked for, and kept, before the fork.
    if sys.platform.startswith("linux"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    for number in (signal.SIGTERM, signal.SIGCHLD):  # Those before us had their own use for them.
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(job.directory)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    reseed()
    forget_exit_functions()
    if os.environ.get("TORCH_DISTRIBUTED_DEBUG"):
        torch.distributed.set_debug_level_from_env()  # type: ignore[attr-defined]
    open_streams()
    fault_file(directory)


def reseed() -> None:
    """Random state of its own, as a fresh interpreter has it: forked ranks would all begin with the same."""
    import torch

    torch.seed()
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def forget_exit_functions() -> None:
    """Drop what torch has asked Python to do at the end: compilers' caches and pools, nothing that a rank has used.

    It takes longer than all the rest of a short run. What the learner's code asks for from now on is done.
    """
    if hasattr(atexit, "_clear"):
        atexit._clear()
        atexit.register(logging.shutdown)
        atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]
        atexit.register(weakref.finalize._exitfunc)  # type: ignore[attr-defined]


def open_streams() -> None:
    """Fresh text streams over the descriptors 0, 1 and 2; line by line, so that a kill loses nothing said before."""
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]


_fault_file: Any = None


def fault_file(directory: str) -> None:
    """Where the stack goes when this process crashes, or holds the interpreter lock and cannot answer."""
    global _fault_file
    _fault_file = open(os.path.join(directory, f"fault-{os.getpid()}"), "w")  # noqa: SIM115
    faulthandler.enable(_fault_file, all_threads=False)
    if FAULT_SIGNAL is not None:
        faulthandler.register(FAULT_SIGNAL, _fault_file, all_threads=False)


def record(channel: Channel, job: Job) -> Any:
    """Start to record this process's communication."""
    from . import recorder

    book = recorder.Recorder(channel, tuple(job.hidden), job.timeline)
    if job.watch_replicas:
        from .replicas import ReplicaWatch

        book.replica = ReplicaWatch(book)
        book.replica.start()
    recorder.start(book)
    return book


def load(file: str) -> types.ModuleType:
    """Import the Python file under its own name, as `import name` would with its folder first on the path.

    What does not end in `.py` is the dotted name of a module, and is imported as such.
    """
    if not file.endswith(".py"):
        return importlib.import_module(file)
    path = Path(file)
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(path.stem, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _run(recorder: Any, target: dict[str, Any], kwargs: dict[str, Any]) -> None:
    kind = target["type"]
    sys.argv = [target["file"], *target.get("arguments", ())]
    if kind == "function":
        returned = getattr(load(target["file"]), target["name"])(**kwargs)
        with contextlib.suppress(TypeError, ValueError):
            recorder.observe("returned", returned)
    elif kind == "script":
        sys.path.insert(0, str(Path(target["file"]).parent))
        _fresh_main(target["file"])
        _execute(Path(target["file"]).read_bytes(), target["file"])
    elif kind == "module":
        sys.path.insert(0, os.getcwd())
        runpy.run_module(target["file"], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.getcwd())
        text = target["text"]
        linecache.cache[target["file"]] = (len(text), None, text.splitlines(True), target["file"])
        _fresh_main(target["file"])
        _execute(text, target["file"])
    if kind != "function":
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    recorder.send({"event": "returned"})


def _fresh_main(filename: str) -> None:
    main_module = types.ModuleType("__main__")
    if not filename.startswith("<"):  # A cell has no file; a child that is spawned would look for it.
        main_module.__dict__["__file__"] = filename
    sys.modules["__main__"] = main_module


def _execute(source: str | bytes, filename: str) -> None:
    exec(compile(source, filename, "exec"), sys.modules["__main__"].__dict__)


def report(recorder: Any, error: BaseException) -> None:
    """Say that the code ended in this exception."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
        recorder.send({"event": "exit", "code": error.code or 0, "frames": _frames(recorder, error)})
        return
    if isinstance(error, SystemExit):
        print(error.code, file=sys.stderr, flush=True)
        recorder.send({"event": "exit", "code": 1, "frames": _frames(recorder, error), "message": str(error.code)})
        return
    recorder.send({
        "event": "raised",
        "type": type(error).__name__,
        "message": _message(error),
        "frames": _frames(recorder, error),
        "traceback": _traceback(recorder, error),
    })  # fmt: skip


def _message(error: BaseException) -> str:
    with contextlib.suppress(Exception):
        if isinstance(error, SyntaxError):
            return f"{error.msg} (line {error.lineno})"
        return str(error)[:20_000]
    return ""


def _frames(recorder: Any, error: BaseException) -> list[list[Any]]:
    frames = [
        [frame.filename, frame.lineno, frame.name]
        for frame in traceback.extract_tb(error.__traceback__)
        if recorder.is_learners(frame.filename)
    ]
    if isinstance(error, SyntaxError) and error.filename and recorder.is_learners(error.filename):
        frames.append([error.filename, error.lineno or 1, "<module>"])
    return frames


def _traceback(recorder: Any, error: BaseException) -> str:
    """The traceback as Python would print it, cut to the learner's frames."""
    with contextlib.suppress(Exception):
        printed = traceback.TracebackException.from_exception(error)
        one: traceback.TracebackException | None = printed
        while one is not None:
            one.stack = traceback.StackSummary.from_list(
                [frame for frame in one.stack if recorder.is_learners(frame.filename)]
            )
            one = one.__cause__ or one.__context__
        return "".join(printed.format())[:100_000]
    return f"{type(error).__name__}: {_message(error)}\n"


def _leave(recorder: Any) -> None:
    """Wait until every rank is done, then go without the interpreter's own ending."""

    def _lockstep_leave() -> None:
        recorder.leave.wait()

    _lockstep_leave()
    with contextlib.suppress(Exception):
        tracker = sys.modules.get("multiprocessing.resource_tracker")
        if tracker is not None and tracker._resource_tracker._fd is not None:
            tracker._resource_tracker._stop()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
