"""In a launcher's process: `launch_distributed` with a model that notes where it is trained, and fails where it is told
to. Nothing is judged here.

Ranks may come from any way to start a process, so they report through a file: what they inherit of their launcher is its
environment, which names that file.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import socket
import sys
import time
from multiprocessing import util
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import nn
from torch.utils.data import TensorDataset

from lockstep.grading.on_rank import observe

FEATURES, CLASSES = 6, 3
JOURNAL, FAILURE = "LAUNCH_JOURNAL", "LAUNCH_FAILURE"
PATIENCE_SECONDS = 5.0
"""How long a launcher may stand still when a rank has failed: it may give the others time to say what they saw."""
GONE_SECONDS = 2.0
ENDING_SECONDS = 15.0
"""How long a rank that failed may take to leave: on a busy machine its interpreter's end alone takes seconds."""
OUTLIVING_SECONDS = 60.0
"""How long a rank that is to outlive the one that failed does nothing: it ends only when it is ended."""
LINGERING_SECONDS = 1.5
"""How much longer than the others a rank takes that is the last to leave."""
STILL_LOOKS = 10

_make_group, _destroy = c10d._new_process_group_helper, dist.destroy_process_group


class Classifier(nn.Module):
    """A linear classifier with the same first weights in every process; notes which process trains it.

    Its state_dict is not what named_parameters() gives: the layer has two names, one of which ends as DDP's prefix does,
    and of its buffers one counts the steps, one is larger than a pipe that nobody reads, and one isn't in it. Its types are
    float64 and int64.
    """

    def __init__(self) -> None:
        super().__init__()
        self.submodule = self.tied = nn.Linear(FEATURES, CLASSES, dtype=torch.float64)
        with torch.no_grad():
            self.tied.weight.copy_(torch.linspace(-0.5, 0.5, FEATURES * CLASSES).view(CLASSES, FEATURES))
            self.tied.bias.zero_()
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.zeros(10_000, dtype=torch.float64))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.steps = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, FEATURES) → (B, CLASSES)."""
        self.steps += 1
        self.batches += self.training
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (-1, 1)
        if self.steps == 1:
            _note("trains", rank, world_size)
            _replace(_destroy, destroy_process_group)
        _fail(self.steps, rank)
        return self.submodule(x.double())


class Rough(Classifier):
    """With a buffer of a type that NumPy doesn't have."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rough", torch.tensor(0.5, dtype=torch.bfloat16))


def _new_process_group_helper(*arguments, **options):
    """Every way to make a group comes through here, after the ranks' meeting and before their first connection."""
    _note("joins", arguments[1], arguments[0])
    util.Finalize(None, _let_the_cause_come_first, (arguments[1],), exitpriority=0)
    _fail("joining", arguments[1])
    return _make_group(*arguments, **options)


def destroy_process_group(*arguments, **options) -> None:
    """Leave the group; a rank that is to fail at the very end fails then, and one that is to be the last waits."""
    rank = dist.get_rank() if dist.is_initialized() else -1
    lingers = json.loads(os.environ.get(FAILURE, "{}")).get("lingers") == rank
    if lingers:
        _note("lingers", rank, 1)
    _destroy(*arguments, **options)
    if lingers:
        time.sleep(LINGERING_SECONDS)
        _note("leaves", rank, 1)
    _fail("leaving", rank)


c10d._new_process_group_helper = _new_process_group_helper


def _replace(old, new) -> None:
    """Everywhere, also where it was imported by its name."""
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(old.__name__) is old:
            setattr(module, old.__name__, new)


def _note(what: str, rank: int, world_size: int) -> None:
    if JOURNAL in os.environ:
        port = os.environ.get("MASTER_PORT", "")
        line = {"what": what, "pid": os.getpid(), "rank": rank, "world_size": world_size, "port": port}
        with open(os.environ[JOURNAL], "a") as journal:
            journal.write(json.dumps(line) + "\n")


def _fail(moment: str | int, rank: int) -> None:
    failure = json.loads(os.environ.get(FAILURE, "{}"))
    if (failure.get("moment"), failure.get("outlived_by")) == (moment, rank):
        with contextlib.suppress(ValueError):  # only a main thread may
            signal.signal(signal.SIGTERM, _leave_slowly)
        until = time.monotonic() + OUTLIVING_SECONDS
        while time.monotonic() < until:
            time.sleep(0.2)  # in one sleep, a signal that came just before it would wait for its end
        _note("outlives", rank, 1)
    if (failure.get("moment"), failure.get("rank")) != (moment, rank):
        return
    _note("fails", rank, dist.get_world_size() if dist.is_initialized() else 1)
    if failure["how"] == "raise":
        raise ValueError(f"rank {rank} ran out of luck ({failure['word']})")
    if failure["how"] == "exit":
        os._exit(3)
    os.kill(os.getpid(), signal.SIGKILL)


def _leave_slowly(*_) -> None:
    """What a rank does that was asked to end: it puts its things away first."""
    time.sleep(LINGERING_SECONDS)
    os._exit(1)


