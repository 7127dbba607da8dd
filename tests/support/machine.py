"""Looking at the machine: what of a test's is on it, and what a user may do there."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from lockstep import cluster, ranks
from lockstep.cluster import tools
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


def network(pid: int | str = "self") -> str:
    """Which network namespace a process is in, such as `net:[4026531840]`; empty when it is gone or not ours to ask."""
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/net")
    return ""


def wait_all(processes: Sequence[cluster.Process], timeout: float) -> list[int | None]:
    """Wait until all have ended or so many seconds are over; their return codes, None for one that still runs."""
    give_up = time.monotonic() + timeout
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, give_up - time.monotonic()))
    return [process.returncode for process in processes]


def networks(pids: list[int]) -> set[str]:
    """The network namespaces of these processes that are not this process's own."""
    return {network(pid) for pid in pids} - {"", network()}
