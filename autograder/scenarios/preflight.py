"""On the ranks: `preflight` in environments that somebody has broken. Nothing is judged here.

Each case is prepared on its ranks before the call: a variable is taken away or changed, a rank does not come, a port
leads nowhere, an all-reduce returns something else. What comes back is observed, and whether everything is as it was
before.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import gc
import importlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from lockstep.grading.on_rank import observe, rank, world_size

AWAKE_SECONDS = 10.0
"""For so long a rank could still do something by itself: who waits with a deadline of his own must not be taken to hang."""

LONGEST_WAIT = 15.0
"""Of the timeouts until which somebody does wait: what is longer is for cases in which nobody should."""

TICK_SECONDS = 0.05
"""How long whoever looks after the others sleeps at a time. A busy machine stretches a tick for all of them."""

HEAD_START = 0.5
"""So much later rank 0 calls than the others, which look for a store that it has not opened yet; or rank 1 than its double."""

_sockets: list[socket.socket] = []


def _stay_awake(timeout: float) -> None:
    """Keep whoever may wait from being taken to hang: for so long, and as long as a run may stand still."""

    waits = min(timeout, LONGEST_WAIT)

    def stir() -> None:
        give_up = time.monotonic() + waits
        while time.monotonic() < give_up:
            time.sleep(1.0)

    for work, arguments in ((time.sleep, (waits + AWAKE_SECONDS,)), (stir, ())):
        threading.Thread(target=work, args=arguments, daemon=True).start()


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
    environment, open_before, began = dict(os.environ), dist.is_initialized(), time.monotonic()
    try:
        returned = submission.preflight(timeout, **options)
    except NotImplementedError:
        raise
    except (Exception, SystemExit) as error:
        return {"raised": f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"}
    proper = isinstance(returned, list) and all(isinstance(line, str) for line in returned)
    return {
        "raised": "",
        "seconds": time.monotonic() - began,
        "type": type(returned).__name__ if not proper else "",
        "lines": list(returned) if proper else [],
        "group": dist.is_initialized() if not open_before else not dist.is_initialized(),
        "changed": sorted(
            name for name in {*environment, *os.environ} if environment.get(name) != os.environ.get(name)
        ),
    }


def _meeting_place() -> dist.PrefixStore:
    """The agent's store, for this file's own use."""
    patience = datetime.timedelta(seconds=60)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, None, False, timeout=patience, wait_for_workers=False)
    return dist.PrefixStore("lockstep", store)


def _gather(store: dist.Store, what: str) -> None:
    """Go on together."""
    store.add(what, 1)
    while store.add(what, 0) < world_size():
        time.sleep(0.01)


def _closed_port(listening: bool) -> int:
    """A port where nobody listens, or where somebody does who never says anything."""
    port = _own_port()
    if listening:
        _sockets[-1].listen(16)
    return port


def _full_port() -> int:
    """A port whose queue is full: who connects gets no answer, as from a firewall that drops what it doesn't like."""
    port = _own_port()
    _sockets[-1].listen(0)
    for _ in range(4):
        waiting = socket.socket()
        waiting.setblocking(False)
        waiting.connect_ex(("127.0.0.1", port))
        _sockets.append(waiting)
    return port


def _let_end(threads: list[threading.Thread], seconds: float) -> None:
    """Wait until these have ended, at most so long, and take away what only they have held: a store that dies, dies now."""
    give_up = time.monotonic() + seconds
    while any(thread.is_alive() for thread in threads) and time.monotonic() < give_up:
        time.sleep(TICK_SECONDS)
    gc.collect()


def _own_port(shared: bool = False) -> int:
    """A port that nobody else gets: a bound socket that does not listen refuses connections. `shared`: it can be opened."""
    place = socket.socket()
    place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, shared)
    place.bind(("127.0.0.1", 0))
    _sockets.append(place)
    return int(place.getsockname()[1])


def alone(submission, cases: list[dict[str, str | None]], timeout: float) -> None:
    """One rank, one broken environment after the other."""
    _stay_awake(timeout)
    found = []
    for number, changes in enumerate(cases):
        observe("case", number)
        with _environment(changes):
            found.append(_call(submission, timeout))
    observe("found", found)


def ports(submission, kind: str, timeout: float) -> None:
    """One rank, and a port where no store is: nobody listens, it is taken, somebody else listens there, or none answers."""
    _stay_awake(timeout)
    observe("case", kind)
    port = _full_port() if kind == "dropped" else _closed_port(listening=kind != "nobody")
    observe("port", port)
    changes = {"MASTER_PORT": str(port)}
    if kind == "taken":
        changes["TORCHELASTIC_USE_AGENT_STORE"] = None  # then rank 0 itself has to host the store
    with _environment(changes):
        observe("found", [_call(submission, timeout)])


