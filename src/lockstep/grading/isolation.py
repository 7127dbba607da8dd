"""Where a submission's ranks run: apart from the judge, the answers and other submissions, as far as this machine can.

Theory of operation. The judge (`plugin`, `grader` and the checks) never imports a submission. It sends orders to a
process that forks ranks, and gets data back. Isolation is about where that process runs. Each grading has its own,
which ends with the grading. The tier says what surrounds it:

- `sandbox`: bubblewrap. Own user, network (loopback only), processes and mounts. The file system is a list of what is
  needed, read-only: the system's programs and libraries, Python, this package, the submission. It contains no answer,
  no check, no other submission, no home and no history. What is written goes to memory, of limited size.
- `user`: for root without bubblewrap, as in a Gradescope container. The ranks run as another user (`nobody`), who can
  neither read what only root can nor signal the judge. Network and process list are the machine's.
- `none`: the same user and the same files. The judge's design still holds (see SECURITY.md), but a stranger's code
  could read the answers on the disk or harm anything that the user can.

A tier is found by trying it, not by looking for a program's name.
"""

from __future__ import annotations

import contextlib
import glob
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ..course import CourseError
from ..course.runs import preloaded
from ..ranks.client import SOURCE, Server
from ..ranks.folder import held_folder

SANDBOX, USER, NONE = "sandbox", "user", "none"
NOBODY = 65534
MEMORY_BYTES = 1 << 30  # What a run may leave in its temporary folders, and as much again in shared memory
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
CONFIGURATION = (
    "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/passwd", "/etc/group", "/etc/nsswitch.conf",
    "/etc/hosts", "/etc/localtime", "/etc/alternatives", "/nix/store",
)  # fmt: skip
PASSED_ON = ("LANG", "LC_ALL", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "CUDA_HOME", "LOCKSTEP_START_METHOD")
CLOSED = ("--unshare-user", "--disable-userns")
TRIAL_SECONDS = 60.0


@dataclass(frozen=True)
class Tier:
    """How far a submission is kept apart. `said` is one line for reports; `remedy` says how to get more."""

    name: str
    said: str
    remedy: str = ""

    @property
    def keeps_apart(self) -> bool:
        """True where a submission can neither read the answers nor reach the judge."""
        return self.name != NONE

    def command(self, scratch: Path, *, namespaces: bool = False) -> list[str]:
        """The prefix that runs a command in this tier, where of a grading only `scratch` can be read. `namespaces` are
        for runs on hosts of their own; without them, nobody in a sandbox makes another user namespace."""
        if self.name == SANDBOX:
            return _bubblewrap(scratch, namespaces)
        if self.name == USER:
            who = ["--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups"]
            return ["setpriv", *who, "--no-new-privs", "--inh-caps=-all", "--bounding-set=-all"]
        return []

    def environment(self) -> dict[str, str]:
        """The whole environment of a process in this tier: an allow-list."""
        own = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        return own | threads | {"PATH": path, "HOME": "/tmp", "PYTHONPATH": SOURCE, "PYTHONDONTWRITEBYTECODE": "1"}

    def server(self, scratch: Path, exercises: Iterable[str] = (), *, namespaces: bool = False) -> Server:
        """What forks the ranks of a grading of `exercises`, not started yet. Makes `scratch` readable for it."""
        if self.name == USER:
            scratch.chmod(0o755)
        return Server(self.command(scratch, namespaces=namespaces), self.environment(), preloaded(exercises))


TIERS = (
    Tier(
        SANDBOX, "The submission ran in a sandbox (bubblewrap): own user, processes and network, no files but its own."
    ),
    Tier(
        USER,
        "The submission ran as another user (nobody) on the grader's machine, without a sandbox around its network.",
        "Install bubblewrap (apt-get install bubblewrap) for a sandbox.",
    ),
    Tier(
        NONE,
        "The submission ran as the grader's own user, without a sandbox.",
        "Install bubblewrap (apt-get install bubblewrap) and allow user namespaces for a sandbox.",
    ),
)


@cache
def tier() -> Tier:
    """The best tier that works here. LOCKSTEP_ISOLATION names the best to try; CourseError if there is none such."""
    names = [one.name for one in TIERS]
    best = os.environ.get("LOCKSTEP_ISOLATION") or names[0]
    if best not in names:
        raise CourseError(f"LOCKSTEP_ISOLATION is {best!r}; it can be {', '.join(names)}")
    return next(one for one in TIERS[names.index(best) :] if works(one))


