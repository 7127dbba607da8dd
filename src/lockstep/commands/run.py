"""`lockstep run`: any script under torchrun's flags, with its hangs and failures explained."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TextIO

from .. import cluster, ranks
from ..ranks import text, timeline, timeline_picture
from . import run_report, run_slurm
from .console import console, room, show_text, width
from .run_options import Nodes, are_elsewhere, filtered, meeting_of, nodes_of, parser, refusal, remarks

NOT_RUN = 4
MOST_STEPS = 4  # How many steps fit into a picture; a trace has all
LATE_SECONDS = 5.0  # Ranks that have waited so long for one that does something else are told of
COLOURS = (36, 33, 35, 32, 34, 31)


def main(arguments: Sequence[str], read_on: text.ReadOn = text.NOWHERE, program: str = "lockstep run") -> int:
    """Run and explain; `read_on` is where the reader of an explanation finds more, `program` what this is called here.

    Exit codes: 0 all ranks ended well, 1 one did not, replicas drifted apart or numbers became NaN, 2 usage, 3 our own
    fault, 4 not run because this machine lacks something, 130 Ctrl-C, 143 SIGTERM.
    """
    usage = parser(program)
    options = usage.parse_args(list(arguments))
    try:
        from_slurm = run_slurm.fill_in(options, os.environ)
        nodes = nodes_of(options.nnodes or "1")
        if why := refusal(options, nodes):
            raise ValueError(why)
        per_node = 1 if options.spawns else _count(options.nproc_per_node or "2")
        if options.timeline and _device(options) == "cuda":
            raise ValueError("--timeline: the times of a GPU's work are not on the CPU's clock: add --device cpu, or use "
                             "torch.profiler")  # fmt: skip
        shown = filtered(options.local_ranks_filter, per_node)
        network = _network(options)
    except ValueError as error:
        usage.error(str(error))
    if options.no_python and shutil.which(options.script) is None:
        usage.error(f"there is no program {options.script}")
    if not options.module and not options.no_python and not os.path.isfile(options.script):
        usage.error(f"there is no file {options.script}")
    if not options.spawns:
        print(f"As torchrun: {torchrun(options, per_node, nodes.count)}", file=sys.stderr)
    for remark in [*filter(None, [from_slurm]), *remarks(options, nodes)]:
        print(remark, file=sys.stderr)
    try:
        once = partial(_once, options, per_node, nodes, network, shown)
        result, status = _runs(options, once, read_on)
    except ranks.NotRun as missing:
        print(f"not run: {missing}", file=sys.stderr)
        if options.json:
            print(json.dumps({"outcome": "not run", "exit_status": NOT_RUN, "headline": str(missing)}))
        return NOT_RUN
    except KeyboardInterrupt:  # before a rank was started
        print("interrupted: the other nodes had not come.", file=sys.stderr)
        return 128 + signal.SIGINT
    for line in run_report.workflow_commands(result):
        print(line, file=sys.stderr)
    if options.report:
        print(_write_report(result, options, read_on), file=sys.stderr)
    if options.json:
        print(json.dumps(run_report.to_json(result, status, read_on)))
    return status


def _runs(options: argparse.Namespace, once: Callable[[int], ranks.Run], read_on: text.ReadOn) -> tuple[ranks.Run, int]:
    """Run, once or until it ends well or has been started again as often as it may be; the last run and the exit status."""
    for restart in range(options.max_restarts + 1):
        began = time.monotonic()
        result = once(restart)
        if options.timeline:
            print(_draw(result, Path(options.timeline), options.script), file=sys.stderr)
        mixed = "" if result.cause or result.node else text.silent_mismatch(result, room(stderr=True))
        if mixed:
            show_text("\n" + mixed, stderr=True)
        if result.node:
            result.replicas = None  # node 0 has them
        sys.stdout.flush()
        if options.watch_replicas and not result.node:
            show_text("\n" + text.replicas(result, min(width(stderr=True), text.WIDTH)), stderr=True)
        if result.cause is None:
            differ = bool(result.replicas and (result.replicas.drift or result.replicas.blowup))
            if console(stderr=True).is_terminal and not (mixed or differ or result.node):
                whole = time.monotonic() - began
                show_text("\n" + text.fit(text.ended_well(result, whole), room(stderr=True)), stderr=True)
            return result, int(differ)
        show_text("\n" + text.describe(result, read_on, room(stderr=True)), stderr=True)
        if result.cause.kind is ranks.Kind.INTERRUPTED:
            return result, 128 + (result.signal or signal.SIGINT)
        if restart < options.max_restarts:
            print(f"\nRestart {restart + 1} of {options.max_restarts}: all ranks start again.", file=sys.stderr)
    return result, 1


def _write_report(result: ranks.Run, options: argparse.Namespace, read_on: text.ReadOn) -> str:
    try:
        Path(options.report).write_text(run_report.page(result, options.script, read_on), encoding="utf-8")
    except OSError as error:
        return f"No report: {error}"
    return f"Report: {options.report}"


def _once(
    options: argparse.Namespace,
    per_node: int,
    nodes: Nodes,
    network: ranks.Function | None,
    shown: frozenset[int] | None,
    restart: int,
) -> ranks.Run:
    printer = Printer(not options.no_prefix and not options.spawns, shown, per_node, all_to_stderr=options.json)
    target: ranks.Target = ranks.Script(options.script, tuple(options.arguments), module=options.module)
    if options.no_python and not options.run_path:
        target = ranks.Program(options.script, tuple(options.arguments))
    result = ranks.run(
        target,
        per_node * nodes.count,
        nodes=nodes.count,
        launcher=options.spawns,
        network=network,
        device=_device(options),
        deadline=options.deadline,
        idle_limit=None,
        memory_limit=int(options.memory * (1 << 30)) if options.memory else None,
        output_limit=None,
        restart=restart,
        max_restarts=options.max_restarts,
        role=options.role,
        run_id=options.rdzv_id or ranks.Job.run_id,
        virtual_local_rank=options.virtual_local_rank,
        watch_replicas=options.watch_replicas,
        timeline=bool(options.timeline),
        mark_steps=bool(options.timeline),
        grace=_grace(options),
        own_temporary=False,
        late_after=LATE_SECONDS,
        meeting=meeting_of(options) if nodes.count > 1 and are_elsewhere(options) else None,
        on_output=printer.take,
        on_notice=printer.say,
    )
    printer.close()
    return result


def _draw(result: ranks.Run, file: Path, script: str) -> str:
    """Write the run's timeline to a file, and say what is in it, or why there is none."""
    try:
        panel = timeline.whole(result, MOST_STEPS if file.suffix == ".html" else None)
        drawn = timeline.Timeline((panel,))
        shown = "no training steps were seen"
        if panel.numbers:
            first, last = panel.numbers[0], panel.numbers[-1]
            shown = f"step {first}{f' to step {last}' if last > first else ''}, of {panel.of}"
        if file.suffix == ".json":
            drawn.save_trace(file)
        else:
            begin = shown[:1].upper() + shown[1:]
            said = timeline.verdict(panel) if result.cause is None else text.headline(result)
            notes = [f"{begin}.", *([said] if said else [])]
            title = f"{script} on {len(panel.steps[0])} ranks"
            file.write_text(timeline_picture.page(drawn, title, notes), encoding="utf-8")
    except (ValueError, OSError) as error:
        return f"No timeline: {error}"
    return f"Timeline: {file} ({shown})"


