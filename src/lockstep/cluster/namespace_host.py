"""The process that holds a cluster of hosts and starts commands on them; everything in it ends with it.

Theory of operation. A client (`nodes.Nodes`) starts this process and holds one end of a
socket. This process builds the hosts in namespaces of its own, a process namespace among them, and then carries out
orders, one at a time, each with an answer: start this command on that host, break this link. It runs nobody's code
itself; a command is a child of this process, which goes to its host and becomes the command.

- The first child is the `init` of the process namespace: it collects what commands have detached, and when it ends, the
  kernel ends every process in there, however detached. It ends when this process does, by the kernel's hand.
- When the client goes, its end of the socket closes, and this process ends. So whichever of the three is killed, nothing
  stays: the namespaces, with links, addresses and mounts, go with the last process in them.
"""

from __future__ import annotations

import array
import contextlib
import os
import signal
import socket
import sys
import time

from ..ranks import processes
from ..ranks.fork_loop import ForkLoop
from . import hosts, namespaces, tools
from .availability import explain
from .nodes import STATUS
from .orders import Answer, Kill, Order, Run, Shield, Signal, pack, unpack

ORDER = socket.CMSG_SPACE(8 * 4)
NOT_STARTED = 127
MEMORY = "/dev/shm"
TEMPORARY = "/dev/shm/tmp"
_FIRST, _LOCAL_TABLE = 10, 32000
"""Preferences of routing rules: a fault's, and the one to which the table of own addresses is moved behind them."""


class NamespaceHost:
    def __init__(self, client: socket.socket) -> None:
        self.client = client
        self.processes = os.open("/proc", os.O_RDONLY | os.O_CLOEXEC)  # as they are known outside
        self.children: dict[int, int] = {}
        self.defaults: dict[str, str] = {}

    def build(self, count: int, bits: int | None) -> None:
        """Make the hosts. Raises OSError, tools.ToolFailed."""
        self.login, self.hosts = hosts.build(count, bits)
        with contextlib.suppress(OSError):  # What commands leave in memory and temporary folders goes with the hosts.
            namespaces.mount("tmpfs", MEMORY, "tmpfs")
            os.mkdir(TEMPORARY)
            self.defaults = {"TMPDIR": TEMPORARY}
        namespaces.unshare(namespaces.NEWPID)  # for children, the first of which has to stay
        ready, told = os.pipe()
        self.init = os.fork()
        if not self.init:
            os.close(ready)
            _be_init(self.client, told)
        os.close(told)
        with open(ready, "rb") as waits:  # nobody may rely on this process before the first one does
            waits.read(1)

    def serve(self) -> None:
        """Carry out orders until the client is gone."""
        loop = ForkLoop(self.client)
        while True:
            woken = loop.wait()
            if woken.child:
                self._reap()
            if woken.request and not self._hear():
                return

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.init, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while True:
                os.wait()

    def _reap(self) -> None:
        """Tell whoever waits for a command how it has ended."""
        ended: dict[int, int] = {}
        processes.reap(ended)
        for pid, code in ended.items():
            told = self.children.pop(pid, -1)
            if told >= 0:
                with contextlib.suppress(OSError):
                    os.write(told, STATUS.pack(code))
                os.close(told)

    # Orders ----------------------------------------------------------------------------------------------------

    def _hear(self) -> bool:
        data, ancillary, _, _ = self.client.recvmsg(1, ORDER, socket.MSG_CMSG_CLOEXEC)
        if not data:
            return False
        descriptors = array.array("i")
        for _, _, payload in ancillary:
            descriptors.frombytes(payload)
        order, *streams = descriptors
        with open(order, "rb") as file:
            file.seek(0)
            request: Order = unpack(file.read(), Order)
        try:
            answer = Answer(self._carry_out(request, streams))
        except (OSError, tools.ToolFailed) as error:
            answer = Answer(failed=str(error))
        for descriptor in streams:
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self.client.send(pack(answer))
        return True

    def _carry_out(self, request: Order, streams: list[int]) -> int | None:
        match request:
            case Run(node):
                return self._start(self.login if node is None else self.hosts[node], request, streams)
            case Signal(pid, number):
                self._signal(pid, number)
            case Kill(node):
                return self._kill(self.hosts[node])
            case Shield(node, rules):
                self.hosts[node].enter()
                try:
                    _shield(rules)
                finally:
                    self.login.enter()
        return None

    def _start(self, host: hosts.Host, request: Run, streams: list[int]) -> int:
        *standard, told = streams
        pid = os.fork()
        if not pid:
            try:
                host.enter()
                _become(request, standard, self.defaults)
            except OSError as error:
                os.write(2, f"{request.command[0]}: {error.strerror}\n".encode())
            finally:
                os._exit(NOT_STARTED)
        self.children[pid] = os.dup(told)
        return pid

    def _signal(self, pid: int, number: int) -> None:
        """Only to a command that has not been collected yet: nobody else can have its number."""
        self._reap()
        if pid in self.children:
            os.kill(pid, number)

    def _kill(self, host: hosts.Host) -> int:
        """SIGKILL every process on a host, until none is left; returns how many there were."""
        killed: set[int] = set()
        give_up = time.monotonic() + 3
        while (there := self._processes_on(host)) and time.monotonic() < give_up:
            processes.kill(there)
            killed.update(there)
            self._reap()
            time.sleep(0.002)
        return len(killed)

    def _processes_on(self, host: hosts.Host) -> list[int]:
        found = []
        for name in os.listdir(self.processes):
            with contextlib.suppress(OSError):
                if name.isdigit() and os.readlink(f"{name}/ns/net", dir_fd=self.processes) == host.identity:
                    found.append(int(name))
        return found


