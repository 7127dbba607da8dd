"""`run`: start N processes as ranks, watch them, and come back with what each did and why it ended."""

from __future__ import annotations

import atexit
import contextlib
import linecache
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from . import drift, explain, processes
from .channel import Channel, ChannelError, decode, encode
from .folder import remove_left_folders
from .job import Function, Job, Source, Target, describe
from .network import NotRun
from .report import Collective, Error, Frame, Mark, Outcome, RankReport, Stack, only_places_below
from .result import Run

SOURCE = str(Path(__file__).resolve().parents[2])
START_SECONDS = 180.0
KILL_SECONDS = 3.0
SILENT_SECONDS = 30.0
"""Without a word from a supervisor that speaks every second: one of its ranks has seen to that."""
STOPPED_SECONDS = 3.0
"""... or that is seen to be held by a signal."""
Printer = Callable[[int, str, str], None]


class RanksError(Exception):
    """Lockstep itself could not do the run: no process, no memory, a broken installation. Never the ranks' fault."""


class Server:
    """The warm process of a client, started once and shared by all its runs.

    `prefix` is a command that starts another, such as a sandbox's, for the process to stand in; `environment` is then
    all that it has of one.
    """

    def __init__(self, prefix: Sequence[str] = (), environment: dict[str, str] | None = None) -> None:
        self._prefix, self._environment = prefix, environment
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._ready = False

    def start(self) -> None:
        """Start the process and return at once; it warms up in the background."""
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                return
            if self._control is not None:
                self._control.close()
            ours, theirs = socket.socketpair()
            self._process = subprocess.Popen(
                [*self._prefix, sys.executable, "-m", "lockstep.ranks.server", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=child_environment() if self._environment is None else self._environment,
                start_new_session=True,
            )
            processes.give_precedence(self._process.pid)
            theirs.close()
            self._control, self._ready = ours, False

    def connect(self) -> socket.socket:
        """A socket to a new supervisor. Raises RanksError when the server cannot start."""
        self.start()
        assert self._control is not None and self._process is not None
        with self._lock:
            if not self._ready:
                self._control.settimeout(START_SECONDS)
                try:
                    answer = self._control.recv(16)
                except OSError:
                    answer = b""
                if answer != b"ready":
                    status = self._process.poll()
                    what = f"the process that starts ranks did not come up (status {status})"
                    raise RanksError(f"{what}: ./lockstep doctor")
                self._ready = True
            ours, theirs = socket.socketpair()
            try:
                socket.send_fds(self._control, [b"run"], [theirs.fileno()])
            except OSError as error:
                ours.close()
                raise RanksError(f"the process that starts ranks is gone ({error}): run it again") from None
            finally:
                theirs.close()
            return ours

    def stop(self) -> None:
        """End the process; its runs end with it."""
        with self._lock:
            if self._control is not None:
                self._control.close()
            if self._process is not None:
                try:
                    self._process.wait(5)
                except subprocess.TimeoutExpired:  # whoever stopped it, or keeps it busy, shall not keep us
                    self._process.kill()
                    self._process.wait()
            self._process = self._control = None

    def kill(self) -> None:
        """End the process and all below it at once, also those that a signal holds; the next run gets a new one."""
        with self._lock:
            process, self._process = self._process, None
            if self._control is not None:
                self._control.close()
            self._control = None
            if process is None:
                return
            if not self._prefix:  # A sandbox takes all that is in it with it.
                processes.end_all(process.pid, patience=KILL_SECONDS)
            process.kill()
            process.wait()
        remove_left_folders()

    def is_stopped(self, pid: int) -> bool:
        """True when the server, or its child `pid`, is held by a signal: it will say nothing more."""
        process = self._process
        if process is None:
            return False
        ours = processes.parents().get(pid) == process.pid
        return processes.is_stopped(process.pid) or (ours and processes.is_stopped(pid))

    def forget(self) -> None:
        """In a child that was forked from this client: the process is the parent's."""
        self._lock = threading.Lock()
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.returncode = 0
        self._process = self._control = None


_own = Server()
_server = _own
atexit.register(_own.stop)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_own.forget)