def _device(options: argparse.Namespace) -> str:
    return str(options.device or ("cuda" if gpu_count() else "cpu"))


def _grace(options: argparse.Namespace) -> float:
    """torchrun's: the option, else the variable, else 30 s."""
    seconds = options.shutdown_timeout
    return float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30") if seconds is None else seconds)


def _network(options: argparse.Namespace) -> ranks.Function | None:
    """Where the ranks stand. Raises ValueError for what is no bandwidth."""
    if options.hosts:
        return cluster.own_hosts(options.bandwidth)
    return cluster.slow_link(options.bandwidth) if options.bandwidth else None


def torchrun(options: argparse.Namespace, per_node: int, nodes: int) -> str:
    """The command that does the same without Lockstep."""
    parts = ["torchrun", f"--nproc-per-node={per_node}"]
    alone = nodes == 1 or not are_elsewhere(options)
    if nodes == 1:
        parts[1:1] = ["--standalone"]
    elif alone:
        parts[1:1] = [f"--nnodes={nodes}", "--rdzv-backend=c10d", "--rdzv-endpoint=HOST:29500"]
    else:
        given = {
            name: getattr(options, name)
            for name in ("node_rank", "rdzv_backend", "rdzv_endpoint", "master_addr", "master_port")
        }
        parts[1:1] = [
            f"--nnodes={nodes}",
            *(f"--{name.replace('_', '-')}={value}" for name, value in given.items() if value),
        ]
    if options.max_restarts:
        parts.append(f"--max-restarts={options.max_restarts}")
    parts += [f"--role={options.role}"] if options.role != "default" else []
    parts += [f"--rdzv-id={options.rdzv_id}"] if options.rdzv_id and nodes > 1 else []
    parts += [f"--local-ranks-filter={options.local_ranks_filter}"] if options.local_ranks_filter else []
    parts += ["--virtual-local-rank"] if options.virtual_local_rank else []
    parts += ["--no-python"] if options.no_python and not options.run_path else []
    parts += ["-m"] if options.module else []
    command = shlex.join([*parts, options.script, *options.arguments])
    return command + ("   (on every node)" if nodes > 1 and alone else "")


