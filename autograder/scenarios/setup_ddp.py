"""On the ranks: `setup_ddp` and `cleanup_ddp` under the launchers that there are. Nothing is judged here.

`dist.init_process_group` is watched: what it was given, and what the launcher's variables said at that moment. When the
address was changed, nobody would ever answer there, so the call ends with an error instead of waiting half an hour.
"""

from __future__ import annotations

import datetime
import os
import socket
import sys

import torch
import torch.distributed as dist

from lockstep.grading.on_rank import mark, observe, raised_at, rank, world_size

LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT",
             "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID")  # fmt: skip

calls: list[str] = []
given: list[dict[str, object]] = []
address: dict[str, str | None] = {}
written: dict[str, str | None] = {}
"""The launchers' variables that were written while the submission ran, also with the value they had; None: removed."""
past_ports: set[int] = set()
stand_in = refusing = False
_init = dist.init_process_group


class AddressChanged(RuntimeError):
    """The submission replaced the launcher's MASTER_ADDR or MASTER_PORT."""


class NotRefused(Exception):
    """The submission went on to make a group that nobody could ever complete."""


def _where() -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in ("MASTER_PORT", "MASTER_ADDR")}


def init_process_group(backend=None, init_method=None, timeout=None, world_size=-1, rank=-1, store=None, group_name="",
                       pg_options=None, device_id=None, **kwargs):  # fmt: skip
    """`torch.distributed.init_process_group`, watched."""
    calls.append("init_process_group")
    given.append({"backend": backend, "rank": rank, "world_size": world_size, "device_id": str(device_id or ""),
                  "init_method": init_method, "own_store": store is not None})  # fmt: skip
    if refusing and (store is not None or (init_method or "env://") != "env://" or None not in _where().values()):
        raise NotRefused(f"{rank} of {world_size}")
    moved = {
        name: value for name, value in _where().items() if address.get(name) is not None and value != address[name]
    }
    if init_method and init_method.startswith("tcp://") and (address.get("MASTER_PORT") or "") not in init_method:
        moved["init_method"] = init_method
    under = store
    while isinstance(under, dist.PrefixStore):
        under = under.underlying_store
    if (port := getattr(under, "port", None)) in past_ports:
        raise AddressChanged(f"MASTER_PORT|{address['MASTER_PORT']}|the store of an earlier group, at port {port}")
    if moved and store is None:
        name, value = next(iter(moved.items()))
        raise AddressChanged(f"{name}|{address.get(name) or address.get('MASTER_PORT')}|{value}")
    if stand_in:
        backend, device_id = "gloo", None
    return _init(
        backend, init_method, timeout, world_size, rank, store, group_name, pg_options, device_id=device_id, **kwargs
    )


def before() -> None:
    """Put the watch in place ahead of the submission's import."""
    address.update(_where())
    dist.init_process_group = init_process_group
    dist.distributed_c10d.init_process_group = init_process_group
    write, remove = os._Environ.__setitem__, os._Environ.__delitem__

    def noted(self, name, value) -> None:
        if name in LAUNCHERS:
            written[name] = str(value)
        write(self, name, value)

    def taken(self, name) -> None:
        if name in LAUNCHERS and name in self:
            written[name] = None
        remove(self, name)

    os._Environ.__setitem__, os._Environ.__delitem__ = noted, taken


class Launcher:
    """Plays a launcher built on mp.spawn: sets an address and nothing else, a new one for each job."""

    def __init__(self) -> None:
        self.rank, self.world_size = rank(), world_size()
        self.store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False,
                                   timeout=datetime.timedelta(seconds=60))  # fmt: skip
        self.jobs = 0
        for name in list(os.environ):
            if name in LAUNCHERS or name.startswith(("TORCHELASTIC", "ROLE_", "GROUP_")):
                del os.environ[name]
        written.clear()

    def new_job(self) -> None:
        """Tell all ranks of a free port that rank 0 chose, at an address that nobody has by default."""
        self.jobs += 1
        past_ports.add(int(address.get("MASTER_PORT") or 0))
        key = f"lockstep/port/{self.jobs}"
        if self.rank == 0:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                self.store.set(key, str(probe.getsockname()[1]))
        os.environ.update(MASTER_ADDR=f"127.0.{self.jobs}.29", MASTER_PORT=self.store.get(key).decode())
        address.update(_where())
        written.clear()


