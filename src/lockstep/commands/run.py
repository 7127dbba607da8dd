"""`lockstep run`: any script under torchrun's flags, with its hangs and failures explained."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from typing import NoReturn

from .. import cluster, ranks
from ..ranks import text
from ..ranks.line_buffer import LineBuffer

NOT_RUN = 4
COLOURS = (36, 33, 35, 32, 34, 31)
IGNORED = ("--standalone", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf", "--log-dir", "--tee", "-t",
           "--redirects", "-r", "--start-method", "--monitor-interval", "--role", "--local-addr", "--master-addr",
           "--master-port", "--node-rank")  # fmt: skip
FLAGS_ONLY = ("--standalone",)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\nAll options: {self.prog} --help\n")


def parser(program: str) -> argparse.ArgumentParser:
    """torchrun's flags that mean something on one machine, and ours."""
    options = _Parser(
        prog=program,
        description="Run a script on N ranks of this machine as torchrun would, and explain hangs and failures.",
        epilog="torchrun's other flags (rendezvous, logging) are accepted and have no effect here.",
    )
    options.add_argument(
        "-n",
        "--nproc-per-node",
        "--nproc_per_node",
        default="2",
        metavar="N",
        help="ranks per node: a number, or cpu, gpu, auto as with torchrun (default 2)",
    )
    options.add_argument(
        "--nnodes", default="1", metavar="K", help="tell the ranks that they are on K nodes of N ranks each"
    )
    options.add_argument("-m", "--module", action="store_true", help="the script is a module's name, as with python -m")
    options.add_argument(
        "--max-restarts",
        "--max_restarts",
        type=int,
        default=0,
        metavar="R",
        help="start all ranks again after a failure, at most R times",
    )
    options.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default=None,
        help="cpu hides the GPUs from the ranks (default: what the machine has)",
    )
    options.add_argument(
        "--bandwidth",
        metavar="RATE",
        default=None,
        help="let the ranks share a link this slow, such as 1gbit; with --hosts, each node has its own",
    )
    options.add_argument(
        "--hosts", action="store_true", help="make each node of --nnodes a host with its own name and address"
    )
    options.add_argument("--deadline", type=float, default=None, metavar="SECONDS", help="end the run after so long")
    options.add_argument("--memory", type=float, default=None, metavar="GIB", help="end a rank that holds more")
    options.add_argument(
        "--watch-replicas",
        action="store_true",
        help="compare the models of all ranks after every optimizer step, and report the first that differs",
    )
    options.add_argument("--no-prefix", action="store_true", help="do not mark lines with their rank")
    options.add_argument("script", help="the Python file to run")
    options.add_argument("arguments", nargs=argparse.REMAINDER, help="what the script is given")
    return options


def main(arguments: Sequence[str], read_on: text.ReadOn = text.NOWHERE, program: str = "lockstep run") -> int:
    """Run and explain; `read_on` is where the reader of an explanation finds more, `program` what this is called here.

    Exit codes: 0 all ranks ended well, 1 one did not or replicas drifted apart, 2 usage, 3 our own
    fault, 4 not run because this machine lacks something, 130 Ctrl-C.
    """
    usage = parser(program)
    options = usage.parse_args(_without_ignored(list(arguments)))
    try:
        per_node, nodes = _count(options.nproc_per_node), _nodes(options.nnodes)
        network = _network(options)
    except ValueError as error:
        usage.error(str(error))
    if not options.module and not os.path.isfile(options.script):
        usage.error(f"there is no file {options.script}")
    print(f"As torchrun: {torchrun(options, per_node, nodes)}", file=sys.stderr)
    for restart in range(options.max_restarts + 1):
        try:
            result = _once(options, per_node, nodes, network, restart)
        except ranks.NotRun as missing:
            print(f"not run: {missing}", file=sys.stderr)
            return NOT_RUN
        if result.cause is None and not options.watch_replicas:
            return 0
        sys.stdout.flush()
        if options.watch_replicas:
            print("\n" + text.replicas(result), file=sys.stderr)
        if result.cause is None:
            return 1 if result.replicas and result.replicas.drift else 0
        print("\n" + text.describe(result, read_on), file=sys.stderr)
        if result.cause.kind is ranks.Kind.INTERRUPTED:
            return 130
        if restart < options.max_restarts:
            print(f"\nRestart {restart + 1} of {options.max_restarts}: all ranks begin again.", file=sys.stderr)
    return 1


