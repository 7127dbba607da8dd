"""Looking at the machine: what of a test's is on it, and what a user may do there."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from lockstep import cluster, ranks
from lockstep.cluster import namespaces, tools
from lockstep.cluster.availability import Feature

from .leftovers import LINUX, command, marked_processes


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


def networks(pids: list[int]) -> set[str]:
    """The network namespaces of these processes that are not this process's own."""
    found = {namespaces.identity(pid, "net") for pid in pids}
    return found - {"", namespaces.identity("self", "net")}
