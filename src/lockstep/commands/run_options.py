"""The options of `lockstep run`: torchrun's whole command line and ours.

Each of torchrun's options has its effect, or is refused with a sentence that says what to do instead: none is taken and
then ignored. As with torchrun, the variable PET_NAME gives an option's default.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ..ranks import Meeting

ELSEWHERE = "{given} is for a job on several machines: say with --nnodes how many, or leave the option out"
WHERE_TO_MEET = "{given}: the nodes need an address to meet at: add --rdzv-endpoint HOST:PORT, or --master-addr HOST; or leave the option out"
LOGS = "{given}: lockstep run writes no log files; leave the option out and redirect the output, as in 2>&1 | tee log"
REFUSED = {
    "log_dir": LOGS,
    "redirects": LOGS,
    "tee": LOGS,
    "duplicate_stdout_filters": "{given}: lockstep run does not copy lines; leave the option out and filter the output",
    "duplicate_stderr_filters": "{given}: lockstep run does not copy lines; leave the option out and filter the output",
    "logs_specs": "{given}: lockstep run writes no log files; leave the option out",
    "event_log_handler": "{given}: there is no elastic agent here whose events could be logged; leave the option out",
    "numa_binding": "{given}: lockstep run binds no rank to a processor; leave the option out, or use torchrun",
    "monitor_interval": "{given}: ranks are watched all the time, without an interval; leave the option out",
    "rdzv_conf": "{given}: nodes wait 10 minutes for each other, as with torchrun; leave the option out",
    "local_addr": "{given}: the system chooses the address; leave the option out, or set GLOO_SOCKET_IFNAME",
}
"""Options of torchrun that can have no effect here, and what to do."""
HARMLESS = {"redirects": ("0",), "tee": ("0",), "event_log_handler": ("null",)}  # Values that ask for nothing
SPAWNS = ("spawn", "start_processes")  # Functions of torch.multiprocessing with which a script starts its ranks itself
TORCHS = r"\btorch(\.| import )multiprocessing\b"
STARTS = ("fork", "Process", "Popen")  # Other ways to start a process
MEETING = ("node_rank", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "master_addr", "master_port")
"""What several nodes need to find each other."""
RANKS_OF_OURS = (
    "nproc_per_node", "max_restarts", "role", "rdzv_id", "local_ranks_filter", "virtual_local_rank", "no_python", "bandwidth",
    "hosts", "watch_replicas",
)  # fmt: skip
"""Options for ranks that Lockstep starts: a script that starts its own has use for none of them."""
ADDRESS = ("node_rank", "rdzv_endpoint", "master_addr", "master_port")
"""Of these, one at least says that the nodes are machines of their own."""
ALONE = {
    "hosts": "it makes hosts of its own, on this machine",
    "bandwidth": "it is for ranks on this machine",
    "timeline": "the clocks of several machines differ by more than a bar is long",
    "max_restarts": "the nodes do not meet again after a failure",
    "standalone": "it means one machine",
}
"""Options that have no effect beside nodes on other machines, and why."""
PORT = 29500  # Where nodes meet when the command line has no port, as with torchrun's --master-port
ENDPOINT_PORT = 29400  # ... for --rdzv-endpoint.
BACKENDS = ("static", "c10d")
COLUMN, WIDEST = 26, 100  # Where the help's explanations begin, and where its lines end
SIGNALS = {"SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"}


class _Help(argparse.HelpFormatter):
    """As wide as the terminal; of two spellings of an option, only the one with hyphens."""

    def __init__(self, prog: str) -> None:
        width = min(shutil.get_terminal_size().columns, WIDEST) - 2
        super().__init__(prog, max_help_position=COLUMN, width=width)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        names = ", ".join(name for name in action.option_strings if "_" not in name)
        value = action.metavar or "|".join(action.choices or ())
        return f"{names} {value}".rstrip() if names else action.dest


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\nAll options: {self.prog} --help\n")


@dataclass(frozen=True)
class Nodes:
    """How many nodes the job has, and how many it may grow to."""

    count: int
    most: int


def parser(program: str) -> argparse.ArgumentParser:
    options = _Parser(
        prog=program,
        usage="%(prog)s [options] script ...",
        add_help=False,
        formatter_class=_Help,
        description="Run a script on N ranks of this machine as torchrun would, and explain hangs and failures.",
        epilog="An option of torchrun that can have no effect here is refused, with a sentence that says what to do.",
    )
    options.add_argument_group("For example", f"{program} -n 4 train.py --epochs 3")
    what = options.add_argument_group("What to run")
    what.add_argument("script", help="the Python file to run")
    what.add_argument("arguments", nargs=argparse.REMAINDER, help="what the script is given")
    launch = options.add_argument_group("Launch")
    _add(launch, "-n", "--nproc-per-node", metavar="N",
         help="ranks per node: a number, or cpu, gpu, auto as with torchrun (default 2)")  # fmt: skip
    _add(launch, "--nnodes", metavar="K",
         help="K nodes of N ranks each: on this machine, or, with --rdzv-endpoint, --node-rank or under srun, each on its own")  # fmt: skip
    _flag(launch, "-m", "--module", help="the script is a module's name, as with python -m")
    _flag(launch, "--no-python",
          help="the script is any program: how it ends is explained, its collectives are not seen")  # fmt: skip
    launch.add_argument("--spawns", action="store_true",
                         help="the script starts its ranks itself, with mp.spawn: it is started once, and they are watched")  # fmt: skip
    launch.add_argument("--device", choices=("cpu", "cuda"), default=None,
                         help="cpu hides the GPUs from the ranks (default: what the machine has)")  # fmt: skip
    _flag(launch, "--virtual-local-rank", help="LOCAL_RANK is 0 for all ranks, and each sees one GPU, its own")
    launch.add_argument("--bandwidth", metavar="RATE", default=None,
                         help="let the ranks share a link this slow, such as 1gbit; with --hosts, each node has its own")  # fmt: skip
    launch.add_argument("--hosts", action="store_true",
                         help="make each node of --nnodes a host with its own name and address")  # fmt: skip
    _add(launch, "--node-rank", metavar="K", help="this machine's number, if the nodes are machines of their own")
    _add(launch, "--rdzv-endpoint", metavar="HOST:PORT", help="where the nodes meet: an address of node 0")
    _add(launch, "--rdzv-id", default=None, metavar="ID", help="the ranks' TORCHELASTIC_RUN_ID")
    _add(launch, "--role", default="default", metavar="ROLE", help="the ranks' ROLE_NAME")
    _flag(launch, "--run-path", help="accepted: a script always runs inside its rank's interpreter")
    _flag(launch, "--standalone", help="accepted: all ranks are on this machine anyway")
    failures = options.add_argument_group("Hangs and failures")
    failures.add_argument("--watch-replicas", action="store_true",
                         help="compare the models of all ranks after every optimizer step, and report the first that differs")  # fmt: skip
    failures.add_argument("--deadline", type=float, default=None, metavar="SECONDS", help="end the run after so long")
    failures.add_argument("--memory", type=float, default=None, metavar="GIB", help="end a rank that holds more")
    _add(failures, "--max-restarts", type=int, default=0, metavar="R",
         help="start all ranks again after a failure, at most R times")  # fmt: skip
    _add(failures, "--shutdown-timeout", type=int, metavar="SECONDS",
         help="how long ranks that are stopped have for their SIGTERM handlers, as with torchrun (default 30)")  # fmt: skip
    output = options.add_argument_group("Output")
    output.add_argument("--timeline", metavar="FILE", default=None,
                         help="draw what each rank computed and sent: FILE.html is a page, FILE.json a trace for ui.perfetto.dev")  # fmt: skip
    output.add_argument("--report", metavar="FILE.html", default=None, help="write the explanation as a page")
    output.add_argument("--json", action="store_true",
                         help="print one JSON object on stdout, and all that the ranks print on stderr")  # fmt: skip
    _add(output, "--local-ranks-filter", default="", metavar="0,1", help="print only what these local ranks print")
    output.add_argument("--no-prefix", action="store_true", help="do not mark lines with their rank")
    output.add_argument("-h", "--help", action="help", help="show this help")
    # Of a script torchrun starts processes by `exec`, whatever this says.
    _add(options, "--start-method", default="spawn", choices=("spawn", "fork", "forkserver"), help=argparse.SUPPRESS)
    _add(options, "--signals-to-handle", default="", help=argparse.SUPPRESS)
    _add(options, "-r", "--redirects", help=argparse.SUPPRESS)
    _add(options, "-t", "--tee", help=argparse.SUPPRESS)
    for name in (*REFUSED, *MEETING):
        if name not in ("redirects", "tee", "rdzv_id", "node_rank", "rdzv_endpoint"):
            _add(options, "--" + name.replace("_", "-"), help=argparse.SUPPRESS)
    return options


def _names(names: Sequence[str]) -> list[str]:
    """With the spelling that has underscores too."""
    return list(dict.fromkeys(spelled for name in names for spelled in (name, "--" + name[2:].replace("-", "_")
                              if name.startswith("--") else name)))  # fmt: skip


def _add(options: argparse._ActionsContainer, *names: str, default: str | int | None = None, **more: Any) -> None:
    variable = "PET_" + names[-1].lstrip("-").replace("-", "_").upper()
    options.add_argument(*_names(names), default=os.environ.get(variable, default), **more)


def _flag(options: argparse._ActionsContainer, *names: str, help: str) -> None:
    variable = "PET_" + names[-1].lstrip("-").replace("-", "_").upper()
    default = os.environ.get(variable, "0") not in ("", "0")
    options.add_argument(*_names(names), action="store_true", default=default, help=help)


def refusal(options: argparse.Namespace, nodes: Nodes) -> str:
    """Why this command line cannot be carried out here, and what to do instead; empty when it can."""
    for name, why in REFUSED.items():
        value = getattr(options, name)
        if value is not None and value not in HARMLESS.get(name, ()):
            return why.format(given=_given(name, value))
    if why := _refused_meeting(options, nodes):
        return why
    if options.signals_to_handle and set(options.signals_to_handle.split(",")) != SIGNALS:
        return (
            f"{_given('signals_to_handle', options.signals_to_handle)}: lockstep run passes on SIGTERM, SIGINT, SIGHUP and "
            "SIGQUIT; leave the option out"
        )
    if options.spawns:
        meant = [name for name in RANKS_OF_OURS if getattr(options, name) not in (None, False, 0, "", "default")]
        if meant := [*meant, *["nnodes"] * (nodes.count > 1)]:
            given = meant[0].replace("_", "-")
            return f"--{given}: with --spawns the script starts its ranks itself; leave one of the two out"
    if options.timeline is not None:
        if Path(options.timeline).suffix not in (".html", ".json"):
            return f"--timeline {options.timeline}: name a file that ends in .html (a page) or .json (a trace)"
        if not Path(options.timeline).resolve().parent.is_dir():
            return f"--timeline {options.timeline}: there is no folder {Path(options.timeline).resolve().parent}"
        if options.no_python:
            return "--timeline: of a program that is started with --no-python nothing is seen; leave one of them out"
    if options.report is not None:
        if Path(options.report).suffix != ".html":
            return f"--report {options.report}: the name must be that of a page, such as report.html"
        if not Path(options.report).resolve().parent.is_dir():
            return f"--report {options.report}: there is no folder {Path(options.report).resolve().parent}"
    if options.no_python and options.module:
        return "--no-python and --module exclude each other: leave one of them out"
    return ""


def _refused_meeting(options: argparse.Namespace, nodes: Nodes) -> str:
    """Why nodes on several machines can't meet as these options say."""
    given = {name: getattr(options, name) for name in MEETING if getattr(options, name) is not None}
    if nodes.most == 1 or options.standalone:
        for name, value in given.items():
            if not _is_here(name, str(value), options.standalone):
                return ELSEWHERE.format(given=_given(name, value))
        return ""
    if not given:
        return ""
    if options.rdzv_backend not in (None, *BACKENDS):
        return f"{_given('rdzv_backend', options.rdzv_backend)}: it must be c10d or static, or leave the option out"
    if not are_elsewhere(options):
        return (
            ""
            if set(given) == {"rdzv_id"} and nodes.most == nodes.count
            else WHERE_TO_MEET.format(given=_given(*next(iter(given.items()))))
        )
    if nodes.most != nodes.count:
        return f"--nnodes {options.nnodes}: nodes that come and go are torchrun's; it must be one number"
    for name, why in ALONE.items():
        if getattr(options, name):
            return f"--{name.replace('_', '-')}: with nodes on several machines, {why}; leave the option out"
    node = options.node_rank
    if node is not None and not (node.isdigit() and int(node) < nodes.count):
        return f"{_given('node_rank', node)}: it must be a number from 0 to {nodes.count - 1}"
    try:
        meeting_of(options)
    except ValueError as error:
        return str(error)
    return ""