def _once(
    options: argparse.Namespace, per_node: int, nodes: int, network: ranks.Function | None, restart: int
) -> ranks.Run:
    printer = Printer(per_node * nodes, prefix=not options.no_prefix)
    result = ranks.run(
        ranks.Script(options.script, tuple(options.arguments), module=options.module),
        per_node * nodes,
        nodes=nodes,
        network=network,
        device=options.device or ("cuda" if gpu_count() else "cpu"),
        deadline=options.deadline,
        idle_limit=None,
        memory_limit=int(options.memory * (1 << 30)) if options.memory else None,
        output_limit=None,
        restart=restart,
        max_restarts=options.max_restarts,
        watch_replicas=options.watch_replicas,
        on_output=printer.take,
    )
    printer.close()
    return result


def _network(options: argparse.Namespace) -> ranks.Function | None:
    """Where the ranks stand. Raises ValueError for what is no bandwidth."""
    if options.hosts:
        return cluster.own_hosts(options.bandwidth)
    return cluster.slow_link(options.bandwidth) if options.bandwidth else None


def torchrun(options: argparse.Namespace, per_node: int, nodes: int) -> str:
    """The command that does the same without Lockstep."""
    parts = ["torchrun", f"--nproc-per-node={per_node}"]
    parts[1:1] = (
        ["--standalone"] if nodes == 1 else [f"--nnodes={nodes}", "--rdzv-backend=c10d", "--rdzv-endpoint=HOST:29500"]
    )
    if options.max_restarts:
        parts.append(f"--max-restarts={options.max_restarts}")
    if options.module:
        parts.append("-m")
    command = shlex.join([*parts, options.script, *options.arguments])
    return command + ("   (on every node)" if nodes > 1 else "")


class Printer:
    """Shows whole lines as they come, each with its rank, on the stream that the rank wrote them to."""

    def __init__(self, world_size: int, prefix: bool) -> None:
        self.world_size, self.prefix = world_size, prefix
        self.lines = LineBuffer()

    def take(self, rank: int, stream: str, chunk: str) -> None:
        """Called with each piece of text."""
        for line in self.lines.take(rank, stream, chunk):
            self._show(rank, stream, line)

    def close(self) -> None:
        """Show unfinished lines too."""
        for rank, stream, rest in self.lines.rest():
            self._show(rank, stream, rest)

    def _show(self, rank: int, stream: str, line: str) -> None:
        out = sys.stdout if stream == "stdout" else sys.stderr
        mark = f"[rank {rank}] " if self.prefix else ""
        if mark and out.isatty():
            mark = f"\x1b[{COLOURS[rank % len(COLOURS)]}m{mark}\x1b[0m"
        try:
            print(mark + line, file=out, flush=True)
        except BrokenPipeError:
            sys.exit(141)


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


def _nodes(text_: str) -> int:
    first = text_.split(":")[0]
    if not first.isdigit() or int(first) < 1:
        raise ValueError(f"--nnodes is {text_!r}; it must be a number from 1 on")
    return int(first)


def _without_ignored(arguments: list[str]) -> list[str]:
    """Take torchrun's flags away that say how to rendezvous or log, up to the script's name."""
    kept: list[str] = []
    at = 0
    takes_value = {"-n", "--nproc-per-node", "--nproc_per_node", "--nnodes", "--max-restarts", "--max_restarts", "--device",
                   "--deadline", "--memory", "--bandwidth"}  # fmt: skip
    while at < len(arguments):
        argument = arguments[at]
        name = argument.split("=")[0].replace("_", "-")
        if not argument.startswith("-"):
            return kept + arguments[at:]
        if name in IGNORED:
            at += 1 if "=" in argument or name in FLAGS_ONLY else 2
            continue
        kept.append(argument)
        at += 1
        if argument in takes_value and at < len(arguments):
            kept.append(arguments[at])
            at += 1
    return kept