def _shield(rules: list[str]) -> None:
    """Replace what a host does not let in by these routing rules. A rule says what the kernel does with a packet before
    it looks whether the packet is for this host; `blackhole` drops it without a word, as most firewalls do.
    """
    has_moved = f"{_LOCAL_TABLE}:" in tools.use("ip", "rule", "show")
    moved = [f"rule add pref {_LOCAL_TABLE} lookup local", "rule del pref 0"]
    tools.use("ip", "-batch", "-", text="\n".join([] if has_moved else moved))
    while f"\n{_FIRST}:" in "\n" + tools.use("ip", "rule", "show"):
        tools.use("ip", "rule", "del", "pref", str(_FIRST))
    tools.use("ip", "-batch", "-", text="\n".join(f"rule add pref {_FIRST} {rule}" for rule in rules))


def _become(request: Run, standard: list[int], own: dict[str, str]) -> None:
    """Turn this process, a child that stands on its host, into the command. Raises OSError when that cannot be."""
    signal.set_wakeup_fd(-1)
    for handled in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGPIPE):
        signal.signal(handled, signal.SIG_DFL)
    os.setsid()
    for number, stream in enumerate(standard):
        os.dup2(stream, number)
    os.chdir(request.directory)
    os.execvpe(request.command[0], request.command, request.environment | own)


def _be_init(client: socket.socket, told: int) -> None:
    """The first process of the process namespace: show it its own /proc, and collect what nobody else collects.

    It cannot see that its parent died before it could ask to die with it: then `told` breaks.
    """
    processes.die_with_parent()
    os.write(told, b".")
    os.close(told)
    client.close()
    with contextlib.suppress(OSError):  # A container may forbid it; then /proc shows the numbers outside.
        namespaces.mount("proc", "/proc", "proc")
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    while True:
        processes.reap({})
        signal.sigwait([signal.SIGCHLD])


def main(descriptor: int, count: int, bits: int | None) -> None:
    """`python -m lockstep.cluster.namespace_host FD COUNT BITS`: hold so many hosts for the client at the other end."""
    client = socket.socket(fileno=descriptor)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    host = NamespaceHost(client)
    try:
        host.build(count, bits)
    except (OSError, tools.ToolFailed) as error:
        missing = explain("hosts", error)
        client.send(pack(Answer(failed=str(missing))))
        return
    try:
        client.send(pack(Answer(host.init)))
        host.serve()
    finally:
        host.close()


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]) or None)