def are_elsewhere(options: argparse.Namespace) -> bool:
    """True when each node is a machine of its own."""
    return any(getattr(options, name) is not None for name in ADDRESS)


def meeting_of(options: argparse.Namespace) -> Meeting:
    """Where the nodes meet. Raises ValueError for what is no address."""
    endpoint = options.rdzv_endpoint
    if endpoint:
        host, colon, port = endpoint.rpartition(":")
        if not colon or endpoint.endswith("]"):
            host, port = endpoint, ""
        name, port = "--rdzv-endpoint", port or str(ENDPOINT_PORT)
    else:
        host, port, name = options.master_addr or "127.0.0.1", options.master_port or str(PORT), "--master-port"
    if not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"{name}: {port!r} is no port; it must be a number from 1 to 65535")
    node = None if options.node_rank is None else int(options.node_rank)
    secret = os.environ.get("LOCKSTEP_SECRET", "") + (options.rdzv_id or "")
    return Meeting(host.strip("[]"), int(port), node, secret)


def _given(name: str, value: object) -> str:
    return f"--{name.replace('_', '-')} {value}"


def _is_here(name: str, value: str, standalone: bool) -> bool:
    """True when the option asks for nothing but one node on this machine."""
    if standalone and name.startswith("rdzv"):  # torchrun does not look at it then
        return True
    if name == "node_rank":
        return value == "0"
    if name == "rdzv_backend":
        return value in BACKENDS
    if name in ("rdzv_endpoint", "master_addr"):
        host = value if name == "master_addr" else value.rpartition(":")[0] or value
        return host.strip("[]") in ("", "localhost", "127.0.0.1", "::1", "0:0:0:0:0:0:0:1", socket.gethostname())
    return True