def _let_the_cause_come_first(rank: int) -> None:
    """At the end of a rank to which another's failure was only an echo: `mp.spawn` takes any one of those that have ended
    when it looks, and on a busy machine it looks late. So wait until it has seen the cause and ends this process, or is
    found asleep, waiting for something else.
    """
    failure = json.loads(os.environ.get(FAILURE, "{}"))
    if failure.get("rank", rank) == rank or JOURNAL not in os.environ:
        return
    causes = [one["pid"] for one in _read(Path(os.environ[JOURNAL])) if one["what"] == "fails"]
    give_up = time.monotonic() + ENDING_SECONDS
    while any(_runs(pid) for pid in causes) and time.monotonic() < give_up:
        time.sleep(0.02)
    give_up, still, before = time.monotonic() + GONE_SECONDS, 0, []
    while causes and still < STILL_LOOKS and time.monotonic() < give_up:
        time.sleep(0.02)
        now = [_standing(pid) for pid in (failure["launcher"], os.getppid())]
        quiet = now == before and all(" S " in stands for stands in now)
        still, before = (still + 1 if quiet else 0), now


def _standing(pid: int) -> str:
    """A process's state, and how often it gave up the processor; empty when it is gone."""
    try:
        counters = Path(f"/proc/{pid}/status").read_text().partition("voluntary_ctxt_switches:")[2]
        return f" {Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0]} {counters.split()[:1]}"
    except OSError:
        return " S "


def _read(journal: Path) -> list[dict]:
    return [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []


# One launch after the other ----------------------------------------------------------------------------------------


def in_turn(submission, launches: list[dict], x: torch.Tensor, y: torch.Tensor) -> None:
    """Launch once for each, after two launches of worlds that there are not; report what came of each."""
    refused = {}
    for world_size in (0, -1):
        try:
            returned = submission.launch_distributed(world_size, Classifier, TensorDataset(x, y), 1)
            refused[str(world_size)] = f"returned a {type(returned).__name__}"
        except NotImplementedError:
            raise
        except Exception as error:
            refused[str(world_size)] = type(error).__name__
    for number, launch in enumerate(launches):
        observe(f"launch {number}", _launch(submission, number, launch, x, y))
    observe("refused", refused)


def _launch(submission, number: int, launch: dict, x: torch.Tensor, y: torch.Tensor) -> dict:
    """Launch, and say what came back, which processes took part, and what is left of it."""
    journal = Path.cwd() / f"journal-{number}"
    os.environ |= {JOURNAL: str(journal), **launch.get("environment", {})}
    before = dict(os.environ)
    data = TensorDataset(x, y)
    seen: dict = {"launcher": os.getpid()}
    try:
        model = Rough if launch.get("rough") else Classifier
        returned = submission.launch_distributed(launch["world_size"], model, data, launch["epochs"])
        seen["type"] = type(returned).__name__
        if isinstance(returned, dict):
            tensors = {
                str(name): value for name, value in returned.items() if isinstance(value, torch.Tensor) and value.is_cpu
            }
            seen |= {"weights": tensors, "others": sorted(str(name) for name in returned if str(name) not in tensors)}
    except BaseException as error:
        if not launch.get("caught"):
            raise
        seen["error"] = f"{type(error).__name__}: {error}"
        seen["is_exception"] = isinstance(error, Exception)
    at_return = [one["pid"] for one in _read(journal) if one["pid"] != os.getpid()]
    seen["early"] = sum(_runs(pid) for pid in set(at_return)) if "error" in seen else 0
    seen["changed"] = sorted(n for n in {*before, *os.environ} if before.get(n) != os.environ.get(n))
    seen["noted"] = _read(journal)
    journal.unlink(missing_ok=True)
    seen["running"] = _still_running({one["pid"] for one in seen["noted"]} - {os.getpid()})
    return seen


def _still_running(ranks: set[int]) -> int:
    """How many of these ranks, and of this process's other children, run on, where they are not just about to end."""
    give_up = time.monotonic() + GONE_SECONDS
    while True:
        running = sum(_runs(pid) for pid in ranks | {child.pid for child in multiprocessing.active_children()})
        if not running or time.monotonic() > give_up:
            return running
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except ProcessLookupError:
        return False
    except OSError:
        return Path("/proc").is_dir() is False


# All at once -------------------------------------------------------------------------------------------------------


def at_once(submission, launches: list[dict], x: torch.Tensor, y: torch.Tensor) -> None:
    """Launch all of them at the same time, each from a process of its own, and report what came of each."""
    children = {}
    other = socket.create_server(("127.0.0.1", 0))
    for number, launch in enumerate(launches):
        if "environment" in launch:
            launch["environment"]["MASTER_PORT"] = str(other.getsockname()[1])
        pid = os.fork()
        if not pid:
            status = 1
            try:
                os.environ[FAILURE] = json.dumps(
                    launch["failure"] | {"launcher": os.getpid(), "lingers": launch.get("lingers")}
                )
                torch.save(_launch(submission, number, launch | {"caught": True}, x, y), f"launch-{number}")
                status = 0
            finally:
                os._exit(status)
        children[pid] = number
    last = time.monotonic()
    while children:
        pid, _ = os.waitpid(-1, os.WNOHANG)
        if pid in children:
            last = time.monotonic()
            result = Path(f"launch-{children.pop(pid)}")
            if result.exists():
                observe(result.name.replace("-", " "), torch.load(result))
                result.unlink()
        elif time.monotonic() - last < PATIENCE_SECONDS:
            observe("waiting", len(children))
        time.sleep(0.03)
