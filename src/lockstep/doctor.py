"""`lockstep doctor`: what this machine is, what runs here and what does not, each with its remedy."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from importlib import metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .cluster.availability import Feature


class State(str, Enum):
    """How a finding is meant."""

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


def examine() -> Iterator[Finding]:
    """Look at everything the course needs; cheap things first, so that the list grows while it is read."""
    yield _python()
    yield from _packages()
    yield _cores()
    yield _memory()
    yield _disk()
    yield _shared_memory()
    yield from _torch()
    yield _ranks()
    yield _cluster("bandwidth", "chapter 4's throttled links")
    yield _cluster("hosts", "what needs hosts with addresses of their own")
    yield _cluster("slurm", "what needs SLURM")
    yield _isolation()


def _python() -> Finding:
    return Finding("Python", State.GOOD, f"{platform.python_version()} on {platform.system()} {platform.machine()}")


def _packages() -> Iterator[Finding]:
    for name, why in (("pytest", "check"), ("rich", "the command line"), ("jupyterlab", "lab"), ("nbval", "testing chapters"),
                      ("ipywidgets", "quizzes"), ("scikit-learn", "the digits")):  # fmt: skip
        try:
            yield Finding(name, State.GOOD, metadata.version(name))
        except metadata.PackageNotFoundError:
            yield Finding(name, State.BAD, f"missing, needed for {why}", "remove .venv and start ./lockstep again")


def _cores() -> Finding:
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    busy = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return Finding(
        "cores", State.GOOD, f"{count}, load {busy:.1f}. Ranks share them: more ranks than cores works, slower"
    )


def _memory() -> Finding:
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / (1 << 30)
    except (ValueError, OSError, AttributeError):
        return Finding("memory", State.ABSENT, "cannot be read on this system")
    if total < 3.5:
        return Finding(
            "memory", State.BAD, f"{total:.1f} GiB", "4 ranks need about 3 GiB: use 2 ranks, close other programs"
        )
    return Finding("memory", State.GOOD, f"{total:.1f} GiB")


def _disk() -> Finding:
    free = shutil.disk_usage(".").free / (1 << 30)
    if free < 0.5:
        return Finding("disk", State.BAD, f"{free:.1f} GiB free here", "free some space: runs need scratch files")
    return Finding("disk", State.GOOD, f"{free:.1f} GiB free here")


def _shared_memory() -> Finding:
    if not os.path.isdir("/dev/shm"):
        return Finding("shared memory", State.ABSENT, "no /dev/shm on this system; not needed here")
    size = shutil.disk_usage("/dev/shm").total / (1 << 20)
    if size < 128:
        return Finding(
            "shared memory",
            State.BAD,
            f"/dev/shm has {size:.0f} MiB",
            "in docker: --shm-size=1g; data loader workers need it",
        )
    return Finding("shared memory", State.GOOD, f"/dev/shm has {size:.0f} MiB")


def _torch() -> Iterator[Finding]:
    try:
        import torch
        import torch.distributed as dist
    except ImportError as error:
        yield Finding("torch", State.BAD, str(error), "remove .venv and start ./lockstep again")
        return
    yield Finding("torch", State.GOOD, torch.__version__)
    if not dist.is_available():
        yield Finding(
            "torch.distributed", State.BAD, "this build of torch has none", "install the official build of torch"
        )
        return
    yield Finding(
        "gloo",
        State.GOOD if dist.is_gloo_available() else State.BAD,
        "ranks on the CPU",
        "" if dist.is_gloo_available() else "install the official build of torch",
    )
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        yield Finding("GPU", State.ABSENT, "none. Everything runs on the CPU; what needs a GPU is shown as not run")
        return
    gpus = ", ".join(sorted({torch.cuda.get_device_name(index) for index in range(count)}))
    yield Finding("GPU", State.GOOD, f"{count} × {gpus}")
    nccl = dist.is_nccl_available()
    yield Finding(
        "nccl",
        State.GOOD if nccl else State.BAD,
        f"one rank for each of {count} GPUs; more ranks share them over gloo"
        if nccl
        else "this build of torch has none",
        "" if nccl else "LOCKSTEP_TORCH=cuda ./lockstep lab",
    )


def _ranks() -> Finding:
    from . import ranks

    body = "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\nt = torch.ones(1)\ndist.all_reduce(t)\nassert t.item() == 2"
    method = ranks.start_method()
    try:
        ranks.run(ranks.Source(body), 2, deadline=60)
        result = ranks.run(ranks.Source(body), 2, deadline=60)
    except ranks.RanksError as error:
        return Finding("two ranks", State.BAD, str(error), "please report this with the output of ./lockstep doctor")
    if result.cause is not None:
        return Finding(
            "two ranks", State.BAD, result.cause.headline, "a firewall on the loopback interface? see chapter 2"
        )
    return Finding("two ranks", State.GOOD, f"met, computed and left in {result.seconds:.2f} s (start method {method})")


def _cluster(feature: Feature, used: str) -> Finding:
    """What the very probe says that decides whether a cell is run."""
    from .cluster import available
    from .cluster.availability import SUBJECTS

    missing = available(feature)
    if missing is None:
        return Finding(SUBJECTS[feature], State.GOOD, "found" if feature == "slurm" else "tried, and it works")
    return Finding(SUBJECTS[feature], State.ABSENT, f"{missing.what}: {used} will be shown as not run", missing.remedy)


def _isolation() -> Finding:
    """Whether other people's code can be kept from this machine: the very trial that decides it for a grading."""
    from .grading import isolation

    subject = "isolation of other people's code"
    missing = isolation.missing()
    if missing is None:
        return Finding(subject, State.GOOD, "tried, and it works")
    what, remedy = missing
    return Finding(subject, State.ABSENT, f"{what}: grading a class asks before it goes on without", remedy)
