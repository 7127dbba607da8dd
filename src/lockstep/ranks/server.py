"""The warm process from which every run is forked: it has imported torch, and has done nothing with it.

`mp.spawn` starts each rank as a new interpreter that imports torch anew, seconds apiece. This process does it once.
It stays single-threaded, initializes no accelerator and runs nobody's code, so that a fork of it is a clean start.

It reads orders from a socket, one file descriptor each: the end of a client's socket, which it hands to a supervisor
forked for that run. It ends when its client does. Whatever a killed supervisor's ranks had detached falls to it, the
next subreaper, and is ended.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Sequence

from . import huge_pages, processes
from .folder import remove_left_folders
from .fork_loop import ForkLoop

NEEDED = (
    "torch", "torch.distributed", "torch.nn.parallel", "torch.optim", "torch.utils.data",
    "torch.utils.data.distributed", "torch.multiprocessing", "torch._dynamo",
    "torch.distributed.elastic.multiprocessing.errors", "numpy",
    "lockstep.ranks.rank", "lockstep.ranks.recorder", "lockstep.ranks.fork_server", "lockstep.ranks.supervisor",
)  # fmt: skip
WHEN_IDLE = ("torch.distributed.launcher.api", "torch.profiler", "torch.distributed.checkpoint")
"""What a run may want, besides what the client asks for: imported beforehand, passed over where it is missing."""
IDLE_SECONDS = 0.3
JANITOR_SECONDS = 1.5
LEAVE_SECONDS = 2.0


def warm_up() -> None:
    """Import what a rank needs and put the recorder's kernels in place.

    Nothing of it is ever let go: looking for garbage on the way takes a fifth of the time.
    """
    gc.disable()
    warnings.simplefilter("ignore")  # and not catch_warnings, which would take back torch's and numpy's own filters
    for name in NEEDED:
        importlib.import_module(name)
    from . import recorder

    recorder.install()
    recorder.keep_compilers_out()
    never_ask_for_names()
    warnings.filters.remove(("ignore", None, Warning, None, 0))  # type: ignore[attr-defined]
    gc.collect()
    gc.freeze()
    gc.enable()


def never_ask_for_names() -> None:
    """Keep torch, in this process and all that are forked from it, from asking a name server who its neighbors are.

    To name it in a message that is hardly ever printed, torch 2.13 looks up the name of each address that it connects
    to. For `::ffff:127.0.0.1` that goes to a name server, and where none answers, each rank stands still for 5 s and
    more before it has joined its group. torch gives up the habit for good after the first look-up that fails; so it
    gets to make one, here, while no further file can be opened. (A socket takes the last free descriptor.)
    """
    import datetime

    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    with contextlib.suppress(Exception), socket.socket() as deaf:
        import resource

        deaf.bind(("127.0.0.1", 0))
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        stderr = os.dup(2)
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 2)
        try:
            last = os.dup(nothing)
            os.close(last)
            resource.setrlimit(resource.RLIMIT_NOFILE, (last + 1, hard))
            TCPStore("127.0.0.1", deaf.getsockname()[1], 2, False, timeout=datetime.timedelta(milliseconds=1))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            os.dup2(stderr, 2)
            os.close(stderr)
            os.close(nothing)


def serve(control: socket.socket, preload: Sequence[str]) -> None:
    """Fork a supervisor for each order until the client is gone."""
    processes.adopt_orphans()
    remove_left_folders()
    loop = ForkLoop(control)
    supervisors: set[int] = set()
    later = [*WHEN_IDLE, *preload]
    waiting_for_janitors: float | None = None
    while True:
        patience = IDLE_SECONDS if later or waiting_for_janitors else None
        woken = loop.wait(patience)
        if not any(woken) and later and not waiting_for_janitors:
            with contextlib.suppress(Exception):
                importlib.import_module(later.pop(0))
            gc.collect()
            gc.freeze()
            if not later:
                huge_pages.collapse()
            continue
        if woken.child or waiting_for_janitors:
            spare = not waiting_for_janitors or time.monotonic() < waiting_for_janitors
            if not _tidy(supervisors, spare):
                waiting_for_janitors = None
            elif waiting_for_janitors is None:
                waiting_for_janitors = time.monotonic() + JANITOR_SECONDS
        if woken.request:
            data, descriptors, _, _ = socket.recv_fds(control, 16, 4)
            if not data:
                _wait_and_tidy(supervisors)
                return
            for descriptor in descriptors:
                pid = _fork()
                if not pid:
                    _become_supervisor(loop, descriptor)
                supervisors.add(pid)
                os.close(descriptor)


def _fork() -> int:
    """Fork, without Python's warning (3.12 on) that there are threads: a preloaded library's, which sleep and hold no lock."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _become_supervisor(loop: ForkLoop, descriptor: int) -> None:
    from . import supervisor

    try:
        loop.leave()
        os.setpgrp()
        supervisor.serve(socket.socket(fileno=descriptor), fork=True)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _wait_and_tidy(supervisors: set[int]) -> None:
    """The client is gone: let the supervisors end their runs, then end whatever has none any more.

    A supervisor may have been killed just before. What its ranks had detached comes here when they have gone, too.
    """
    statuses: dict[int, int] = {}
    patience = time.monotonic() + LEAVE_SECONDS
    while supervisors and time.monotonic() < patience:
        processes.reap(statuses)
        supervisors.difference_update(statuses)
        time.sleep(0.005)
    processes.end_all(os.getpid(), statuses)
    remove_left_folders()


def _tidy(supervisors: set[int], spare_janitors: bool) -> bool:
    """Collect supervisors that have ended, and end what one that was killed has left.

    True while janitors are left, who are ended only when they do not leave by themselves.
    """
    statuses: dict[int, int] = {}
    processes.reap(statuses)
    killed = any(statuses.get(pid) for pid in supervisors)
    supervisors.difference_update(statuses)
    heads = [pid for pid in _children() if pid not in supervisors]
    orphans = [pid for head in heads for pid in (head, *processes.descendants(head))]
    janitors = {pid for pid in orphans if spare_janitors and processes.is_janitor(pid)}
    processes.kill(pid for pid in orphans if pid not in janitors)
    if killed or orphans:
        remove_left_folders()
    return bool(janitors)


def _children() -> list[int]:
    try:
        with open(f"/proc/{os.getpid()}/task/{os.getpid()}/children") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return []


def main() -> None:
    """`python -m lockstep.ranks.server FD MODULE…`: serve the client at the other end; import these modules when idle."""
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # The folder in which the client was started, put there by -m; no rank's business.
    control = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    processes.close_to_others(True)
    warm_up()
    with control:
        control.send(b"ready")
        serve(control, sys.argv[2:])


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        main()
    os._exit(0)