def _use(label: str, number: float) -> None:
    """What a caller sees of the group, and the sum of numbers of which each rank knows its own."""
    seen: dict[str, object] = {"initialized": dist.is_initialized()}
    if dist.is_initialized():
        seen |= {"rank": dist.get_rank(), "world_size": dist.get_world_size(), "backend": dist.get_backend()}
        total = torch.tensor([number], device="cuda" if dist.get_backend() == "nccl" else "cpu")
        dist.all_reduce(total)
        seen["sum"] = float(total)
    observe(label, seen)


def joins(submission, under: str, number: float) -> None:
    """Set up, use the group, clean up."""
    me, world = rank(), world_size()
    if under == "spawn":
        Launcher().new_job()
    written.clear()
    returned = submission.setup_ddp(me, world)
    observe("returned_value", repr(returned))
    observe("given", given)
    _use("first", number)
    submission.cleanup_ddp()
    observe("written", dict(written))
    observe("open_after_cleanup", dist.is_initialized())


def twice(submission, number: float) -> None:
    """Clean up without a group; set up, clean up twice; set up and clean up once more, as a second job would."""
    me, world = rank(), world_size()
    launcher = Launcher()
    launcher.new_job()
    errors: dict[str, str] = {}

    def attempt(label: str, call, *arguments) -> None:
        try:
            call(*arguments)
        except NotImplementedError:
            raise
        except Exception as error:
            errors[label] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"

    attempt("cleanup without a group", submission.cleanup_ddp)
    attempt("setup", submission.setup_ddp, me, world)
    _use("first", number)
    mark("cleanup")
    attempt("cleanup", submission.cleanup_ddp)
    mark("cleaned up")
    attempt("second cleanup", submission.cleanup_ddp)
    observe("open_between", dist.is_initialized())
    if not errors and not dist.is_initialized():
        # As who starts a second group under torchrun has to set it.
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
        launcher.new_job()
        attempt("second setup", submission.setup_ddp, me, world)
        observe("written again", dict(written))
        if "second setup" not in errors:
            _use("second", number)
            attempt("last cleanup", submission.cleanup_ddp)
    observe("errors", errors)


def limits(submission, number: float) -> None:
    """A single rank without any variable, calls that are to be refused, and a call in a group that the caller has made."""
    me, world = rank(), world_size()
    under_torchrun = dict(os.environ)
    launcher = Launcher()
    address.clear()
    nothing = dict(os.environ)
    for label, variables in (
        ("alone", {}),
        ("alone with its rank", {"RANK": "0", "WORLD_SIZE": "1"}),
        ("alone with an address", {"MASTER_ADDR": "127.0.0.29"}),
    ):
        os.environ.update(variables)
        written.clear()
        _observe_error(f"{label} raised", submission, 0, 1)
        _use(label, number)
        observe(f"written {label}", dict(written))
        _error(submission.cleanup_ddp)
        if dist.is_initialized():
            dist.destroy_process_group()
        _renew(nothing)

    launcher.new_job()
    there = dict(os.environ)
    _refuse(True)
    refused = {}
    for label, arguments, variables in (
        ("rank too large", (world + me, world), {}),
        ("negative rank", (-1, world), {}),
        ("no ranks", (0, 0), {}),
        ("RANK contradicts", (me, world), {"RANK": str((me + 1) % world)}),
        ("WORLD_SIZE contradicts", (me, world), {"WORLD_SIZE": str(world + 1)}),
        ("WORLD_SIZE contradicts a single rank", (0, 1), {"WORLD_SIZE": str(world)}),
        ("no MASTER_ADDR", (me, world), {"MASTER_ADDR": None}),
        ("no MASTER_PORT", (me, world), {"MASTER_PORT": None}),
    ):
        os.environ.update({name: value for name, value in variables.items() if value is not None})
        for name in (name for name, value in variables.items() if value is None):
            del os.environ[name]
        address.update(_where())
        refused[label] = _error(submission.setup_ddp, *arguments)
        _renew(there)
    observe("refused", refused)
    _refuse(False)

    _renew(under_torchrun)
    address.update(_where())
    # A separate store: a second group through the same one could find what the first has left there.
    store = dist.PrefixStore("caller", launcher.store)
    dist.init_process_group("gloo", store=store, rank=me, world_size=world)
    mine = dist.group.WORLD
    observe("in a group", _error(submission.setup_ddp, me, world))
    observe("kept", dist.is_initialized() and dist.group.WORLD is mine)
    _error(submission.cleanup_ddp)
    observe("open after cleanup", dist.is_initialized())
    dist.destroy_process_group() if dist.is_initialized() else None


