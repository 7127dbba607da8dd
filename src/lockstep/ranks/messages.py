"""What the processes of a run say to each other, over a `channel`.

A rank may say anything, so what comes from one is read with `read`, which takes only what has one of these types.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, TypeVar

import msgspec

from .job import Job
from .report import Kind, Outcome, RunEnd, Why

Place = tuple[str, int, str] | None  # File, line and function, as a rank tells it: `report.Frame.of` reads it
T = TypeVar("T")


def read(kind: type[T] | Any, message: dict[str, Any]) -> T:
    """The message as one of the types in `kind`. Raises ValueError for anything else."""
    return msgspec.convert(message, kind)


class Role(str, Enum):
    """What a process is to a run."""

    RANK = "rank"
    WORKER = "worker"
    FORK_SERVER = "fork server"


# From a rank, a worker or a launcher's fork server to the supervisor ---------------------------------------------


class Hello(msgspec.Struct, tag_field="event", tag="hello"):
    """Who has connected."""

    role: Role
    rank: int | None = None
    pid: int = 0


class Begin(msgspec.Struct, tag_field="event", tag="begin"):
    """A communication call begins; see `report.Collective`. `callers`, `via` and `folded` come with the first call of a `site`."""

    number: int
    kind: str
    group: str
    members: list[int]
    group_number: int
    of_kind: int
    nbytes: int
    shape: list[int]
    dtype: str
    time: int
    inside: str = ""
    reduce_op: str = ""
    peer: int | None = None
    frame: Place = None
    device: str = ""
    site: int = 0
    callers: list[Place] = []
    via: list[str] = []
    folded: int = 0
    turn: tuple[str, str] | None = None


class End(msgspec.Struct, tag_field="event", tag="end"):
    """A communication call has completed."""

    number: int
    time: int


class Failed(msgspec.Struct, tag_field="event", tag="failed"):
    """A communication call has raised an error, which the code may have caught."""

    number: int
    time: int


class Waited(msgspec.Struct, tag_field="event", tag="waited"):
    """The main thread has waited for communication; see `report.Wait`."""

    number: int
    since: int
    time: int


OWN_MARK = "lockstep: "
"""How the names of the marks begin that `steps` makes, and not the code."""


class Mark(msgspec.Struct, tag_field="event", tag="mark"):
    """A point of the code."""

    number: int
    name: str
    time: int


class MadeGroup(msgspec.Struct, tag_field="event", tag="group"):
    """A process group is about to be made; see `report.Group`."""

    name: str
    members: list[int]
    frame: Place
    time: int
    timeout: float | None = None
    described: str = ""


class IsRank(msgspec.Struct, tag_field="event", tag="rank"):
    """Which rank a worker turned out to be."""

    rank: int


class Observe(msgspec.Struct, tag_field="event", tag="observe"):
    """An observation; `value` and the blob are what `channel.encode` has made."""

    name: str
    value: Any


class Show(msgspec.Struct, tag_field="event", tag="show"):
    """What a rank has now, as `Observe` has it. A `Drawn` is the answer; nothing that has been shown can be taken back."""

    value: Any


class Returned(msgspec.Struct, tag_field="event", tag="returned"):
    """The code has come to its end."""


class Raised(msgspec.Struct, tag_field="event", tag="raised"):
    """The code has raised. Its parts may be anything: that it ended counts, and `leftovers.cut` reads the rest."""

    type: Any = ""
    message: Any = ""
    frames: Any = ()
    traceback: Any = ""


class Exit(msgspec.Struct, tag_field="event", tag="exit"):
    """The code has left by SystemExit, perhaps `because` of an exception that it had caught."""

    code: int
    frames: Any = ()
    message: Any = ""
    because: Raised | None = None


class StackReport(msgspec.Struct):
    """Where a main thread stands; see `report.Stack`. `limited` tells to how many seconds the program itself has
    limited a wait, until these are over.
    """

    frame: Place = None
    call: str = ""
    operation: int | None = None
    pending: list[int] = []
    threads: int = 0
    detail: dict[str, Any] = {}
    innermost: str = ""
    limited: float = 0.0


class Sample(msgspec.Struct, tag_field="event", tag="sample"):
    """The answer to `Ask`."""

    id: int
    stack: StackReport


class Watcher(msgspec.Struct, tag_field="event", tag="watcher"):
    """Which thread answers."""

    thread: int


class Replica(msgspec.Struct, tag_field="event", tag="replica"):
    """The fingerprints of one rank's replica after a step; step 0 is before the first, and alone names the parameters.

    `changed` are the numbers of the parameters that something else than a step has changed since the step before.
    """

    optimizer: int
    step: int
    parameters: list[int]
    frame: Place = None
    names: list[str] = []
    gradients: list[int | None] = []
    buffers: dict[str, int] = {}
    sampled: list[list[float]] = []
    settings: list[dict[str, str]] = []
    brought: list[tuple[int, int]] = []
    wrapped_forward: bool = False
    changed: list[int] = []


class NotFinite(msgspec.Struct, tag_field="event", tag="not finite"):
    """The first step of a rank after which a parameter held NaN or an infinity; step 0 is before the first.

    `gradient` tells what its gradient held when the step began, `brought` what this rank's gradients held before DDP
    averaged them. All are NaN, inf, or empty for finite numbers.
    """

    step: int
    parameter: str
    value: str
    gradient: str = ""
    brought: str = ""
    averaged: bool = False
    frame: Place = None


class ChildEnded(msgspec.Struct, tag_field="event", tag="ended"):
    """A launcher's fork server tells how one of its children has ended."""

    pid: int
    code: int


