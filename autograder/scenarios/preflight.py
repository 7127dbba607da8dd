"""On the ranks: `preflight` in environments that somebody has broken. Nothing is judged here.

Each case is prepared on its ranks before the call: a variable is taken away or changed, a rank does not come, a port
leads nowhere, an all-reduce returns something else. What comes back is observed, and whether everything is as it was
before.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import threading
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

from lockstep.grading.on_rank import observe, rank, world_size

AWAKE_SECONDS = 10.0
"""For so long a rank could still do something by itself: who waits with a deadline of his own must not be taken to hang."""

_sockets: list[socket.socket] = []


def _stay_awake() -> None:
    threading.Thread(target=time.sleep, args=(AWAKE_SECONDS,), daemon=True).start()


@contextlib.contextmanager
def _environment(changes: dict[str, str | None]) -> Iterator[None]:
    """These variables, and the old ones afterwards."""
    before = dict(os.environ)
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _call(submission, timeout: float, **options) -> dict[str, object]:
    """Call it, and say what it returned or raised."""
    environment, open_before = dict(os.environ), dist.is_initialized()
    try:
        returned = submission.preflight(timeout, **options)
    except NotImplementedError:
        raise
    except (Exception, SystemExit) as error:
        return {"raised": f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"}
    proper = isinstance(returned, list) and all(isinstance(line, str) for line in returned)
    return {
        "raised": "",
        "type": type(returned).__name__ if not proper else "",
        "lines": list(returned) if proper else [],
        "group": dist.is_initialized() if not open_before else not dist.is_initialized(),
        "changed": sorted(
            name for name in {*environment, *os.environ} if environment.get(name) != os.environ.get(name)
        ),
    }


def _gather() -> None:
    """Begin together: how long the processes took to start is none of the submission's business."""
    patience = datetime.timedelta(seconds=60)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, None, False, timeout=patience, wait_for_workers=False)
    store.add("lockstep/ready", 1)
    while store.add("lockstep/ready", 0) < world_size():
        time.sleep(0.01)


def _closed_port(listening: bool) -> int:
    """A port where nobody listens, or where somebody does who never says anything."""
    place = socket.socket()
    place.bind(("127.0.0.1", 0))
    if listening:
        place.listen(16)
    _sockets.append(place)  # a bound socket that does not listen refuses connections, and nobody else gets its port
    return int(place.getsockname()[1])


def alone(submission, cases: list[dict[str, str | None]], timeout: float) -> None:
    """One rank, one broken environment after the other."""
    _stay_awake()
    found = []
    for number, changes in enumerate(cases):
        observe("case", number)
        with _environment(changes):
            found.append(_call(submission, timeout))
    observe("found", found)


def ports(submission, kind: str, timeout: float) -> None:
    """One rank, and a port where no store is: nobody listens, it is taken, or somebody else listens there."""
    _stay_awake()
    observe("case", kind)
    port = _closed_port(listening=kind != "nobody")
    observe("port", port)
    changes = {"MASTER_PORT": str(port)}
    if kind == "taken":
        changes["TORCHELASTIC_USE_AGENT_STORE"] = None  # then rank 0 itself has to host the store
    with _environment(changes):
        observe("found", [_call(submission, timeout)])


def devices(submission, gpus: int, local_rank: int, backend: str | None, timeout: float) -> None:
    """One rank on a machine that seems to have so many GPUs."""
    _stay_awake()
    observe("case", "devices")
    torch.cuda.is_available = lambda: gpus > 0
    torch.cuda.device_count = lambda: gpus
    torch.cuda.set_device = lambda device: None
    dist.is_nccl_available = dist.distributed_c10d.is_nccl_available = lambda: gpus > 0
    with _environment({"LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": None}):
        observe("found", [_call(submission, timeout, **({"backend": backend} if backend else {}))])


_liar = False  # from now on all_reduce adds one to whatever this rank gets


def before() -> None:
    """Ahead of the submission's import, so that a name which it imports is watched as well."""
    honest = dist.all_reduce

    def all_reduce(tensor, *arguments, **options):
        work = honest(tensor, *arguments, **options)
        if _liar:
            if work is not None:
                work.wait()
            tensor += 1
        return work

    dist.all_reduce = all_reduce
    dist.distributed_c10d.all_reduce = all_reduce


def together(submission, case: str, odd: int, changes: dict[str, str | None], timeout: float) -> None:
    """All ranks; on rank `odd` something is different."""
    global _liar
    _gather()
    _stay_awake()
    observe("case", case)
    me = rank()
    if case in ("given", "given and wrong"):
        dist.init_process_group("gloo")
    if case == "missing" and me == odd:
        return
    if case == "version" and me == odd:
        torch.__version__ = changes["torch"]
        torch.version.__version__ = changes["torch"]
        changes = {}
    _liar = case == "lie" and me == odd
    with _environment(changes if me == odd else {}):
        found = _call(submission, timeout)
    _liar = False
    observe("found", found)
    if case == "well" and not found["raised"] and not dist.is_initialized():
        dist.init_process_group("gloo")  # as the job would, next
    if case in ("well", "given") and dist.is_initialized():
        total = torch.tensor([float(me + 1)])
        dist.all_reduce(total)
        observe("sum", [float(total), dist.get_world_size() == world_size()])
