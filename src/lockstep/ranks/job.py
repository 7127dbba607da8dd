"""What to run on the ranks, and within which limits: the order a client gives to a supervisor."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Function:
    """Call the function `name` of the Python file `file` on every rank, with these keyword arguments.

    `file` may also be the dotted name of a module that every rank can import.

    The arguments may be anything an observation may be (see `channel.encode`). What the function returns is observed
    as `returned` when it is such a value too. `each[rank]` are arguments that this rank alone is given; no other process
    of the ranks' ever has them.
    """

    file: str | os.PathLike[str]
    name: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    each: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Script:
    """Run the Python file `path` on every rank as `__main__`, with these command-line arguments."""

    path: str | os.PathLike[str]
    arguments: tuple[str, ...] = ()
    module: bool = False


@dataclass(frozen=True)
class Program:
    """Run the program `path`, looked up as a shell does, in every rank's place. What it does is not recorded."""

    path: str
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class Source:
    """Run source text on every rank as `__main__`. `filename` is how tracebacks and reports call it."""

    text: str
    filename: str = "<cell>"
    arguments: tuple[str, ...] = ()


Target = Function | Script | Source | Program


class TargetKind(str, Enum):
    FUNCTION = "function"
    SCRIPT = "script"
    MODULE = "module"
    SOURCE = "source"
    PROGRAM = "program"


@dataclass(frozen=True)
class Described:
    """A target as a message can hold it, without keyword arguments."""

    kind: TargetKind
    file: str = ""
    name: str = ""
    text: str = ""
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class NetworkMaker:
    """The function that makes a run's network (see `network`): its module, its name and its arguments."""

    module: str
    name: str
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Meeting:
    """Where the nodes of a run find each other when each is a machine of its own.

    `node` is this machine's number. None: 0 for the first that has the address `host`, the others in the order in which they come.
    `secret` is what all have to know; whoever does not is turned away. After `patience` seconds without the others it is given up.
    """

    host: str
    port: int
    node: int | None = None
    secret: str = ""
    patience: float = 600.0


TORCHRUN_VARIABLES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE",
    "TORCHELASTIC_SIGNALS_TO_HANDLE",
)  # fmt: skip


