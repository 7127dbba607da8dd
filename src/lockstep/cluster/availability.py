"""What of a cluster this machine can do, and what is missing where it cannot: one line, with how to get it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from . import tools

Feature = Literal["bandwidth", "hosts", "slurm"]
SUBJECTS = {"bandwidth": "slow links", "hosts": "several nodes", "slurm": "SLURM"}
NEEDED = {
    "bandwidth": ("tc",),
    "hosts": ("ip", "tc"),
    "slurm": ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "sinfo", "scancel"),
}
PACKAGES = {"tc": "iproute2", "ip": "iproute2"}
PLUGINS = ("usr/lib/*/slurm*", "usr/lib/slurm*", "usr/lib64/slurm*", "usr/local/lib/slurm*")
PROBE_SECONDS = 20


@dataclass(frozen=True)
class Missing:
    """What keeps a feature from working here. `str` gives it as one line."""

    feature: Feature
    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{SUBJECTS[self.feature]}: {self.what}" + (f" ({self.remedy})" if self.remedy else "")


_works: set[Feature] = set()  # What has been tried and works. What is missing may be got meanwhile, and is tried again.


def available(feature: Feature) -> Missing | None:
    """None where slow links (`bandwidth`), several nodes (`hosts`) or SLURM (`slurm`) work here, else what is missing.

    The first call tries it, in a process of its own, which takes about a tenth of a second; that it works is kept. Raises
    ValueError for another feature.
    """
    if feature not in SUBJECTS:
        raise ValueError(f"no such feature: {feature!r}; there are {', '.join(SUBJECTS)}")
    if feature in _works:
        return None
    missing = _look(feature)
    if missing is None:
        _works.add(feature)
    return missing


def _look(feature: Feature) -> Missing | None:
    if not sys.platform.startswith("linux"):
        return explain(feature, None)
    absent = [name for name in NEEDED[feature] if tools.find(name) is None]
    if absent:
        return _no_tool(feature, absent)
    return _slurm() if feature == "slurm" else _try(feature)


def _try(feature: Feature) -> Missing | None:
    from ..ranks.client import child_environment

    try:
        probe = subprocess.run(
            [sys.executable, "-m", "lockstep.cluster.probe", feature], env=child_environment(),
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PROBE_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Missing(feature, f"the attempt did not end within {PROBE_SECONDS} s", "")
    if probe.returncode == 0:
        return None
    what, _, remedy = probe.stdout.strip().partition("\t")
    said = probe.stderr.strip().splitlines()
    return Missing(feature, what or (said[-1] if said else f"status {probe.returncode}"), remedy)


def _slurm() -> Missing | None:
    """SLURM stands on hosts, and needs the two plugins by which one user can do without a key service and root."""
    hosts = available("hosts")
    if hosts is not None:
        return Missing("slurm", hosts.what, hosts.remedy)
    places = [place for pattern in PLUGINS for place in Path("/").glob(pattern)]
    for plugin in ("auth_none.so", "cred_none.so"):
        if places and not any((place / plugin).exists() for place in places):
            return Missing("slurm", f"this build of SLURM has no {plugin}", "Debian's package slurm-wlm has it")
    return None


def explain(feature: Feature, error: Exception | None) -> Missing:
    """From an error met on the way to what is missing, and how to get it."""
    if not sys.platform.startswith("linux"):
        return Missing(feature, f"only Linux has network namespaces, and this is {platform.system()}",
                       "use a Linux machine, or a virtual one")  # fmt: skip
    if isinstance(error, FileNotFoundError) and str(error).startswith("no "):
        return _no_tool(feature, [str(error)[3:]])
    if isinstance(error, PermissionError) or "Operation not permitted" in str(error):
        return Missing(feature, *_closed())
    if "unknown" in str(error) or "Unknown" in str(error):
        return Missing(feature, f"this kernel lacks a part ({error})", "another kernel, or a virtual machine")
    if isinstance(error, OSError) and error.errno == 28:  # ENOSPC, which unshare(2) gives at a limit
        return Missing(feature, "the limit for namespaces is reached, or is 0",
                       "sudo sysctl user.max_user_namespaces=10000 user.max_net_namespaces=10000")  # fmt: skip
    return Missing(feature, str(error), "")


def _no_tool(feature: Feature, absent: list[str]) -> Missing:
    packages = sorted({PACKAGES.get(name, "slurm-wlm") for name in absent})
    return Missing(feature, f"no {', '.join(absent)}", f"sudo apt install {' '.join(packages)}")


def _closed() -> tuple[str, str]:
    """Who has closed user namespaces here, and how they are opened."""
    if _setting("kernel/apparmor_restrict_unprivileged_userns") == "1":
        return ("AppArmor keeps user namespaces from ordinary programs here, as on Ubuntu from 23.10 on",
                "sudo sysctl kernel.apparmor_restrict_unprivileged_userns=0")  # fmt: skip
    if _setting("kernel/unprivileged_userns_clone") == "0":
        return "user namespaces are closed to ordinary users here", "sudo sysctl kernel.unprivileged_userns_clone=1"
    if os.path.exists("/.dockerenv") or os.path.exists("/run/.containerenv") or "container" in os.environ:
        return ("this container may not make namespaces",
                "docker run --cap-add SYS_ADMIN --cap-add NET_ADMIN --security-opt seccomp=unconfined "
                "--security-opt apparmor=unconfined")  # fmt: skip
    return "this system does not let an ordinary user make namespaces", "run it as root, or on a machine of your own"


def _setting(name: str) -> str:
    try:
        return Path("/proc/sys", name).read_text().strip()
    except OSError:
        return ""