def devices(submission, gpus: int, local_rank: int, backend: str | None, timeout: float) -> None:
    """One rank on a machine that seems to have so many GPUs, on which no nccl group can be made."""
    _stay_awake(timeout)
    observe("case", "devices")
    _pretend(gpus)
    with _environment({"LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": None}):
        observe("found", [_call(submission, timeout, **({"backend": backend} if backend else {}))])
    observe("asked for", _asked)


def _pretend(gpus: int) -> None:
    """From now on torch says that this node has so many."""
    cuda = {
        "is_available": lambda: gpus > 0, "device_count": lambda: gpus, "set_device": lambda device: None,
        "current_device": lambda: 0, "is_initialized": lambda: gpus > 0,
    }  # fmt: skip
    accelerator = {
        "is_available": lambda: gpus > 0, "device_count": lambda: gpus, "set_device_index": lambda device: None,
        "set_device_idx": lambda device: None, "current_device_index": lambda: 0, "current_device_idx": lambda: 0,
        "current_accelerator": lambda check_available=False: torch.device("cuda") if gpus else None,
    }  # fmt: skip
    for name, pretended in cuda.items():
        setattr(torch.cuda, name, pretended)
    for name, pretended in accelerator.items():
        setattr(torch.accelerator, name, pretended)
    dist.is_nccl_available = dist.distributed_c10d.is_nccl_available = lambda: gpus > 0


_asked: list[str] = []  # the backends that groups were to have
_lie = ""
"""What goes wrong in a call. "more": this rank's all_reduce adds one. "twice", "told": one rank counts twice and one not
at all; "told": here. "no group": init_process_group raises. "no sum": all_reduce raises."""
_met = False  # whether this rank has written into a store, or asked for a group


def before() -> None:
    """Ahead of the submission's import, so that a name which it imports is watched as well."""
    honest, gather, make = dist.all_reduce, dist.all_gather, dist.init_process_group

    def all_reduce(tensor, *arguments, **options):
        if _lie in ("", "no group"):
            return honest(tensor, *arguments, **options)
        if _lie == "no sum":
            raise RuntimeError("Connection closed by peer")
        wrong = torch.ones_like(tensor)
        if _lie != "more":
            group = options.get("group")
            everybody = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
            gather(everybody, tensor, group=group)
            wrong = everybody[-1] - everybody[0]
        work = honest(tensor, *arguments, **options)
        if work is not None:
            work.wait()
        if _lie != "twice":
            tensor += wrong
        return work

    def init_process_group(backend=None, *arguments, **options):
        global _met
        _met = True
        if _lie == "no group":
            raise RuntimeError("connectFullMesh failed: no route to host")
        _asked.append(str(backend))
        return make(backend, *arguments, **options)

    for module in (dist, dist.distributed_c10d):
        module.all_reduce, module.init_process_group = all_reduce, init_process_group
    for name in ("set", "add", "append", "compare_set", "multi_set"):
        setattr(dist.Store, name, _watched(getattr(dist.Store, name)))


def _watched(write: Callable[..., object]) -> Callable[..., object]:
    """A method of a store that writes, and notes that it was called."""

    @functools.wraps(write)
    def watched(*arguments, **options):
        global _met
        _met = True
        return write(*arguments, **options)

    return watched


LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def together(submission, case: str, odd: list[int], changes: dict[str, str | None], timeout: float) -> None:
    """All ranks; on the ranks `odd` something is different."""
    global _lie, _met
    store, me = _meeting_place(), rank()
    _gather(store, "ready")
    _stay_awake(timeout)
    observe("case", case)
    here = changes if me in odd else {}
    if case == "restarted":
        _call(submission, timeout)
        left = _left(store)
        observe("left", left)
        store.add("left", len(left))
        _gather(store, "restart")
        if store.add("left", 0):  # the second attempt may hang
            return
        importlib.reload(submission)  # knows nothing of the attempt before, as a new process would
        here = {"TORCHELASTIC_RESTART_COUNT": "1"}
    if case == "doubled" and me == 1:
        time.sleep(HEAD_START)
    if case.startswith("given"):
        dist.init_process_group("gloo")
    if case == "given":
        here = dict.fromkeys(LAUNCHERS)
    if "missing" in case and me in odd:
        if me == odd[0]:
            observe("late", _late(store, world_size() - len(odd), 3 * timeout))
        return
    if case == "version" and me in odd:
        _pretend_version(str(changes["patch"]))
        here = {}
    observe("version", str(torch.__version__))
    if case == "gpus" and me in odd:
        _pretend(2)
    if case == "lie":
        _lie = "more" if me in odd else ""
    elif case == "given lie":
        _lie = "told" if me in odd else "twice"
    elif case == "no group":
        _lie = "no group" if me in odd else ""
    elif case == "no sum":
        _lie = case
    _met = False
    with _environment(here):
        found = _call(submission, timeout)
    observe("met", _met)
    _lie = ""
    observe("found", found)
    store.add("returned", 1)
    if case == "well" and not found["raised"] and not dist.is_initialized():
        left = _left(store)
        observe("left", left)
        if left:  # the job may hang
            return
        dist.init_process_group("gloo")  # as the job would, next
    if case in ("well", "given") and dist.is_initialized():
        total = torch.tensor([float(me + 1)])
        dist.all_reduce(total)
        observe("sum", [float(total), dist.get_world_size() == world_size()])


def _left(store: dist.PrefixStore) -> list[str]:
    """The keys of this rank's own group in the job's store.

    Without a store of its own, init_process_group writes a rank's address under such a name. Others may have started
    theirs by now, but nobody writes this rank's.
    """
    keys = getattr(store.underlying_store, "list_keys", list)()  # not in every version of torch
    return [key for key in keys if "default_pg/" in key and key.endswith(f"/{rank()}")]


def _pretend_version(patch: str) -> None:
    """From now on torch says that it is this patch of its version."""
    torch.__version__ = torch.version.__version__ = f"{torch.__version__.rpartition('.')[0]}.{patch}"


def _late(store: dist.Store, others: int, seconds: float) -> bool:
    """Whether so many have still not returned after this time."""
    for _ in range(int(seconds / TICK_SECONDS)):
        if store.add("returned", 0) == others:
            return False
        time.sleep(TICK_SECONDS)
    return True


def hosted(submission, well: bool, timeout: float) -> None:
    """All ranks, and no agent: rank 0 has to host the store, also for the job that comes next.

    `well`: there is no problem. Otherwise no group is made, which would keep the store as well.
    """
    store, me, patience = _meeting_place(), rank(), datetime.timedelta(seconds=5)
    _stay_awake(timeout)
    observe("case", "hosted")
    if me == 0:
        store.set("port", str(_own_port(shared=True)))
    port = int(store.get("port"))
    if not well and me == 1:
        _pretend_version("99")
    # Rank 0 comes last: until then nobody listens at the port, which is no problem yet.
    if me > 0:
        store.add("calling", 1)
    while me == 0 and store.add("calling", 0) < world_size() - 1:
        time.sleep(0.01)
    time.sleep(HEAD_START if me == 0 else 0)
    with _environment({"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}):
        threads = threading.enumerate()
        found = _call(submission, timeout)
        observe("found", found)
        _let_end([thread for thread in threading.enumerate() if thread not in threads], timeout)
        _gather(store, "returned")
        # First the others ask whether it is still there, then rank 0 opens it as init_process_group does.
        if me == 0:
            _gather(store, "asked")
        try:
            if well or me > 0:
                dist.TCPStore(
                    "127.0.0.1", port, None, me == 0, timeout=patience, wait_for_workers=False, multi_tenant=True
                )
            observe("job", "")
        except RuntimeError as error:
            observe("job", str(error).splitlines()[0])
        if me > 0:
            _gather(store, "asked")


def forsaken(submission, timeout: float) -> None:
    """Rank 0 only hosts the store, and takes it away as soon as another rank has written something there."""
    store, me = _meeting_place(), rank()
    _stay_awake(timeout)
    observe("case", "forsaken")
    if me == 0:
        port = _own_port(shared=True)
        hosted = dist.TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)
        empty = hosted.num_keys()
        store.set("port", str(port))
        for _ in range(int(3 * timeout / TICK_SECONDS)):
            if hosted.num_keys() > empty or store.add("returned", 0) == world_size() - 1:
                break
            time.sleep(TICK_SECONDS)
        del hosted
        observe("late", _late(store, world_size() - 1, 3 * timeout))
        return
    port = int(store.get("port"))
    with _environment({"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}):
        observe("found", _call(submission, timeout))
    store.add("returned", 1)
