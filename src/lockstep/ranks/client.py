"""`run`: start N processes as ranks, watch them, and come back with what each did and why it ended."""

from __future__ import annotations

import atexit
import contextlib
import linecache
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from . import drift, explain, messages, processes
from .channel import Channel, ChannelError, decode, encode
from .folder import remove_left_folders
from .job import Function, Job, Meeting, NetworkMaker, Source, Target, describe
from .messages import Role, read
from .network import NotRun
from .report import Cause, Collective, Error, Frame, Group, Mark, Outcome, RankReport, Stack, Wait, only_places_below
from .result import Run
from .words import names

SOURCE = str(Path(__file__).resolve().parents[2])
START_SECONDS = 180.0
KILL_SECONDS = 3.0
ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)  # What torchrun, too, passes on to its ranks, besides SIGINT
SILENT_SECONDS = 30.0  # Without a word from a supervisor that speaks every second: one of its ranks has seen to that
STOPPED_SECONDS = 3.0  # ... or that is seen to be held by a signal.
GLOO_SAYS = re.compile(r"^\[Gloo\] Rank \d+ is connected to .*\n", re.MULTILINE)  # ... on stdout, in torch 2.8
MOST_OF_A_TURN = 60  # characters that a rank may say of its loop
MOST_OF_A_NAME = 40  # ... and of a group
OnOutput = Callable[[int, str, str], None]
OnNotice = Callable[[str], None]


class RanksError(Exception):
    """Lockstep itself could not do the run: no process, no memory, a broken installation. Never the ranks' fault."""