Event = Begin | End | Failed | Waited | Mark | MadeGroup  # What a rank tells of its communication
FromRank = (Hello | Event | IsRank | Observe | Show | Returned | Raised | Exit | Sample | Watcher | Replica
            | NotFinite | ChildEnded)  # fmt: skip


# From the supervisor to a rank -----------------------------------------------------------------------------------


class Go(msgspec.Struct, tag_field="event", tag="go"):
    """What to do. The keyword arguments' tensors are in the blob."""

    job: Job
    environment: dict[str, str]
    kwargs: Any


class Ask(msgspec.Struct, tag_field="event", tag="ask"):
    """Where does your main thread stand?"""

    id: int


class Leave(msgspec.Struct, tag_field="event", tag="leave"):
    """All are done."""


class Drawn(msgspec.Struct, tag_field="event", tag="drawn"):
    """The answer to `Show`."""

    number: float


# From the client to the supervisor -------------------------------------------------------------------------------


class Order(msgspec.Struct, tag_field="event", tag="order"):
    """A run; so many `Arguments` follow. The ranks are served as the client is (`niceness`), not as the server is."""

    job: Job
    arguments: int
    niceness: int


class Arguments(msgspec.Struct, tag_field="event", tag="arguments"):
    """The target's arguments: the same for all ranks, or each rank's own. The last `secret` that is not empty is the run's
    (see `drawn`)."""

    kwargs: Any
    secret: str = ""


class Stop(msgspec.Struct, tag_field="event", tag="stop"):
    """End the run. Ranks that have time for their own ending are told by this signal. A second `Stop` ends that time."""

    signal: int = 0


# From the supervisor to the client -------------------------------------------------------------------------------


class Alive(msgspec.Struct, tag_field="event", tag="alive"):
    """The supervisor is there."""

    pid: int


class Output(msgspec.Struct, tag_field="event", tag="output"):
    """A rank has printed."""

    rank: int
    stream: str
    text: str


class Notice(msgspec.Struct, tag_field="event", tag="notice"):
    """What the user should know while the run goes on."""

    text: str


class Observed(msgspec.Struct, tag_field="event", tag="observed"):
    """A member's observation."""

    member: int
    name: str
    value: Any


class Shown(msgspec.Struct, tag_field="event", tag="shown"):
    """What a member has shown, in its order."""

    member: int
    value: Any


class Events(msgspec.Struct, tag_field="event", tag="events"):
    """Some of what a member has done, in order."""

    member: int
    events: list[Event]


class Refused(msgspec.Struct, tag_field="event", tag="not run"):
    """This machine lacks what the run asked for."""

    why: str


class MemberReport(msgspec.Struct):
    """How one process ended; `fault` is what Python's fault handler has left of it."""

    role: Role
    rank: int | None
    pid: int
    outcome: Outcome | None
    code: int | None
    error: Raised | None
    frames: list[Any]
    stack: StackReport | None
    stopped: bool
    fault: str
    peak_memory: int
    cpu: float
    ended: float
    because: Raised | None = None