def _error(call, *arguments) -> str:
    """The name of what it raised, with those of its bases; empty where it raised nothing."""
    try:
        call(*arguments)
    except NotImplementedError:
        raise
    except Exception as caught:
        return " ".join(base.__name__ for base in type(caught).__mro__)
    return ""


def _observe_error(label: str, submission, *arguments) -> None:
    """What setup_ddp raised, with its first line, and on which line of the submission; "" where it raised nothing."""
    said, line = "", 0
    try:
        submission.setup_ddp(*arguments)
    except NotImplementedError:
        raise
    except Exception as caught:
        said, line = raised_at(submission, caught)
    observe(label, said)
    observe(f"{label} at", line)


def _renew(environment: dict[str, str]) -> None:
    for name in [name for name in os.environ if name not in environment]:
        del os.environ[name]
    os.environ.update(environment)


def _refuse(now: bool) -> None:
    """While it is on, nobody hosts or joins a store: what is not refused ends there instead of waiting."""
    global refusing
    refusing = now
    _replace(not_a_store if not now else _TCPStore, _TCPStore if not now else not_a_store, "TCPStore")


_TCPStore = dist.TCPStore


def not_a_store(*arguments, **options):
    """In the place of `dist.TCPStore`."""
    raise NotRefused("TCPStore")


def _replace(old, new, name: str) -> None:
    """Everywhere, also where it was imported by its name."""
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is old and module.__name__ != __name__:
            setattr(module, name, new)


def with_devices(submission, devices: int, number: float, under: str = "torchrun") -> None:
    """Set up on a machine that seems to have this many GPUs: a stand-in that notes what is chosen, and when. Without
    torchrun each rank then sets up again, alone and without variables.
    """
    global stand_in
    stand_in = True
    chosen: list[int] = []

    def set_device(device) -> None:
        calls.append("set_device")
        chosen.append(device if isinstance(device, int) else torch.device(device).index or 0)

    def current_device() -> int:
        return chosen[-1] if chosen else 0

    def has_gpus(*_) -> bool:
        return devices > 0

    cuda = {"is_available": has_gpus, "device_count": lambda: devices, "set_device": set_device, "init": lambda: None,
            "current_device": current_device, "is_initialized": has_gpus}  # fmt: skip
    accelerator = {
        "is_available": has_gpus, "device_count": lambda: devices, "current_device_index": current_device,
        "set_device_index": set_device, "current_device_idx": current_device, "set_device_idx": set_device,
        "current_accelerator": lambda check_available=False: torch.device("cuda") if devices else None,
    }  # fmt: skip
    for module, pretended in (
        (torch.cuda, cuda),
        (getattr(torch, "accelerator", None), accelerator),
        (dist, {"is_nccl_available": has_gpus}),
    ):
        for name, function in pretended.items():
            if hasattr(module, name):
                _replace(getattr(module, name), function, name)
    me, world, local_rank = rank(), world_size(), int(os.environ["LOCAL_RANK"])
    if under == "spawn":
        Launcher().new_job()
    submission.setup_ddp(me, world)
    _use("group", number)  # a group that is left before everybody has joined it fails at random
    observe("calls", calls)
    observe("chosen", chosen)
    observe("given", list(given))
    observe("local_rank", local_rank)
    submission.cleanup_ddp()
    if under == "spawn":
        address.clear()
        for name in LAUNCHERS:
            os.environ.pop(name, None)
        given.clear()
        _error(submission.setup_ddp, 0, 1)
        observe("given alone", given)
        submission.cleanup_ddp()
