"""A rank's own process: from the fork to the moment it leaves.

It takes the environment that torchrun would have given it, runs the target, reports how that ended, and then waits.
It does not leave on its own: while another rank still expects it in a collective, its open connections keep that rank
waiting in plain sight instead of failing with "Connection closed by peer", so the supervisor can say who was expected
and had already finished. When everyone is done it leaves by `os._exit`: an orderly end of the interpreter aborts now
and then after gloo was used (torch 2.13), and a rank's success must not depend on that.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import importlib
import importlib.machinery
import importlib.util
import linecache
import logging
import multiprocessing.util
import os
import runpy
import signal
import sys
import tempfile
import threading
import types
import weakref
from pathlib import Path
from typing import Any

from . import reporting
from .channel import decode
from .job import Described, Job, TargetKind
from .messages import Go, Role, read


def main(directory: str, rank: int) -> None:
    """Be rank `rank` of the run whose supervisor waits in `directory`. Never returns."""
    channel = reporting.attach(directory, Role.RANK, rank)
    order = channel.wait()
    if order is None:
        os._exit(1)
    go: Go = read(Go, order[0])
    job = go.job
    prepare(job, go.environment, directory)
    if job.launcher:
        from . import fork_server

        fork_server.open_fork_server(channel, directory, job)
    if job.target.kind is TargetKind.PROGRAM:
        _become(job.target)
    recorder = reporting.record(channel, job)
    try:
        _run(recorder, job.target, decode(go.kwargs, order[1]))
    except BaseException as error:
        left = isinstance(error, SystemExit)
        if job.grace and left:
            _run_exit_functions()
        reporting.report(recorder, error)
        if job.grace and not left:  # Why it failed is told first: its threads may never end.
            _run_exit_functions()
    _leave(recorder)


def prepare(job: Job, environment: dict[str, str], directory: str) -> None:
    """Give this process the environment, folder, streams and fault file of a rank."""
    import torch

    os.environ.clear()
    os.environ.update(environment)
    if job.own_temporary:
        os.environ["TMPDIR"] = os.path.join(directory, "tmp")
    tempfile.tempdir = None  # It may have been asked for, and kept, before the fork.
    if sys.platform.startswith("linux") and job.meeting is None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    for number in (signal.SIGTERM, signal.SIGCHLD):  # Those before us had their own use for them.
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(job.directory)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    reporting.reseed()
    forget_exit_functions()
    torch.distributed.set_debug_level_from_env()  # type: ignore[attr-defined]  # not that of the process we come from
    reporting.open_streams()
    reporting.fault_file(directory)


def _become(program: Described) -> None:
    """Run another program in this process's place; 127 is a shell's status for one that cannot be run."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and what it starts would inherit that.
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(program.file, [program.file, *program.arguments])
    except OSError as error:
        print(f"{program.file}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(127)


def forget_exit_functions() -> None:
    """Drop what torch has asked Python to do at the end: compilers' caches and pools, the operators of its libraries,
    nothing that a rank has used.

    It takes longer than all the rest of a short run. What the user's code asks for from now on is done.
    """
    if hasattr(atexit, "_clear"):
        atexit._clear()
        atexit.register(logging.shutdown)
        atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]
        atexit.register(weakref.finalize._exitfunc)  # type: ignore[attr-defined]
    for finalizer in list(getattr(weakref.finalize, "_registry", ())):
        finalizer.atexit = False


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


def _run(recorder: Any, target: Described, kwargs: dict[str, Any]) -> None:
    sys.argv = [target.file, *target.arguments]
    if target.kind is TargetKind.FUNCTION:
        returned = getattr(load(target.file), target.name)(**kwargs)
        with contextlib.suppress(TypeError, ValueError):
            recorder.observe("returned", returned)
    elif target.kind is TargetKind.SCRIPT:
        sys.path.insert(0, str(Path(target.file).parent))
        _fresh_main(target.file)
        _execute(Path(target.file).read_bytes(), target.file)
    elif target.kind is TargetKind.MODULE:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(target.file, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.getcwd())
        text = target.text
        linecache.cache[target.file] = (len(text), None, text.splitlines(True), target.file)
        _fresh_main(target.file)
        _execute(text, target.file)
    if target.kind is not TargetKind.FUNCTION:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    recorder.returned()


def _run_exit_functions() -> None:
    """What Python does at the end, after an exception too."""
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()


def _fresh_main(filename: str) -> None:
    """The module in which a script runs, with all that Python gives it."""
    main_module = types.ModuleType("__main__")
    main_module.__dict__.update(__annotations__={}, __builtins__=builtins)
    if not filename.startswith("<"):  # A cell has no file; a child that is spawned would look for it.
        loader = importlib.machinery.SourceFileLoader("__main__", filename)
        main_module.__dict__.update(__file__=filename, __cached__=None, __loader__=loader)
    sys.modules["__main__"] = main_module


def _execute(source: str | bytes, filename: str) -> None:
    exec(compile(source, filename, "exec", dont_inherit=True), sys.modules["__main__"].__dict__)


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