class Compared(msgspec.Struct):
    """What comparing the replicas found: `comparison` makes it, `drift` reads it.

    `first` is what the ranks said of the first step at which a parameter differed; it is empty when none did. `not_finite`
    is what each rank said of the first step after which a parameter was no finite number.
    """

    compared: int
    same_work: int
    statistics: list[str]
    steps: list[int]
    names: list[list[str]]
    first: list[Replica]
    not_finite: list[tuple[int, NotFinite]] = []


class Explained(msgspec.Struct, tag_field="event", tag="explained"):
    """How node 0 explains the run, in short; no kind when all ended well. Its client says it, and the other nodes are told."""

    kind: Kind | None = None
    headline: str = ""
    frame: Place = None
    ranks: list[int] = []


class Finished(msgspec.Struct, tag_field="event", tag="finished"):
    """The supervisor's last word. `wire` is what `wire.between` has counted.

    `hosts` are the names of the nodes' machines where each has its own, `node` is this one's number, and `explained` what
    node 0 has told another node.
    """

    end: RunEnd
    seconds: float
    began: float
    stray: list[str]
    temporary: list[str]
    immortal: list[int]
    wire: list[list[int]] | None
    replicas: Compared | None
    members: list[MemberReport]
    node: int = 0
    hosts: list[str] = []
    explained: Explained | None = None


ToClient = Alive | Output | Notice | Observed | Shown | Events | Refused | Finished


# Between the supervisors of a run's nodes: `meeting` lets them find each other, `nodes` has what they say after that ----


class Challenge(msgspec.Struct, tag_field="event", tag="challenge"):
    """Node 0 to whoever connects: prove that you know the job's secret."""

    nonce: str


class Join(msgspec.Struct, tag_field="event", tag="join"):
    """A node proves it, asks for the same proof, and says what it is. `time` is its monotonic clock."""

    answer: str
    nonce: str
    nodes: int
    per_node: int
    host: str
    time: int
    node: int | None = None
    version: int = 0


class TurnedAway(msgspec.Struct, tag_field="event", tag="turned away"):
    """It does not fit, and why."""

    why: str


class Welcome(msgspec.Struct, tag_field="event", tag="welcome"):
    """It is this node."""

    answer: str
    node: int


class Start(msgspec.Struct, tag_field="event", tag="start"):
    """All have come. The store listens at this port of node 0."""

    port: int
    hosts: list[str]


class Ended(msgspec.Struct, tag_field="event", tag="rank ended"):
    """How a rank's code has ended; `MemberReport` has the details, at the end."""

    outcome: Outcome
    code: int | None = None


Relayed = Event | Replica | NotFinite | Ended


class Said(msgspec.Struct):
    """What a rank of another node has said."""

    rank: int
    message: Relayed


class Relay(msgspec.Struct, tag_field="event", tag="relay"):
    """What the ranks of a node have said, in order."""

    said: list[Said]


class Pulse(msgspec.Struct, tag_field="event", tag="pulse"):
    """A node is there, and how still it is: nothing has moved on it for so many `seconds`, and how many of them a hang
    would `need` (see `hang_detector`). `proven` is false where the system does not tell. For a rendezvous: how long each
    rank has queued for a processor, and whether there are processes that nobody knows.
    """

    seconds: float = 0.0
    settled: bool = False
    needed: float = 0.0
    proven: bool = True
    queued: list[tuple[int, float]] = []
    strangers: bool = False


class AskNode(msgspec.Struct, tag_field="event", tag="ask node"):
    """Where do the main threads of these ranks stand?"""

    id: int
    ranks: list[int]
    insist: bool


class Samples(msgspec.Struct, tag_field="event", tag="samples"):
    """The answer to `AskNode`, without those that did not answer."""

    id: int
    stacks: list[tuple[int, StackReport]]


class EndRun(msgspec.Struct, tag_field="event", tag="end run"):
    """Node 0 has decided: end. `signal` is what the user sent, 0 for none."""

    why: Why
    signal: int = 0


class NodeFinished(msgspec.Struct, tag_field="event", tag="node finished"):
    """A node has ended its ranks."""

    members: list[MemberReport]
    stray: list[str]
    temporary: list[str]


FromNode = Join | Relay | Pulse | Samples | Stop | NodeFinished
ToNode = Challenge | TurnedAway | Welcome | Start | Alive | AskNode | EndRun | Explained