@dataclass
class Job:
    """One run. Times are in seconds, sizes in bytes, limits are for each rank.

    `deadline` is wall time for the whole run. `cpu_limit` counts processor time, so that a loaded machine is not
    mistaken for an endless loop. `idle_limit` ends a run in which nothing at all has moved for so long, though not
    everybody waits in a collective (somebody sleeps). `process_limit` is for all processes of the run together, and what
    the ranks have started may not hold more than `memory_limit` in all. `report_limit` is for what a rank tells of itself: its
    collectives and, as large as they are in memory, its observations. None switches a limit off. `patience` is for how long nothing may
    have moved before ranks that all wait for each other are said to hang: more than a message takes on a slow link.

    `directory` is where the ranks start; empty for a new one of the run's own. `timeline` records the ends of collectives and the
    waits for them; `mark_steps` also when each training step's parts begin (`steps`). `watch_replicas` compares the replicas after every optimizer step (`replicas`). `launcher` runs the target in one
    process without torchrun's variables; the ranks are those that it starts itself through `torch.multiprocessing`.
    `nodes` tells the ranks that they are spread over so many nodes, in equal parts. `network` names the function that
    makes the network they stand in (see `network`); None is this machine's own. `run_id` and `role` are what the ranks are
    told of; with `virtual_local_rank` each has LOCAL_RANK 0 and sees one GPU, its own.
    `grace` is what ranks that are stopped have for handlers and `finally` blocks, from a signal on until they are killed; a
    hang leaves nobody who could use it. `own_temporary` gives them a folder for temporary files that goes with the run; else
    they have the environment's. With `count_bytes` the kernel is asked how much has crossed between the ranks (`wire`). After `late_after` the user is told for whom ranks wait; None is never. With a `meeting` only the
    ranks of one node are on this machine: `world_size` still counts all.
    """

    world_size: int
    target: Described
    device: str = "cpu"
    nodes: int = 1
    network: NetworkMaker | None = None
    launcher: bool = False
    deadline: float | None = 60.0
    cpu_limit: float | None = None
    idle_limit: float | None = 10.0
    patience: float = 0.3
    memory_limit: int | None = 4 << 30
    output_limit: int | None = 8 << 20
    report_limit: int | None = None
    process_limit: int | None = None
    environment: dict[str, str] = field(default_factory=dict)
    directory: str = ""
    hidden: list[str] = field(default_factory=list)
    timeline: bool = False
    mark_steps: bool = False
    watch_replicas: bool = False
    restart: int = 0
    max_restarts: int = 0
    run_id: str = "none"
    role: str = "default"
    virtual_local_rank: bool = False
    grace: float = 0.0
    own_temporary: bool = True
    late_after: float | None = None
    count_bytes: bool = False
    meeting: Meeting | None = None

    @property
    def per_node(self) -> int:
        return self.world_size // self.nodes

    @property
    def is_function(self) -> bool:
        """A function has to return; a script may also leave with status 0."""
        return self.target.kind is TargetKind.FUNCTION

    def rank_environment(self, rank: int, host: str, port: int, defaults: dict[str, str]) -> dict[str, str]:
        """The environment of one rank: what torchrun would have set, with the store at `host` and `port`.

        `defaults` are the network's variables; the job's own environment has the last word on them.
        """
        environment = {key: value for key, value in self.environment.items() if key not in TORCHRUN_VARIABLES}
        environment = defaults | environment
        environment.setdefault("OMP_NUM_THREADS", "1")
        if self.device == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        if self.launcher:
            return environment
        per_node = self.per_node
        environment.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank % per_node),
            WORLD_SIZE=str(self.world_size),
            LOCAL_WORLD_SIZE=str(per_node),
            GROUP_RANK=str(rank // per_node),
            GROUP_WORLD_SIZE=str(self.nodes),
            ROLE_RANK=str(rank),
            ROLE_WORLD_SIZE=str(self.world_size),
            ROLE_NAME=self.role,
            MASTER_ADDR=host,
            MASTER_PORT=str(port),
            TORCHELASTIC_USE_AGENT_STORE="True",
            TORCHELASTIC_RESTART_COUNT=str(self.restart),
            TORCHELASTIC_MAX_RESTARTS=str(self.max_restarts),
            TORCHELASTIC_RUN_ID=self.run_id,
        )
        if self.virtual_local_rank:
            environment["LOCAL_RANK"] = "0"
            environment["CUDA_VISIBLE_DEVICES"] = _own_gpu(environment.get("CUDA_VISIBLE_DEVICES"), rank % per_node)
        return environment


def _own_gpu(visible: str | None, local_rank: int) -> str:
    """The one GPU of a rank, of those that are visible (None: all); empty when there is none for it."""
    gpus = visible.split(",") if visible is not None else [str(number) for number in range(local_rank + 1)]
    return gpus[local_rank].strip() if local_rank < len(gpus) else ""


def describe(target: Target) -> tuple[Described, dict[str, Any]]:
    """Split a target into what a message can hold and its keyword arguments. Raises FileNotFoundError, TypeError."""
    match target:
        case Function():
            file = str(target.file)
            place = _existing(file) if file.endswith(".py") else file
            return Described(TargetKind.FUNCTION, place, target.name), target.kwargs
        case Script(module=True):
            return Described(TargetKind.MODULE, str(target.path), arguments=tuple(target.arguments)), {}
        case Script():
            return Described(TargetKind.SCRIPT, _existing(target.path), arguments=tuple(target.arguments)), {}
        case Program():
            return Described(TargetKind.PROGRAM, target.path, arguments=tuple(target.arguments)), {}
        case Source():
            return Described(TargetKind.SOURCE, target.filename, "", target.text, tuple(target.arguments)), {}
    raise TypeError(f"a target is a Function, a Script, a Source or a Program, not {type(target).__name__}")


def _existing(path: str | os.PathLike[str]) -> str:
    found = Path(path).resolve()
    try:
        there = found.is_file()
    except OSError as closed:  # a folder on the way that this user may not enter
        raise FileNotFoundError(f"{path} cannot be reached: {closed.strerror}") from None
    if not there:
        raise FileNotFoundError(f"there is no file {path}")
    return str(found)
