"""Several hosts on this machine: each with a name, an address, a network card and a link of its own to one switch.

    node0 10.77.0.100 ── eth0 ──┐
    node1 10.77.0.101 ── eth0 ──┤ switch ── login 10.77.0.1
    …                           ┘

A host is a network namespace and a host name (uts) namespace; its card is one end of a veth pair, the other end is a
port of a bridge. All of it stands in the namespaces of the process that builds it, where `/etc/hosts` names every host.
Files, processors and memory are the machine's. Ranks of one node reach each other without the card, as on a real node.
From inside nothing else can be reached.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..ranks import Function, Network, NotRun
from . import namespaces, tools
from .availability import explain
from .link import bring_up, tbf, throttle
from .rate import Rate, bits_per_second

if TYPE_CHECKING:
    from ..ranks import Job

MOST = 32
LOGIN = "login"
CARD = "eth0"
SWITCH = "switch"
NETWORK = "10.77.0."
KINDS = namespaces.NEWNET | namespaces.NEWNS | namespaces.NEWUTS
_SIOCSIFADDR, _SIOCSIFNETMASK = 0x8916, 0x891C


@dataclass(frozen=True)
class Host:
    """One host; `net` and `uts` are its namespaces as open files, which keep it alive. `port` is at the switch."""

    name: str
    address: str
    port: str
    net: int
    uts: int

    def enter(self) -> None:
        """Put this process on the host."""
        namespaces.setns(self.net)
        namespaces.setns(self.uts)

    @property
    def identity(self) -> str:
        """By which /proc knows the processes on the host."""
        return f"net:[{os.fstat(self.net).st_ino}]"


def name_of(node: int) -> str:
    """Node 0 is `node0`."""
    return f"node{node}"


def address_of(node: int) -> str:
    """Node 0 has 10.77.0.100."""
    return f"{NETWORK}{100 + node}"


def check_count(count: int) -> int:
    """The number of hosts. Raises ValueError when it is none that can be had."""
    if not 1 <= count <= MOST:
        raise ValueError(f"{count} nodes; it must be from 1 to {MOST}")
    return count


def build(count: int, bits: int | None) -> tuple[Host, list[Host]]:
    """Put this process, which must have one thread only, into new namespaces and build `count` hosts in them.

    Returns the place where this process then stands (`login`, on the same switch) and the hosts. Each host's link passes
    `bits` a second each way (None: not throttled). Takes some ten milliseconds. Raises OSError and tools.ToolFailed
    where the system does not allow it or lacks a tool.
    """
    for tool in ("ip", "tc"):  # first of all, so that nothing has been entered when one is missing
        if tools.find(tool) is None:
            raise FileNotFoundError(f"no {tool}")
    namespaces.make(KINDS)
    if not os.getuid():  # An ordinary user's mounts are private from the beginning.
        namespaces.mount("none", "/", flags=namespaces.MS_REC | namespaces.MS_PRIVATE)
    _name_them(count)
    login = _stand(LOGIN, f"{NETWORK}1", SWITCH)
    hosts = []
    for node in range(count):
        namespaces.unshare(namespaces.NEWNET | namespaces.NEWUTS)
        hosts.append(_stand(name_of(node), address_of(node), f"port{node}"))
    login.enter()
    _lay_cables(hosts)
    for host in hosts:
        host.enter()
        _set_address(CARD, host.address)
        throttle(CARD, bits)
    login.enter()
    _set_address(SWITCH, login.address)
    lines = [" ".join(["qdisc", "add", "dev", host.port, *tbf(bits)]) for host in hosts]
    tools.use("tc", "-batch", "-", text="\n".join(lines))
    return login, hosts


def _stand(name: str, address: str, port: str) -> Host:
    """Make the namespaces that this process is in a host."""
    socket.sethostname(name)
    bring_up("lo")
    return Host(name, address, port, namespaces.open_own("net"), namespaces.open_own("uts"))


def _name_them(count: int) -> None:
    """An /etc/hosts with every host's name, for the processes in this mount namespace alone.

    Its text needs a file. That is made in a file system in memory, which is mounted somewhere and taken away again at
    once: the bind mount keeps the one file.
    """
    names = [(f"{NETWORK}1", LOGIN), *((address_of(node), name_of(node)) for node in range(count))]
    text = "127.0.0.1 localhost\n::1 localhost\n" + "".join(f"{address} {name}\n" for address, name in names)
    namespaces.mount("tmpfs", "/tmp", "tmpfs")
    try:
        with open("/tmp/hosts", "w") as file:
            file.write(text)
        os.chmod("/tmp/hosts", 0o644)
        namespaces.mount("/tmp/hosts", "/etc/hosts", flags=namespaces.MS_BIND)
    finally:
        namespaces.unmount("/tmp")


def _lay_cables(hosts: list[Host]) -> None:
    """A switch here, and from each of its ports a cable to a host's card."""
    lines = [f"link add {SWITCH} type bridge", f"link set {SWITCH} up"]
    for host in hosts:
        lines += [
            f"link add {host.port} type veth peer name {CARD} netns /proc/self/fd/{host.net}",
            f"link set {host.port} master {SWITCH} up",
        ]
    tools.use("ip", "-batch", "-", text="\n".join(lines), keep=[host.net for host in hosts])


def _set_address(device: str, address: str) -> None:
    """Give a card of the host that this process is on its address (a network of 254), and bring it up."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for request, value in ((_SIOCSIFADDR, address), (_SIOCSIFNETMASK, "255.255.255.0")):
            packed = struct.pack("16sHH4s8x", device.encode(), socket.AF_INET, 0, socket.inet_aton(value))
            fcntl.ioctl(sock, request, packed)
    bring_up(device)


# Ranks on hosts ---------------------------------------------------------------------------------------------------


def own_hosts(bandwidth: Rate | None = None) -> Function:
    """For `ranks.run(…, nodes=K, network=…)`: each node is a host of its own, with a link of this bandwidth.

    The ranks of a node see its host name and its address, and MASTER_ADDR is node 0's. Raises ValueError for what is no
    rate. The run raises `ranks.NotRun` where the machine lacks something (see `available("hosts")`).
    """
    bits = None if bandwidth is None else bits_per_second(bandwidth)
    return Function("lockstep.cluster.hosts", "enter", {"bits": bits})


class OwnHosts(Network):
    """The network of a run whose nodes are hosts of their own."""

    def __init__(self, hosts: list[Host], per_node: int) -> None:
        self.hosts, self.per_node = hosts, per_node
        self.address = hosts[0].address

    def environment(self, rank: int) -> dict[str, str]:
        """gloo and nccl use the card, as on any cluster whose nodes have several interfaces."""
        return {"GLOO_SOCKET_IFNAME": CARD, "NCCL_SOCKET_IFNAME": CARD}

    def join(self, rank: int) -> None:
        self.hosts[rank // self.per_node].enter()


def enter(job: Job, bits: int | None) -> Network:
    """In the supervisor of a run: build its hosts and stand on the first one. Raises ranks.NotRun."""
    try:
        _, hosts = build(check_count(job.nodes), bits)
        hosts[0].enter()
    except (OSError, tools.ToolFailed, ValueError) as error:
        raise NotRun(str(explain("hosts", error))) from None
    return OwnHosts(hosts, job.world_size // job.nodes)