def warm() -> None:
    """Start the warm process in the background, so that the first run does not wait for it."""
    if start_method() == "fork":
        _server.start()


def stop() -> None:
    """End the warm process of this client."""
    _server.stop()


@contextlib.contextmanager
def served_by(server: Server) -> Iterator[None]:
    """All runs in this block are forked from `server`, which is ended after it."""
    global _server
    usual, _server = _server, server
    try:
        yield
    finally:
        _server = usual
        server.stop()


def start_method() -> str:
    """`fork` from a warm process where that is safe (Linux), `spawn` elsewhere; LOCKSTEP_START_METHOD overrides."""
    return os.environ.get("LOCKSTEP_START_METHOD") or ("fork" if sys.platform.startswith("linux") else "spawn")


def child_environment() -> dict[str, str]:
    """This process's environment, with one thread a process and this package on the path."""
    environment = dict(os.environ)
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        environment.setdefault(name, "1")
    path = environment.get("PYTHONPATH", "")
    environment["PYTHONPATH"] = SOURCE + (os.pathsep + path if path else "")
    return environment


def _connect() -> socket.socket:
    if start_method() == "fork" or _server is not _own:
        return _server.connect()
    ours, theirs = socket.socketpair()
    subprocess.Popen(
        [sys.executable, "-m", "lockstep.ranks.supervisor", str(theirs.fileno())],
        pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=child_environment(), start_new_session=True,
    )  # fmt: skip
    theirs.close()
    return ours


def run(
    target: Target,
    world_size: int = 2,
    *,
    device: str = "cpu",
    nodes: int = 1,
    network: Function | None = None,
    launcher: bool = False,
    deadline: float | None = 60.0,
    cpu_limit: float | None = None,
    idle_limit: float | None = 10.0,
    patience: float = 0.3,
    memory_limit: int | None = 4 << 30,
    output_limit: int | None = 8 << 20,
    environment: dict[str, str] | None = None,
    process_limit: int | None = None,
    directory: str | os.PathLike[str] | None = None,
    own_directory: bool = False,
    hidden: Iterable[str | os.PathLike[str]] = (),
    timeline: bool = False,
    watch_replicas: bool = False,
    restart: int = 0,
    max_restarts: int = 0,
    on_output: Printer | None = None,
    on_interrupt: str = "report",
    sources: Iterable[str] | None = None,
) -> Run:
    """Run `target` on `world_size` ranks of this machine and wait until all have ended.

    `on_output(rank, stream, text)` is called as the ranks print. A KeyboardInterrupt ends the ranks and comes back as
    outcome `interrupted` with each rank's place, or, with `on_interrupt="raise"`, is raised after they have ended.
    The ranks start in `directory` (this process's, when None), or with `own_directory` in an empty one of the run's own,
    whose files are named in `Run.left_files` and then removed. `sources` are the folders whose files the report may
    quote, for ranks that are not trusted; None is all. `network` has the ranks stand in a network made for them, such as
    `lockstep.cluster.slow_link("1gbit")`. The limits
    are explained at `job.Job`. Raises ValueError for impossible numbers, FileNotFoundError for a target that is not
    there, NotRun where this machine cannot make that network, RanksError when Lockstep itself fails.
    """
    if world_size < 1:
        raise ValueError(f"world_size is {world_size}; it must be at least 1")
    if nodes < 1 or world_size % nodes:
        raise ValueError(f"{world_size} ranks cannot be spread evenly over {nodes} nodes")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device is {device!r}; it must be 'cpu' or 'cuda'")
    described, kwargs = describe(target)
    if isinstance(target, Source):  # so that reports can show its lines
        linecache.cache[target.filename] = (len(target.text), None, target.text.splitlines(True), target.filename)
    each = target.each if isinstance(target, Function) else ()
    if each and len(each) != (1 if launcher else world_size):
        raise ValueError(f"{len(each)} ranks are given arguments of their own; there are {world_size}")
    orders = [encode(kwargs | own) for own in each or ({},)]
    job = Job(
        world_size=world_size, target=described, device=device, nodes=nodes, launcher=launcher,
        network=asdict(network) if network is not None else None, deadline=deadline,
        cpu_limit=cpu_limit, idle_limit=idle_limit, patience=patience, memory_limit=memory_limit,
        output_limit=output_limit, process_limit=process_limit,
        environment=dict(os.environ) if environment is None else dict(environment),
        directory="" if own_directory else str(Path(directory or os.getcwd()).resolve()), hidden=[str(Path(path).resolve()) for path in hidden],
        timeline=timeline, watch_replicas=watch_replicas, restart=restart, max_restarts=max_restarts,
    )  # fmt: skip
    channel = Channel(_connect())
    try:
        channel.send({"job": job.to_json(), "orders": len(orders)})
        for tree, blob in orders:
            channel.send({"kwargs": tree}, blob)
        with only_places_below(sources):
            return _Listener(channel, job, on_output, on_interrupt).listen()
    except (BrokenPipeError, ConnectionResetError) as error:
        raise RanksError(f"the run's supervisor is gone: {error}") from None
    finally:
        channel.close()