def remarks(options: argparse.Namespace, nodes: Nodes) -> list[str]:
    """What the user should know of how the command line is read."""
    said = []
    if nodes.count > 1 and are_elsewhere(options):
        return _no_python(options)
    endpoint = "" if options.standalone else options.rdzv_endpoint or ""
    if options.master_port is not None or endpoint.rpartition(":")[2] not in ("", "0"):
        said.append(
            "With --spawns the script itself says where its ranks meet: the port given here is not used."
            if options.spawns
            else "The ranks meet at a free port of this machine: MASTER_PORT tells them which."
        )
    if nodes.count > 1 and not options.hosts:
        said.append(f"All {nodes.count} nodes are on this machine; torchrun starts them on machines of their own.")
    if not options.spawns and not options.module and (line := _calling_line(options.script, SPAWNS, TORCHS)):
        said.append(f"{options.script}:{line} calls mp.spawn. If the script starts its ranks itself, use --spawns: it is "
                    "started once, and the ranks that it starts are watched.")  # fmt: skip
    elif (
        options.nproc_per_node == "1"
        and not options.spawns
        and not options.module
        and (line := _calling_line(options.script, STARTS))
    ):
        said.append(f"{options.script}:{line} starts processes. If they are ranks: with multiprocessing's spawn method, use --spawns and they "
                    "are watched; with fork, forkserver or subprocess they are not, and lockstep attach explains them while they hang.")  # fmt: skip
    return said + _no_python(options)