def works(one: Tier) -> bool:
    """Try it: can Python start there, and import what a rank needs from a folder like a grading's?"""
    if one.name == NONE:
        return True
    if not sys.platform.startswith("linux") or (one.name == USER and os.getuid() != 0):
        return False
    with held_folder() as folder:
        scratch = Path(folder)
        scratch.chmod(0o755)
        (scratch / "seen").touch()
        looks = (
            "import os, sys, lockstep.ranks.channel\n"
            f"sys.exit(not (os.path.exists(sys.argv[1]) and os.getuid() == {NOBODY}))"
        )
        command = [*one.command(scratch), sys.executable, "-c", looks, str(scratch / "seen")]
        return _ends_well(command, one.environment())


@cache
def can_close_namespaces() -> bool:
    """Whether this bubblewrap (0.8 or newer) can keep what it starts from making user namespaces."""
    command = ["bwrap", *CLOSED, "--unshare-pid", "--ro-bind", "/", "/", "--proc", "/proc", "true"]
    return _ends_well(command)


def _ends_well(command: list[str], environment: dict[str, str] | None = None) -> bool:
    devnull = subprocess.DEVNULL
    try:
        tried = subprocess.run(
            command, env=environment, stdin=devnull, stdout=devnull, stderr=devnull, timeout=TRIAL_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return tried.returncode == 0


def _bubblewrap(scratch: Path, namespaces: bool) -> list[str]:
    """The sandbox. Later options cover earlier ones, so the memory for /tmp comes before what is mounted below it."""
    bound = [path for path in (*CONFIGURATION, *_python()) if os.path.exists(path)]
    size = str(MEMORY_BYTES)
    command = ["bwrap", "--unshare-all", "--die-with-parent", "--cap-drop", "ALL"]
    command += CLOSED if not namespaces and can_close_namespaces() else ()
    command += ["--uid", str(NOBODY), "--gid", str(NOBODY)]
    command += ["--hostname", "localhost"]  # a name that resolves: the address that torch's elastic launcher gives out
    command += ["--proc", "/proc", "--dev", "/dev", "--size", size, "--tmpfs", "/dev/shm"]
    command += ["--size", size, "--tmpfs", "/tmp"]
    for path in SYSTEM:
        if os.path.islink(path):
            command += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            command += ["--ro-bind", path, path]
    for path in bound:
        command += ["--ro-bind", path, path]
    for device in sorted(glob.glob("/dev/nvidia*")):
        command += ["--dev-bind", device, device]
    command += ["--ro-bind", str(scratch), str(scratch), "--remount-ro", "/dev", "--remount-ro", "/"]
    return [*command, "--chdir", "/tmp", "--"]


def _python() -> Sequence[str]:
    """The folders of this Python, its packages and this package, without those inside another or in the system."""
    real = {os.path.realpath(path) for path in (sys.base_prefix, sys.base_exec_prefix, SOURCE)}
    places = sorted({sys.prefix, sys.exec_prefix, SOURCE, *real, *_extra_paths()})
    kept: list[str] = []
    for place in places:
        if not any(Path(place).is_relative_to(one) for one in (*kept, *SYSTEM)):
            kept.append(place)
    return kept


def _extra_paths() -> list[str]:
    """Folders with packages outside of the prefixes, such as a user's own site-packages with torch."""
    found = []
    for name in ("torch", "numpy", "msgspec"):
        with contextlib.suppress(ImportError, ValueError):
            spec = importlib.util.find_spec(name)
            if spec is not None and spec.origin:
                found.append(str(Path(spec.origin).resolve().parents[1]))
    return found


def missing() -> tuple[str, str] | None:
    """What a sandbox would need here, and how to get it; None where there is one."""
    if works(TIERS[0]):
        return None
    if not sys.platform.startswith("linux"):
        return f"{sys.platform} has no sandbox that Lockstep can use", "grade strangers' code on Linux"
    if shutil.which("bwrap") is None:
        return "bubblewrap is not installed", "sudo apt install bubblewrap"
    return "bubblewrap may not make a user namespace here", "sudo sysctl kernel.unprivileged_userns_clone=1"
