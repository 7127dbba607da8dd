"""On the ranks: `setup_ddp` and `cleanup_ddp` under the launchers that there are. Nothing is judged here.

`dist.init_process_group` is watched: what it was given, and what the launcher's variables said at that moment. When the
address was changed, nobody would ever answer there, so the call ends with an error instead of waiting half an hour.
"""

from __future__ import annotations

import datetime
import os
import socket

import torch
import torch.distributed as dist

from lockstep.grading.on_rank import rank, world_size
from lockstep.ranks import observe

LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT",
             "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID")  # fmt: skip

calls: list[str] = []
given: list[dict[str, object]] = []
address: dict[str, str | None] = {}
stand_in = False
_init = dist.init_process_group


class AddressChanged(RuntimeError):
    """The submission replaced the launcher's MASTER_ADDR or MASTER_PORT."""


class NotRefused(RuntimeError):
    """The submission went on to make a group with a rank that is not in it."""


def _where() -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in ("MASTER_PORT", "MASTER_ADDR")}


def init_process_group(backend=None, init_method=None, timeout=None, world_size=-1, rank=-1, store=None, group_name="",
                       pg_options=None, device_id=None, **kwargs):  # fmt: skip
    """`torch.distributed.init_process_group`, watched."""
    calls.append("init_process_group")
    given.append({"backend": backend, "rank": rank, "world_size": world_size, "device_id": str(device_id or ""),
                  "init_method": init_method, "own_store": store is not None})  # fmt: skip
    moved = {
        name: value for name, value in _where().items() if address.get(name) is not None and value != address[name]
    }
    if init_method and init_method.startswith("tcp://") and address.get("MASTER_PORT") not in init_method:
        moved["init_method"] = init_method
    if moved and store is None:
        name, value = next(iter(moved.items()))
        raise AddressChanged(f"{name}|{address.get(name) or address.get('MASTER_PORT')}|{value}")
    if world_size > 0 and rank >= world_size:
        raise NotRefused(f"{rank} of {world_size}")
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

    def new_job(self) -> None:
        """Tell all ranks of a free port that rank 0 chose."""
        self.jobs += 1
        key = f"lockstep/port/{self.jobs}"
        if self.rank == 0:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                self.store.set(key, str(probe.getsockname()[1]))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=self.store.get(key).decode())
        address.update(_where())


def _use(label: str, number: float) -> None:
    """What a caller sees of the group, and the sum of numbers of which each rank knows its own."""
    seen: dict[str, object] = {"initialized": dist.is_initialized()}
    if dist.is_initialized():
        seen |= {"rank": dist.get_rank(), "world_size": dist.get_world_size(), "backend": dist.get_backend()}
        total = torch.tensor([number])
        dist.all_reduce(total)
        seen["sum"] = float(total)
    observe(label, seen)


def joins(submission, under: str, number: float) -> None:
    """Set up, use the group, clean up, and all of it once more."""
    me, world = rank(), world_size()
    if under == "spawn":
        Launcher().new_job()
    environment = {name: os.environ.get(name) for name in LAUNCHERS}
    returned = submission.setup_ddp(me, world)
    observe("returned_value", repr(returned))
    observe(
        "changed",
        {
            name: [old, os.environ.get(name)]
            for name, old in environment.items()
            if os.environ.get(name) != old and old is not None
        },
    )
    observe("given", given)
    _use("first", number)
    submission.cleanup_ddp()
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
    attempt("cleanup", submission.cleanup_ddp)
    attempt("second cleanup", submission.cleanup_ddp)
    observe("open_between", dist.is_initialized())
    if not errors and not dist.is_initialized():
        launcher.new_job()
        attempt("second setup", submission.setup_ddp, me, world)
        if "second setup" not in errors:
            _use("second", number)
            attempt("last cleanup", submission.cleanup_ddp)
    observe("errors", errors)


def refuses(submission) -> None:
    """Call it with a rank that the world does not have."""
    error = ""
    Launcher().new_job()
    try:
        submission.setup_ddp(world_size() + rank(), world_size())
    except NotImplementedError:
        raise
    except Exception as caught:
        error = type(caught).__name__
    observe("error", error)


def with_devices(submission, devices: int, number: float) -> None:
    """Set up on a machine that seems to have so many GPUs: a stand-in that notes what is chosen, and when."""
    global stand_in
    stand_in = True
    chosen: list[str] = []

    def set_device(device) -> None:
        calls.append("set_device")
        index = device.index if isinstance(device, torch.device) else device
        chosen.append(str(index))

    torch.cuda.is_available = lambda: devices > 0
    torch.cuda.device_count = lambda: devices
    torch.cuda.set_device = set_device
    torch.cuda.init = lambda: None
    submission.setup_ddp(rank(), world_size())
    _use("group", number)  # a group that is left before everybody has joined it fails at random
    observe("calls", calls)
    observe("chosen", chosen)
    observe("given", given)
    observe("local_rank", int(os.environ["LOCAL_RANK"]))
    submission.cleanup_ddp()