class _Listener:
    """Collects what a supervisor sends until its last word."""

    def __init__(self, channel: Channel, job: Job, on_output: Printer | None, on_interrupt: str) -> None:
        self.channel, self.job, self.on_output, self.on_interrupt = channel, job, on_output, on_interrupt
        self.output: dict[tuple[int, str], list[str]] = {}
        self.observations: dict[int, dict[str, Any]] = {}
        self.events: dict[int, list[dict[str, Any]]] = {}
        self.interrupts = 0

    def listen(self) -> Run:
        """Take messages until the supervisor's last. Ctrl-C stops the run; the third is one too many for patience."""
        with self._on_interrupt():
            run = self._listen()
        if self.interrupts and self.on_interrupt == "raise":
            raise KeyboardInterrupt
        return run

    @contextlib.contextmanager
    def _on_interrupt(self) -> Iterator[None]:
        """Count interrupts instead of having them raised between any two steps of ours."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        usual = signal.getsignal(signal.SIGINT)

        def note(number: int, frame: Any) -> None:
            self.interrupts += 1
            if self.interrupts > 2 and callable(usual):
                usual(number, frame)

        signal.signal(signal.SIGINT, note)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, usual)

    def _listen(self) -> Run:
        said = supervisor = 0
        heard = time.monotonic()
        selector = selectors.DefaultSelector()
        selector.register(self.channel, selectors.EVENT_READ)
        with selector:
            while True:
                if self.interrupts > said:
                    said = self.interrupts
                    self.channel.send({"do": "stop"})
                if not selector.select(0.1):
                    silent = time.monotonic() - heard
                    stopped = silent > STOPPED_SECONDS and _server.is_stopped(supervisor)
                    if stopped or (supervisor and silent > SILENT_SECONDS):
                        _server.kill()
                        raise RanksError("the run's supervisor fell silent, and was ended")
                    continue
                try:
                    messages = self.channel.receive()
                    if messages is None:
                        raise RanksError("the run's supervisor ended without a word: out of memory? ./lockstep doctor")
                    for message, blob in messages:
                        if message.get("event") == "alive":
                            supervisor = int(message["pid"])
                        run = self._take(message, blob)
                        if run is not None:
                            return run
                except (ChannelError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
                    raise RanksError(f"the run's supervisor said what no supervisor says ({error!r})") from error
                heard = time.monotonic()

    def _take(self, message: dict[str, Any], blob: bytes) -> Run | None:
        match message.get("event"):
            case "output":
                self.output.setdefault((message["rank"], message["stream"]), []).append(message["text"])
                if self.on_output is not None:
                    self.on_output(message["rank"], message["stream"], message["text"])
            case "observe":
                with contextlib.suppress(ChannelError):
                    value = decode(message["value"], blob)
                    self.observations.setdefault(message["member"], {})[message["name"]] = value
            case "events":
                self.events.setdefault(message["member"], []).extend(message["events"])
            case "not run":
                raise NotRun(str(message["why"]))
            case "end":
                return self._result(message)
        return None

    def _result(self, end: dict[str, Any]) -> Run:
        ranks: list[RankReport] = []
        workers: list[RankReport] = []
        for index, raw in enumerate(end["members"]):
            report = self._report(index, raw, end["began"])
            (ranks if raw["role"] == "rank" else workers).append(report)
        run = Run(
            self.job.world_size, self.job.device, ranks, workers, seconds=end["seconds"], quiet_seconds=end["still"],
            began=end["began"], left_running=[*end["stray"], *map(str, end["immortal"])], left_files=end["temporary"],
        )  # fmt: skip
        if end["replicas"]:
            with contextlib.suppress(TypeError, ValueError, LookupError):
                run.replicas = drift.read(end["replicas"], ranks)
        run.cause = explain.cause(run, self.job, end["reason"])
        return run

    def _report(self, index: int, raw: dict[str, Any], began: float) -> RankReport:
        rank = raw["rank"] if isinstance(raw["rank"], int) else index - 1
        error = raw["error"]
        report = RankReport(
            rank=rank,
            outcome=Outcome(raw["outcome"] or "stopped"),
            pid=raw["pid"],
            code=raw["code"],
            stdout="".join(self.output.get((rank, "stdout"), [])) if raw["role"] == "rank" else "",
            stderr="".join(self.output.get((rank, "stderr"), [])) if raw["role"] == "rank" else "",
            fault=raw["fault"],
            peak_memory=raw["peak_memory"],
            cpu_seconds=raw["cpu"],
            ended=raw["ended"],
            stopped=raw["stopped"],
            observations=self.observations.get(index, {}),
        )
        if error is not None:
            report.error = Error(
                str(error.get("type", "")),
                str(error.get("message", "")),
                _frames(error.get("frames")),
                str(error.get("traceback", "")),
            )
        elif raw["frames"]:
            report.error = Error("SystemExit", str(raw["code"]), _frames(raw["frames"]))
        if raw["stack"]:
            report.stack = _stack(raw["stack"])
        _place_events(report, self.events.get(index, []), began)
        return report


# What follows reads what a rank has said, and a rank may say anything.


def _frames(raw: Any) -> tuple[Frame, ...]:
    return tuple(frame for item in (raw if isinstance(raw, list) else ()) if (frame := Frame.of(item)))


def _stack(raw: dict[str, Any]) -> Stack:
    detail = raw.get("detail")
    operation = raw.get("operation")
    pending = raw.get("pending")
    threads = raw.get("threads")
    return Stack(
        Frame.of(raw.get("frame")),
        str(raw.get("call", "")),
        operation if isinstance(operation, int) else None,
        tuple(number for number in pending if isinstance(number, int)) if isinstance(pending, list) else (),
        threads if isinstance(threads, int) else 0,
        (detail if isinstance(detail, dict) else {}) | {"innermost": str(raw.get("innermost", ""))},
    )


def _place_events(report: RankReport, events: list[dict[str, Any]], began: float) -> None:
    ends: dict[int, float] = {}
    for event in events:
        with contextlib.suppress(TypeError, ValueError, LookupError):
            at = event["time"] / 1e9 - began
            if event["event"] == "end":
                ends[event["number"]] = at
            elif event["event"] == "mark":
                report.marks.append(Mark(report.rank, int(event["number"]), str(event["name"]), at))
            elif event["event"] == "begin":
                report.collectives.append(_collective(report.rank, event, at))
    if ends:
        report.collectives = [replace(one, end=ends.get(one.number)) for one in report.collectives]


def _collective(rank: int, event: dict[str, Any], at: float) -> Collective:
    return Collective(
        rank=rank,
        number=int(event["number"]),
        kind=str(event["kind"]),
        group=str(event["group"]),
        group_number=int(event["group_number"]),
        nbytes=int(event["nbytes"]),
        shape=tuple(int(extent) for extent in event["shape"]),
        dtype=str(event["dtype"]),
        start=at,
        frame=Frame.of(event["frame"]),
        inside=str(event["inside"]),
        reduce_op=str(event["reduce_op"]),
        peer=event["peer"] if isinstance(event["peer"], int) else None,
        members=tuple(int(member) for member in event["members"]),
        of_kind=int(event["of_kind"]),
    )
