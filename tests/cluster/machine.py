"""Looking at the machine: what of a test's is on it, and what a user may do there."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
import uuid
from pathlib import Path

import pytest

from lockstep import cluster, ranks
from lockstep.cluster import namespaces, tools
from lockstep.cluster.availability import Feature

ROOT = Path(__file__).resolve().parents[2]
# Every process that comes from a test inherits this, also one that has detached itself from everything else.
MARK = f"LOCKSTEP_CLUSTER_TEST_MARK={uuid.uuid4().hex}"
LINUX = os.path.isdir("/proc/self")


def needs(feature: Feature) -> pytest.MarkDecorator:
    """Not run where this machine lacks it, and the reason is what `available` says."""
    missing = cluster.available(feature)
    return pytest.mark.skipif(missing is not None, reason=f"not run: {missing}")


def remains() -> set[str]:
    """All that a cluster could leave on this machine. A warm process of this test's own may stay."""
    if not LINUX:
        return set()
    warm = ranks.client._server._process
    found = {f"process {pid} {command(pid)}" for pid in marked_processes() if warm is None or pid != warm.pid}
    found |= {f"link {name}" for name in os.listdir("/sys/class/net")}
    found |= {f"mount {line}" for line in Path("/proc/self/mountinfo").read_text().splitlines()}
    found |= {f"folder {name}" for name in os.listdir(tempfile.gettempdir()) if not name.startswith("torchinductor_")}
    found |= {f"name {os.uname().nodename}", f"hosts {Path('/etc/hosts').read_text()}"}
    tc = tools.find("tc")
    if tc is not None:
        found.add("queues " + subprocess.run([tc, "qdisc", "show"], capture_output=True, text=True).stdout)
    return found


def marked_processes() -> list[int]:
    """All processes but this one that were started with the mark in their environment."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                if MARK.encode() in Path(f"/proc/{name}/environ").read_bytes() and state(int(name)) != "Z":
                    found.append(int(name))
            except OSError:
                continue
    return found


def networks(pids: list[int]) -> set[str]:
    """The network namespaces of these processes that are not this process's own."""
    found = {namespaces.identity(pid, "net") for pid in pids}
    return found - {"", namespaces.identity("self", "net")}


def state(pid: int) -> str:
    """The state letter of a process; empty when it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return ""
    return stat[stat.rindex(")") + 2]


def command(pid: int) -> str:
    """What a process was started as."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")[:200]
    except OSError:
        return ""


def wait_until_gone(pids: list[int], seconds: float = 3.0) -> list[int]:
    """Those of the processes that are still there after so long: the promise of the design is 3 s."""
    give_up = time.monotonic() + seconds
    while (left := [pid for pid in pids if state(pid) not in ("", "Z")]) and time.monotonic() < give_up:
        time.sleep(0.02)
    return left