class Server:
    """The warm process of a client, started once and shared by all its runs.

    `prefix` is a command that starts another, such as a sandbox's, for the process to stand in; `environment` is then
    all that it has of one. `preload` are modules that it imports when it is idle, where they are installed.
    """

    def __init__(
        self, prefix: Sequence[str] = (), environment: dict[str, str] | None = None, preload: Sequence[str] = ()
    ) -> None:
        self._prefix, self._environment, self.preload = prefix, environment, preload
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
            outside = subprocess.DEVNULL if self._prefix else None  # bubblewrap's own descriptors are open to the ranks
            self._process = subprocess.Popen(
                [*self._prefix, sys.executable, "-m", "lockstep.ranks.server", str(theirs.fileno()), *self.preload],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=outside,
                stderr=outside,
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
                    raise RanksError(f"the process that starts ranks did not come up (status {status})")
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

    def is_stopped(self) -> bool:
        """True when the server, or one of its supervisors, is held by a signal: it will say nothing more."""
        process, known = self._process, processes.parents()
        servers = [] if process is None else [process.pid]
        while any(processes.command_line(pid).startswith("bwrap ") for pid in servers):  # the sandbox's own
            servers = [pid for pid, parent in known.items() if parent in servers]
        return any(processes.is_stopped(pid) for pid in (*servers, *(pid for pid in known if known[pid] in servers)))

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


def warm(preload: Sequence[str] = ()) -> None:
    """Start the warm process in the background, so that the first run does not wait for it.

    The modules `preload`, which the runs will want, are imported as soon as it is idle. A warm process that lacks one of them
    is ended first; no run may be under way then.
    """
    if start_method() == "fork":
        if not {*preload} <= {*_server.preload}:
            _server.stop()
            _server.preload = tuple(dict.fromkeys([*preload, *_server.preload]))
        _server.start()


def stop() -> None:
    _server.stop()


def warm_process() -> object:
    """The warm process that the next run is forked from, to be given to `renew`; None when there is none."""
    return _server._process


def renew(process: object) -> None:
    """End the warm process if it is still this one: the next run gets a new one, and, if it is in a sandbox, a new sandbox."""
    if process is not None and process is _server._process:
        _server.kill()


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
    device: str = Job.device,
    nodes: int = Job.nodes,
    network: Function | None = None,
    launcher: bool = Job.launcher,
    deadline: float | None = Job.deadline,
    cpu_limit: float | None = Job.cpu_limit,
    idle_limit: float | None = Job.idle_limit,
    patience: float = Job.patience,
    memory_limit: int | None = Job.memory_limit,
    output_limit: int | None = Job.output_limit,
    report_limit: int | None = Job.report_limit,
    environment: dict[str, str] | None = None,
    process_limit: int | None = Job.process_limit,
    directory: str | os.PathLike[str] | None = None,
    own_directory: bool = False,
    hidden: Iterable[str | os.PathLike[str]] = (),
    timeline: bool = Job.timeline,
    mark_steps: bool = Job.mark_steps,
    watch_replicas: bool = Job.watch_replicas,
    restart: int = Job.restart,
    max_restarts: int = Job.max_restarts,
    role: str = Job.role,
    run_id: str = Job.run_id,
    virtual_local_rank: bool = Job.virtual_local_rank,
    grace: float = Job.grace,
    own_temporary: bool = Job.own_temporary,
    late_after: float | None = Job.late_after,
    count_bytes: bool = Job.count_bytes,
    secret: str = "",
    meeting: Meeting | None = Job.meeting,
    on_output: OnOutput | None = None,
    on_notice: OnNotice | None = None,
    on_interrupt: str = "report",
    sources: Iterable[str] | None = None,
) -> Run:
    """Run `target` on `world_size` ranks of this machine and wait until all have ended.

    `on_output(rank, stream, text)` is called as the ranks print, `on_notice(text)` when the user should know something of
    them. With a `grace`, SIGTERM, SIGHUP and SIGQUIT end the ranks as an interrupt does. A KeyboardInterrupt ends the ranks and comes back as
    outcome `interrupted` with each rank's place, or, with `on_interrupt="raise"`, is raised after they have ended.
    The ranks start in `directory` (this process's, when None), or with `own_directory` in an empty one of the run's own,
    whose files are named in `Run.left_files` and then removed. `sources` are the folders whose files the report may
    quote, for ranks that are not trusted; None is all. What the ranks draw (`ranks.draw`) comes from `secret`. `network` has the ranks stand in a network made for them. The limits
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
    arguments = [encode(kwargs | own) for own in each or ({},)]
    job = Job(
        world_size=world_size, target=described, device=device, nodes=nodes, launcher=launcher,
        network=None if network is None else NetworkMaker(str(network.file), network.name, network.kwargs), deadline=deadline,
        cpu_limit=cpu_limit, idle_limit=idle_limit, patience=patience, memory_limit=memory_limit,
        output_limit=output_limit, report_limit=report_limit, process_limit=process_limit,
        environment=dict(os.environ) if environment is None else dict(environment),
        directory="" if own_directory else str(Path(directory or os.getcwd()).resolve()), hidden=[str(Path(path).resolve()) for path in hidden],
        timeline=timeline, mark_steps=mark_steps, watch_replicas=watch_replicas, restart=restart, max_restarts=max_restarts,
        role=role, run_id=run_id, virtual_local_rank=virtual_local_rank, grace=grace,
        own_temporary=own_temporary, late_after=late_after, count_bytes=count_bytes, meeting=meeting,
    )  # fmt: skip
    channel = Channel(_connect())
    try:
        channel.send(messages.Order(job, len(arguments), os.getpriority(os.PRIO_PROCESS, 0)))
        for tree, blob in arguments:
            channel.send(messages.Arguments(tree, secret), blob)
        with only_places_below(sources):
            return _Listener(channel, job, on_output, on_notice, on_interrupt, secret).listen()
    except (BrokenPipeError, ConnectionResetError) as error:
        raise RanksError(f"the run's supervisor is gone: {error}") from None
    finally:
        channel.close()


class _Listener:
    """Collects what a supervisor sends until its last word."""

    def __init__(
        self,
        channel: Channel,
        job: Job,
        on_output: OnOutput | None,
        on_notice: OnNotice | None,
        on_interrupt: str,
        secret: str,
    ) -> None:
        self.channel, self.job, self.secret = channel, job, secret
        self.on_output, self.on_notice, self.on_interrupt = on_output, on_notice, on_interrupt
        self.output: dict[tuple[int, str], list[str]] = {}
        self.observations: dict[int, dict[str, Any]] = {}
        self.shown: dict[int, list[Any]] = {}
        self.events: dict[int, list[messages.Event]] = {}
        self.interrupts: list[int] = []

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
        heeded = [signal.SIGINT, *(ENDING if self.job.grace else ())]
        usual = {number: found for number in heeded if (found := signal.getsignal(number)) is not signal.SIG_IGN}

        def note(number: int, frame: Any) -> None:
            self.interrupts.append(number)
            then = usual[signal.Signals(number)]
            if len(self.interrupts) > 2 and callable(then):
                then(number, frame)

        for number in usual:
            signal.signal(number, note)
        try:
            yield
        finally:
            for number, handler in usual.items():
                signal.signal(number, handler)

    def _listen(self) -> Run:
        said = supervisor = 0
        heard = time.monotonic()
        selector = selectors.DefaultSelector()
        selector.register(self.channel, selectors.EVENT_READ)
        with selector:
            while True:
                while len(self.interrupts) > said:
                    self.channel.send(messages.Stop(self.interrupts[said]))
                    said += 1
                if not selector.select(0.1):
                    silent = time.monotonic() - heard
                    stopped = silent > STOPPED_SECONDS and _server.is_stopped()
                    if stopped or silent > (SILENT_SECONDS if supervisor else START_SECONDS):
                        _server.kill()
                        raise RanksError("the run's supervisor fell silent, and was ended")
                    continue
                try:
                    received = self.channel.receive()
                    if received is None:
                        raise RanksError("the run's supervisor ended without a word: out of memory?")
                    for raw, blob in received:
                        message: messages.ToClient = read(messages.ToClient, raw)
                        if isinstance(message, messages.Alive):
                            supervisor = message.pid
                        elif isinstance(message, messages.Finished):
                            return self._result(message)
                        else:
                            self._take(message, blob)
                except (ChannelError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
                    raise RanksError(f"the run's supervisor said what no supervisor says ({error!r})") from error
                heard = time.monotonic()

    def _take(self, message: messages.ToClient, blob: bytes) -> None:
        match message:
            case messages.Output(rank, stream, text):
                self.output.setdefault((rank, stream), []).append(text)
                if self.on_output is not None:
                    self.on_output(rank, stream, text)
            case messages.Notice(text):
                if self.on_notice is not None:
                    self.on_notice(text)
            case messages.Observed(member, name, tree):
                with contextlib.suppress(ChannelError):
                    self.observations.setdefault(member, {})[name] = decode(tree, blob)
            case messages.Shown(member, tree):
                with contextlib.suppress(ChannelError):
                    self.shown.setdefault(member, []).append(decode(tree, blob))
            case messages.Events(member, events):
                self.events.setdefault(member, []).extend(events)
            case messages.Refused(why):
                if self.interrupts:
                    raise KeyboardInterrupt
                raise NotRun(why)

    def _result(self, told: messages.Finished) -> Run:
        ranks: list[RankReport] = []
        workers: list[RankReport] = []
        for index, member in enumerate(told.members):
            (ranks if member.role is Role.RANK else workers).append(self._report(index, member, told.began))
        run = Run(
            self.job.world_size, self.job.device, ranks, workers, seconds=told.seconds,
            began=told.began, signal=self.interrupts[0] if self.interrupts else None, left_running=[*told.stray, *map(str, told.immortal)], left_files=told.temporary,
            wire=told.wire, secret=self.secret,
        )  # fmt: skip
        if told.replicas is not None:
            with contextlib.suppress(TypeError, ValueError, LookupError):
                run.replicas = drift.read(told.replicas, ranks)
        run.node, run.hosts = told.node, tuple(told.hosts)
        if told.explained is not None:
            run.cause = _told_by_node_zero(run, told.explained)
        else:
            run.cause = explain.cause(run, self.job, told.end)
        if run.hosts and not run.node:
            run.cause = _with_nodes(run, self.job.per_node)
            found = run.cause
            said = (
                messages.Explained()
                if found is None
                else messages.Explained(found.kind, found.headline, _raw(found.frame), list(found.ranks))
            )
            with contextlib.suppress(OSError):
                self.channel.send(said)
        return run

    def _report(self, index: int, member: messages.MemberReport, began: float) -> RankReport:
        rank = index - 1 if member.rank is None else member.rank
        report = RankReport(
            rank, member.outcome or Outcome.STOPPED, member.pid, member.code, fault=member.fault, stopped=member.stopped,
            peak_memory=member.peak_memory, cpu_seconds=member.cpu, ended=member.ended,
            observations=self.observations.get(index, {}), shown=self.shown.get(index, []),
        )  # fmt: skip
        if member.role is Role.RANK:
            report.stdout, report.stderr = ("".join(self.output.get((rank, one), [])) for one in ("stdout", "stderr"))
            report.stdout = GLOO_SAYS.sub("", report.stdout)
        if member.error is not None:
            report.error = _error(member.error)
        elif member.frames:
            report.error = Error("SystemExit", str(member.code), _frames(member.frames))
        if member.because is not None:
            report.because = _error(member.because)
        if member.stack is not None:
            report.stack = _stack(member.stack)
        _place_events(report, self.events.get(index, []), began)
        return report


def _raw(frame: Frame | None) -> tuple[str, int, str] | None:
    return None if frame is None else (frame.file, frame.line, frame.function)


def _told_by_node_zero(run: Run, told: messages.Explained) -> Cause | None:
    if told.kind is None:
        return None
    note = f"The terminal of node 0 ({run.hosts[0]}) shows the evidence."
    return Cause(told.kind, told.headline, tuple(told.ranks), Frame.of(told.frame), notes=(note,))


def _with_nodes(run: Run, per_node: int) -> Cause | None:
    """The cause, with each rank's node named."""
    cause = run.cause
    if cause is None:
        return None
    named = [f"{node} ({host})" for node, host in enumerate(run.hosts)]
    rows = tuple(replace(row, node=named[row.rank // per_node]) for row in cause.rows)
    notes = cause.notes
    if not rows and cause.ranks:
        there = {rank // per_node for rank in cause.ranks}
        notes = (*(f"{names(r for r in cause.ranks if r // per_node == node).capitalize()}: node {named[node]}."
                   for node in sorted(there)), *notes)  # fmt: skip
    return replace(cause, rows=rows, notes=notes)


# What follows reads what a rank has said: it has the right types, and may say anything.


def _frames(told: list[Any]) -> tuple[Frame, ...]:
    return tuple(frame for item in told if (frame := Frame.of(item)))


def _error(told: messages.Raised) -> Error:
    return Error(told.type, told.message, _frames(told.frames), told.traceback)


def _stack(told: messages.StackReport) -> Stack:
    return Stack(Frame.of(told.frame), told.call, told.operation, tuple(told.pending), told.threads, told.detail)


def _place_events(report: RankReport, events: list[messages.Event], began: float) -> None:
    ends: dict[int, float] = {}
    failed: set[int] = set()
    sites: dict[int, tuple[tuple[Frame, ...], tuple[str, ...], int]] = {}
    described: dict[str, str] = {}
    for event in events:
        with contextlib.suppress(OverflowError):
            at = event.time / 1e9 - began
            match event:
                case messages.End():
                    ends[event.number] = at
                case messages.Failed():
                    failed.add(event.number)
                case messages.Waited():
                    report.waits.append(Wait(event.number, event.since / 1e9 - began, at))
                case messages.Mark():
                    report.marks.append(Mark(report.rank, event.number, event.name, at))
                case messages.MadeGroup():
                    report.groups.append(Group(event.name, tuple(event.members), Frame.of(event.frame), event.timeout))
                    described[event.name] = event.described[:MOST_OF_A_NAME]
                case messages.Begin():
                    known = sites.setdefault(event.site, (_frames(event.callers), tuple(event.via), event.folded))
                    callers, via, folded = known
                    one = _collective(report.rank, event, at)
                    named = described.get(event.group, "")
                    report.collectives.append(replace(one, callers=callers, via=via, folded=folded, described=named))
    if ends or failed:
        report.collectives = [
            replace(one, end=ends.get(one.number), failed=one.number in failed) for one in report.collectives
        ]


def _collective(rank: int, begin: messages.Begin, at: float) -> Collective:
    turn = (begin.turn[0][:MOST_OF_A_TURN], begin.turn[1][:MOST_OF_A_TURN]) if begin.turn else None
    return Collective(
        rank, begin.number, begin.kind, begin.group, begin.group_number, begin.nbytes, tuple(begin.shape), begin.dtype,
        start=at, frame=Frame.of(begin.frame), inside=begin.inside, reduce_op=begin.reduce_op, peer=begin.peer,
        members=tuple(begin.members), of_kind=begin.of_kind, turn=turn,
    )  # fmt: skip