class Printer:
    """Shows whole lines as they come, each with its rank, on the stream that the rank wrote them to.

    A progress bar, which a carriage return rewrites, is shown as it is written. The bars of several ranks share a line of
    the terminal, as they do under torchrun; a whole line puts them aside.
    """

    def __init__(
        self, prefix: bool, shown: frozenset[int] | None = None, per_node: int = 1, all_to_stderr: bool = False
    ) -> None:
        """`shown` are the local ranks, of `per_node` on each node, that are shown; None is all."""
        self.all_to_stderr = all_to_stderr
        self.prefix, self.shown, self.per_node = prefix, shown, per_node
        self.colored = {name: console(name == "stderr").color_system for name in ("stdout", "stderr")}
        self.lines: dict[tuple[int, str], _Line] = {}
        self.bar: tuple[int, str] | None = None  # Whose bar is on the terminal's last line

    def take(self, rank: int, stream: str, chunk: str) -> None:
        if self.shown is not None and rank % self.per_node not in self.shown:
            return
        stream = "stderr" if self.all_to_stderr else stream
        line = self.lines.setdefault((rank, stream), _Line())
        for piece, end in _PIECE.findall(chunk):
            if piece:
                line.text = piece if line.returned else line.text + piece
                line.returned = False
            if end == "\n":
                self._show(rank, stream, line.text)
                line = self.lines[rank, stream] = _Line()
            elif end:
                line.returned = line.is_bar = True
        if line.is_bar and line.text:
            self._show_bar(rank, stream, line.text)

    def close(self) -> None:
        """Show unfinished lines too."""
        for (rank, stream), line in sorted(self.lines.items()):
            if line.text:
                self._show(rank, stream, line.text)
        self.lines.clear()

    def say(self, said: str) -> None:
        """Show what is no rank's on stderr."""
        self._put_bar_aside(None)
        print(text.fit(said, room(stderr=True)), file=sys.stderr, flush=True)

    def _show(self, rank: int, stream: str, text: str) -> None:
        self._put_bar_aside((rank, stream))
        self._write(rank, stream, text, "\n")

    def _show_bar(self, rank: int, stream: str, text: str) -> None:
        if self.bar is not None and self.bar[1] != stream:
            self._put_bar_aside(None)
        self._write(rank, stream, text, "", again=self.bar is not None)
        self.bar = (rank, stream)

    def _put_bar_aside(self, owner: tuple[int, str] | None) -> None:
        """Make room for a whole line: a bar of `owner`'s becomes it, another's is wiped off a terminal, or kept in a file."""
        if self.bar is None:
            return
        out = _stream(self.bar[1])
        out.write("\r\x1b[K" if out.isatty() else "\r" if self.bar == owner else "\n")
        self.bar = None

    def _write(self, rank: int, stream: str, text: str, end: str, again: bool = False) -> None:
        out = _stream(stream)
        mark = f"[rank {rank}] " if self.prefix else ""
        if mark and self.colored[stream]:
            mark = f"\x1b[{COLOURS[rank % len(COLOURS)]}m{mark}\x1b[0m"
        start = "" if not again else "\r\x1b[K" if out.isatty() else "\r"
        try:
            print(start + mark + text, file=out, end=end, flush=True)
        except BrokenPipeError:
            sys.exit(141)


_PIECE = re.compile(r"([^\r\n]*)(\n|\r|\Z)")


@dataclass
class _Line:
    """What a rank has written since its last newline: the visible text, and whether a carriage return came after it."""

    text: str = ""
    returned: bool = False
    is_bar: bool = False


def _stream(name: str) -> TextIO:
    return sys.stdout if name == "stdout" else sys.stderr


def gpu_count() -> int:
    """How many NVIDIA GPUs the driver names, without importing torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([item for item in visible.split(",") if item.strip() not in ("", "-1")])
    try:
        return len(os.listdir("/proc/driver/nvidia/gpus"))
    except OSError:
        return 0


def _count(text_: str) -> int:
    if text_ in ("cpu", "auto", "gpu"):
        count = gpu_count() if text_ != "cpu" else 0
        if text_ == "gpu" and not count:
            raise ValueError("--nproc-per-node=gpu, and this machine has no GPU: give a number")
        return count or os.cpu_count() or 1
    if not text_.isdigit() or int(text_) < 1:
        raise ValueError(f"--nproc-per-node is {text_!r}; it must be a number from 1 on")
    return int(text_)
