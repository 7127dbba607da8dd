"""A slow link between ranks: a private network whose loopback interface passes so many bits a second.

All ranks of the run share the one interface, in both directions: an all-reduce of S bytes by a ring of N ranks takes
2 (N - 1) S bytes through it, so 2 (N - 1) S x 8 / rate seconds at least. Nothing else of the machine is on it, and from
inside nothing else can be reached: no internet, no other run.

The throttle is Linux's token bucket filter (tc-tbf(8)). The bucket of 128 kB holds one packet of the loopback interface
(64 KiB) and little more: with a smaller one nothing passes at all, with a larger one messages ride on what the bucket
saved up while the link was idle. A message below about 1 MB still does so in part.
"""

from __future__ import annotations

import fcntl
import socket
import struct
from typing import TYPE_CHECKING

from ..ranks import Function, Network, NotRun
from . import namespaces, tools
from .availability import explain
from .rate import FASTEST, Rate, bits_per_second

if TYPE_CHECKING:
    from ..ranks import Job

HANDLE = "10c5:"
"""The throttle's own number: `tc` changes what has this number and nothing else, so never a link of the machine's."""
BURST = "128kb"
QUEUE = "64mb"  # What may wait in the queue before packets are dropped; more than TCP leaves there
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1


def slow_link(bandwidth: Rate | None) -> Function:
    """For `ranks.run(network=…)`: the ranks share one link of this bandwidth, such as `"1gbit"`; None: not throttled.

    From inside, `set_bandwidth` changes it. Raises ValueError for what is no rate. The run raises `ranks.NotRun` where
    the machine lacks something (see `available("bandwidth")`).
    """
    bits = None if bandwidth is None else bits_per_second(bandwidth)
    return Function("lockstep.cluster.link", "enter", {"bits": bits})


def set_bandwidth(bandwidth: Rate | None) -> None:
    """On a rank: from now on the link passes so much, such as `"200mbit"`; None: as much as it can.

    On a slow link, which all ranks share, one rank's call is enough, and every rank may make it. On a host of its own
    (see `own_hosts` and `Nodes`) it is what this node sends. Bytes on their way when it is called pass at the new rate,
    so put a barrier before and after it where you measure. It takes a few milliseconds.

    Raises ValueError for what is no rate, and RuntimeError where this process has no throttled link.
    """
    bits = None if bandwidth is None else bits_per_second(bandwidth)
    for device in ("lo", "eth0"):
        try:
            throttle(device, bits, "change")
            return
        except tools.ToolFailed:
            continue
        except FileNotFoundError:
            break
    raise RuntimeError(
        "this process has no throttled link: start the run with one (ranks.run(…, network=cluster.slow_link('1gbit')), "
        "or --bandwidth 1gbit)"
    )


def throttle(device: str, bits: int | None, action: str = "add") -> None:
    """Let `device` of the network this process is in pass so many bits a second. Raises tools.ToolFailed."""
    tools.use("tc", "qdisc", action, "dev", device, *tbf(bits))


def tbf(bits: int | None) -> list[str]:
    """What `tc` is told of a throttle. One that does not throttle stays there, for removing it would drop packets."""
    rate, burst = (bits, BURST) if bits is not None else (FASTEST, "4mb")
    return ["root", "handle", HANDLE, "tbf", "rate", f"{rate}bit", "burst", burst, "limit", QUEUE]


def bring_up(device: str) -> None:
    """Switch an interface of the network that this process is in on; in a new one even the loopback interface is off."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = struct.pack("16sh14x", device.encode(), 0)
        flags = struct.unpack("16sh14x", fcntl.ioctl(sock, _SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sh14x", device.encode(), flags | _IFF_UP))


class SlowLink(Network):
    """The network of a run whose ranks share a private loopback interface."""

    def environment(self, rank: int) -> dict[str, str]:
        """nccl must not go round the link: no shared memory, no direct way between GPUs, the one interface."""
        return {"NCCL_SOCKET_IFNAME": "lo", "NCCL_SHM_DISABLE": "1", "NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"}


def enter(job: Job | None, bits: int | None) -> Network:
    """In the supervisor of a run: put this process into a new network with a throttled link. Raises ranks.NotRun."""
    try:
        make(bits)
    except (OSError, tools.ToolFailed) as error:
        raise NotRun(str(explain("bandwidth", error))) from None
    return SlowLink()


def make(bits: int | None) -> None:
    """Put this process into a new network with a throttled link. Raises OSError, tools.ToolFailed."""
    namespaces.make(namespaces.NEWNET)
    bring_up("lo")
    throttle("lo", bits)