def _no_python(options: argparse.Namespace) -> list[str]:
    return (
        [f"{options.script} runs as it is: its collectives are not seen, only how it ends."]
        if options.no_python
        else []
    )


def _calling_line(script: str, functions: tuple[str, ...], text: str = "") -> int | None:
    """The first line of this script, if it is one that can be read and has this text in it, that calls one of these."""
    try:
        source = Path(script).read_text(encoding="utf-8")
        calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return None
    lines = (call.lineno for call in calls if ast.unparse(call.func).rpartition(".")[2] in functions)
    return min(lines, default=None) if re.search(text, source) else None


def nodes_of(text: str) -> Nodes:
    """`2`, or `1:2`, of which the smaller number counts on one machine. Raises ValueError for anything else."""
    few, colon, most = text.partition(":")
    if not few.isdigit() or int(few) < 1 or (colon and not (most.isdigit() and int(most) >= int(few))):
        raise ValueError(f"--nnodes is {text!r}; it must be a number from 1 on, or MIN:MAX")
    return Nodes(int(few), int(most) if colon else int(few))


def filtered(text: str, per_node: int) -> frozenset[int] | None:
    """The local ranks whose output is shown; None for all. Raises ValueError for what is no list of them."""
    if not text:
        return None
    numbers = [item.strip() for item in text.split(",")]
    if not all(number.isdigit() and int(number) < per_node for number in numbers):
        raise ValueError(f"--local-ranks-filter is {text!r}; it must be numbers from 0 to {per_node - 1} with commas")
    return frozenset(map(int, numbers))
