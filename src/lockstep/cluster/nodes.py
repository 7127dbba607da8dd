"""Several nodes on this machine, to start commands on and to break."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from typing import IO, Any

from ..ranks import NotRun
from ..ranks.client import child_environment
from . import hosts, tools
from .orders import Answer, Kill, Order, Run, Shield, Signal, pack, unpack
from .rate import Rate, bits_per_second

STATUS = struct.Struct("i")  # How a command has ended, as the namespace host tells it
START_SECONDS = 30.0
ANSWER_SECONDS = 30.0


class ClusterError(Exception):
    """The cluster refused, or is gone; the text says why."""


def own_environment() -> dict[str, str]:
    """This process's environment, with the commands of its Python (`torchrun`) and the system's tools on the path."""
    path = os.environ.get("PATH", os.defpath)
    return {**os.environ, "PATH": os.pathsep.join([os.path.dirname(sys.executable), path, tools.SYSTEM_PATH])}


class Process:
    """A command on a node. `pid` is its number on this machine; `returncode` is negative for a signal, None before."""

    def __init__(self, nodes: Nodes, pid: int, ended: int, printed: IO[bytes] | None) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._nodes, self._printed = nodes, printed
        self._ended = os.fdopen(ended, "rb", buffering=0)

    def poll(self) -> int | None:
        """The return code, None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and return its code. Raises subprocess.TimeoutExpired after so many seconds."""
        if self.returncode is None:
            if not select.select([self._ended], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a command on a node", timeout or 0.0)
            with self._ended:
                told = self._ended.read(STATUS.size)
            # Nothing is told when the whole cluster is ended.
            self.returncode = STATUS.unpack(told)[0] if len(told) == STATUS.size else -signal.SIGKILL
        return self.returncode

    def send_signal(self, number: int) -> None:
        """To this one process; what it has started goes on. `Nodes.kill` ends all there is on a node."""
        if self.poll() is None:
            self._nodes._order(Signal(self.pid, int(number)))

    def terminate(self) -> None:
        """SIGTERM, which lets torchrun end its ranks."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    @property
    def output(self) -> str:
        """What it has printed so far, standard output and errors together; empty when they went elsewhere."""
        if self._printed is None:
            return ""
        size = os.fstat(self._printed.fileno()).st_size
        return os.pread(self._printed.fileno(), size, 0).decode(errors="replace")


