"""`lockstep doctor`: what this machine has, what runs here and what does not, each with its remedy."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from importlib import metadata
from pathlib import Path

from rich.text import Text

from .. import cluster, ranks
from ..bootstrap import has_gpu
from ..cluster.availability import SUBJECTS, Feature
from ..grading import isolation
from ..ranks.processes import cores
from .console import console

BODY = """\
import torch, torch.distributed as dist
dist.init_process_group("gloo")
t = torch.ones(1)
dist.all_reduce(t)
assert t.item() == 2
"""
PACKAGES = {
    "pytest": "check", "rich": "the command line", "jupyterlab": "lab", "nbval": "testing chapters",
    "ipywidgets": "quizzes", "scikit-learn": "the digits",
}  # fmt: skip


class State(str, Enum):
    GOOD = "✓"
    ABSENT = "–"
    BAD = "✗"


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report."""

    subject: str
    state: State
    text: str
    remedy: str = ""


def good(subject: str, text: str) -> Finding:
    """It is there and works."""
    return Finding(subject, State.GOOD, text)


def absent(subject: str, text: str, remedy: str = "") -> Finding:
    """It is not there, and is not needed by everyone."""
    return Finding(subject, State.ABSENT, text, remedy)


def bad(subject: str, text: str, remedy: str) -> Finding:
    """It has to be fixed."""
    return Finding(subject, State.BAD, text, remedy)


def examine() -> Iterator[Finding]:
    """Look at everything the course needs; quick things first, so that the list grows while it is read."""
    yield good("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    yield from _packages()
    busy = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    yield good("cores", f"{cores()}, load {busy:.1f}. Ranks share them: more ranks than cores works, slower")
    yield _memory()
    yield _disk()
    yield _shared_memory()
    yield from _torch()
    yield _ranks()
    yield _cluster("bandwidth", "chapter 4's throttled links")
    yield _cluster("hosts", "what needs hosts with addresses of their own")
    yield _cluster("slurm", "what needs SLURM")
    yield _isolation()


def _packages() -> Iterator[Finding]:
    for name, why in PACKAGES.items():
        try:
            yield good(name, metadata.version(name))
        except metadata.PackageNotFoundError:
            yield bad(name, f"missing, needed for {why}", _install("-r requirements.lock"))


def _install(what: str) -> str:
    """How this environment gets what it lacks: one that ./lockstep made repairs itself."""
    if Path(sys.prefix, "lockstep", "home").is_file():
        return "remove .venv and start ./lockstep again"
    return f"{sys.executable} -m pip install {what}"


def _memory() -> Finding:
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / (1 << 30)
    except (ValueError, OSError, AttributeError):
        return absent("memory", "cannot be read on this system")
    if total < 3.5:
        return bad("memory", f"{total:.1f} GiB", "4 ranks need about 3 GiB: use 2 ranks, close other programs")
    return good("memory", f"{total:.1f} GiB")


def _disk() -> Finding:
    free = shutil.disk_usage(".").free / (1 << 30)
    if free < 0.5:
        return bad("disk", f"{free:.1f} GiB free here", "free some space: runs need scratch files")
    return good("disk", f"{free:.1f} GiB free here")


def _shared_memory() -> Finding:
    if not os.path.isdir("/dev/shm"):
        return absent("shared memory", "no /dev/shm on this system; not needed here")
    size = f"/dev/shm has {shutil.disk_usage('/dev/shm').total / (1 << 20):.0f} MiB"
    if shutil.disk_usage("/dev/shm").total < 128 << 20:
        return bad("shared memory", size, "in docker: --shm-size=1g; data loader workers need it")
    return good("shared memory", size)


def _torch() -> Iterator[Finding]:
    official = "install the official build of torch"
    try:
        import torch
        import torch.distributed as dist
    except ImportError as error:
        yield bad("torch", str(error), _install("torch"))
        return
    yield good("torch", torch.__version__)
    if not dist.is_available():
        yield bad("torch.distributed", "this build of torch has none", official)
        return
    yield good("gloo", "ranks on the CPU") if dist.is_gloo_available() else bad("gloo", "ranks on the CPU", official)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count and has_gpu():
        cuda = torch.version.cuda
        why = f"torch's CUDA {cuda} doesn't reach it" if cuda else "this is torch's CPU build"
        driver, build = "a newer NVIDIA driver, or an older LOCKSTEP_TORCH", "LOCKSTEP_TORCH=cuda ./lockstep doctor"
        yield absent("GPU", f"there is one, but {why}: everything runs on the CPU", driver if cuda else build)
        return
    if not count:
        yield absent("GPU", "none. Everything runs on the CPU; what needs a GPU is shown as not run")
        return
    yield good("GPU", f"{count} × {', '.join(sorted({torch.cuda.get_device_name(index) for index in range(count)}))}")
    if dist.is_nccl_available():
        yield good("nccl", f"one rank for each of {count} GPUs; more ranks share them over gloo")
    else:
        yield bad("nccl", "this build of torch has none", "LOCKSTEP_TORCH=cuda ./lockstep lab")


def _ranks() -> Finding:
    try:
        ranks.run(ranks.Source(BODY), 2, deadline=60)
        result = ranks.run(ranks.Source(BODY), 2, deadline=60)
    except ranks.RanksError as error:
        return bad("two ranks", str(error), "please report this with the output of ./lockstep doctor")
    if result.cause is not None:
        return bad("two ranks", result.cause.headline, "a firewall on the loopback interface? see chapter 2")
    method = ranks.start_method()
    return good("two ranks", f"met, computed and left in {result.seconds:.2f} s (start method {method})")


def _cluster(feature: Feature, used: str) -> Finding:
    """What the probe says that decides whether a cell is run."""
    missing = cluster.available(feature)
    if missing is None:
        return good(SUBJECTS[feature], "found" if feature == "slurm" else "tried, and it works")
    return absent(SUBJECTS[feature], f"{missing.what}: {used} will be shown as not run", missing.remedy)


def _isolation() -> Finding:
    """Whether other people's code can be kept from this machine: the trial that decides it for a grading."""
    subject = "isolation of other people's code"
    missing = isolation.missing()
    if missing is None:
        return good(subject, "tried, and it works")
    what, remedy = missing
    return absent(subject, f"{what}: grading a class asks before it goes on without", remedy)


def show(finding: Finding) -> None:
    style = {State.GOOD: "green", State.ABSENT: "dim", State.BAD: "bold red"}[finding.state]
    line = Text(f"{finding.state.value} ", style=style)
    line.append(f"{finding.subject}: ", style="bold")
    line.append(finding.text, style="")
    if finding.remedy:
        line.append(f"  → {finding.remedy}", style="yellow")
    console().print(line)