class Nodes:
    """K hosts, each with a name, an address and a link of its own to one switch; the nodes are numbered from 0.

        with cluster.Nodes(2, bandwidth="1gbit") as nodes:
            command = ["torchrun", "--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d",
                       "--rdzv-endpoint=node0:29500", "train.py"]
            agents = [nodes.run(node, command) for node in range(2)]
            nodes.block_all_but(0, 29500)
            print([agent.wait(60) for agent in agents], agents[0].output)

    `names` and `addresses` tell them. Every name is known on every node and on `login` (node None), which stands on the
    same switch. They share this machine's files and processors, and reach nothing but each other. Temporary files
    (TMPDIR) and shared memory are the cluster's own. It all ends with the `with`, or with this process, however it ends.

    `bandwidth` is what each link passes each way, in bits a second (see `bits_per_second`); None: not throttled.
    Starting takes about a tenth of a second. Raises ValueError for impossible numbers, `ranks.NotRun` where the machine
    cannot do it (see `available("hosts")`), and ClusterError when the cluster is gone.
    """

    def __init__(self, count: int = 2, *, bandwidth: Rate | None = None) -> None:
        bits = None if bandwidth is None else bits_per_second(bandwidth)
        self.count = hosts.check_count(count)
        self.names = [hosts.name_of(node) for node in range(count)]
        self.addresses = [hosts.address_of(node) for node in range(count)]
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._namespace_host = subprocess.Popen(
                [sys.executable, "-m", "lockstep.cluster.namespace_host", str(theirs.fileno()), str(count), str(bits or 0)],
                pass_fds=[theirs.fileno()], env=child_environment(), stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        self._socket.settimeout(START_SECONDS)
        try:
            self._answer()
        except ClusterError as error:
            self.close()
            raise NotRun(str(error)) from None
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """The process below which everything in the cluster runs."""
        return self._namespace_host.pid

    def close(self) -> None:
        """End every process on every node, and the nodes. Twice is fine."""
        self._socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._namespace_host.wait(10)
        if self._namespace_host.poll() is None:
            self._namespace_host.kill()
            self._namespace_host.wait()

    def run(
        self,
        node: int | None,
        command: Sequence[str | os.PathLike[str]],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        stdin: IO[Any] | None = None,
        stdout: IO[Any] | int | None = None,
    ) -> Process:
        """Start a command on a node, or on `login` for None, and return at once.

        `env` is its whole environment (default: `own_environment()`), `cwd` its folder (default: this process's). What it
        prints is kept for `Process.output`, or goes to the file `stdout`; it reads from the file `stdin`. A command
        that cannot be started leaves with code 127, as in a shell, and its output says why. Raises IndexError for a
        node that there is not.
        """
        if node is not None:
            self._check(node)
        printed = tempfile.TemporaryFile() if stdout is None else None  # noqa: SIM115 - it lives as long as the Process
        out = printed.fileno() if printed is not None else stdout if isinstance(stdout, int) else stdout.fileno()  # type: ignore[union-attr]
        ended, tell = os.pipe()
        with open(os.devnull, "rb") as nothing:
            source = nothing if stdin is None else stdin
            try:
                environment = dict(own_environment() if env is None else env)
                order = Run(
                    node, [os.fspath(part) for part in command], environment, os.path.abspath(cwd or os.getcwd())
                )
                pid = self._order(order, [source.fileno(), out, out, tell])
            except BaseException:
                os.close(ended)
                raise
            finally:
                os.close(tell)
        return Process(self, pid, ended, printed)

    # Faults ----------------------------------------------------------------------------------------------------

    def kill(self, node: int) -> int:
        """SIGKILL every process on a node; returns how many there were. Its kernel still says goodbye for them: their
        peers read "Connection reset by peer". The node itself stays, and can be given new commands.
        """
        return self._order(Kill(self._check(node)))

    def block_all_but(self, node: int, *ports: int) -> None:
        """Let in only what goes to, or comes from, these TCP ports, as where somebody opened the one port of the
        rendezvous: a firewall that drops all other packets without an answer, on connections that are open too. Replaces
        what was blocked before; `unblock` opens all.
        """
        through = [f"iif {hosts.CARD} ipproto tcp {end} {_port(port)} lookup local"
                   for port in ports for end in ("dport", "sport")]  # fmt: skip
        self._order(Shield(self._check(node), [*through, f"blackhole iif {hosts.CARD} ipproto tcp"]))

    def unblock(self, node: int) -> None:
        """Open every port of a node."""
        self._order(Shield(self._check(node), []))

    # Talking to the namespace host -----------------------------------------------------------------------------------

    def _check(self, node: int) -> int:
        if not 0 <= node < self.count:
            raise IndexError(f"there is no node {node}; there are 0 to {self.count - 1}")
        return node

    def _order(self, order: Order, descriptors: Sequence[int] = ()) -> int:
        with self._lock, tempfile.TemporaryFile() as written:
            written.write(pack(order))
            written.flush()
            try:
                self._socket.settimeout(ANSWER_SECONDS)
                socket.send_fds(self._socket, [b"!"], [written.fileno(), *descriptors])
            except OSError as error:
                raise ClusterError(f"the cluster is gone: {error}") from None
            return self._answer()

    def _answer(self) -> int:
        try:
            data = self._socket.recv(1 << 16)
        except TimeoutError:
            raise ClusterError(f"the cluster has not answered within {self._socket.gettimeout():g} s") from None
        except OSError:
            data = b""
        if not data:
            raise ClusterError("the cluster is gone")
        answer: Answer = unpack(data, Answer)
        if answer.failed:
            raise ClusterError(answer.failed)
        return answer.done or 0


def _port(port: int) -> int:
    if not 1 <= port <= 65535:
        raise ValueError(f"{port} is no port")
    return port
