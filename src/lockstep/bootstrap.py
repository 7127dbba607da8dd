"""Make, update or repair the environment in `.venv`, then hand over to the command line.

`./lockstep` runs this file, with any Python from 3.10 on and the standard library alone, when `.venv` is missing,
unfinished or out of date. Whatever was interrupted, the same command repairs. For that, `.venv/lockstep` holds

    pyproject.toml, requirements.lock   copies, written last: the environment is finished, and made from these
    home         the checkout it was made for; its programs contain absolute paths, so a moved one is made again
    torch        LOCKSTEP_TORCH, and the requirement that was installed for it
    writing      there while packages are being written; an environment that was killed then is made again
    lock         held by this process and by the pip it starts, so that a second `./lockstep` waits for both
    install.log  everything that pip said

LOCKSTEP_TORCH chooses torch: cpu, cuda, a version (2.11), anything that pip can install, or auto. The choice holds
until the next one.
"""

import contextlib
import os
import platform
import re
import select
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from subprocess import PIPE, STDOUT
from types import FrameType
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STATE = VENV / "lockstep"
WRITING, LOCK, LOG = STATE / "writing", STATE / "lock", STATE / "install.log"
PYPROJECT, REQUIREMENTS = ROOT / "pyproject.toml", ROOT / "requirements.lock"


ROOT_ALLOWED = re.compile(r"--(allow-root|\w+\.allow_root\b|config\b|help|version|show-config)")
"""Options of `lab` with which it is for JupyterLab to say whether root may start it."""


class Trouble(Exception):
    """What went wrong and what to do about it, in one line for the user."""


class DiskFull(Exception):
    """The same, for what no other way of installing helps."""


AGAIN = "Making the environment again (a minute or a few): "


class Condition(Enum):
    """The environment's, and what the user reads when work on it starts."""

    FRESH = "Ready"
    OUTDATED = "Updating the environment"
    MISSING = "Making the environment (once, a minute or a few)"
    UNFINISHED = AGAIN + "the last attempt did not finish"
    MOVED = AGAIN + "it was made for another folder"
    OTHER_TORCH = AGAIN + "LOCKSTEP_TORCH names another torch"
    BROKEN = AGAIN + "its Python cannot be used"


def main(arguments: list[str]) -> NoReturn:
    """Leave a finished environment and become the command line in it."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        sys.exit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores one of them
            signal.signal(number, stop)
    screen = Screen()
    try:
        if arguments[:1] == ["lab"]:
            refuse_root(arguments)
        make(os.environ.get("LOCKSTEP_TORCH", "").strip(), screen)
    except SystemExit:
        screen.line("lockstep: interrupted; run the same command again to continue.")
        raise
    except (Trouble, DiskFull, OSError) as error:
        screen.line(f"lockstep: {explain(str(error)) if isinstance(error, OSError) else error}")
        sys.exit(3)
    os.execv(PYTHON, [str(PYTHON), "-m", "lockstep", *arguments])


def refuse_root(arguments: list[str]) -> None:
    """Raise what JupyterLab would say to root, whom it turns away: here before there is an environment to wait for."""
    if os.geteuid() == 0 and not any(ROOT_ALLOWED.match(one) for one in arguments):
        raise Trouble("you are root, and JupyterLab does not run as root unless told to: ./lockstep lab --allow-root")


def make(torch_request: str, screen: "Screen") -> None:
    """Make the environment FRESH, whatever its condition."""
    with locked(screen) as lock:
        condition = examine(torch_request)
        if condition is Condition.FRESH:
            return
        screen.line(condition.value)
        LOG.write_text("", encoding="utf-8")
        (STATE / PYPROJECT.name).unlink(missing_ok=True)  # It counts as unfinished until all is done.
        choice = torch_request or (recorded("torch") or "auto").splitlines()[0]
        installer = Installer(screen, lock)
        if condition is not Condition.OUTDATED:
            create(installer)
        (STATE / "home").write_text(f"{ROOT}\n", encoding="utf-8")
        screen.step("pip", 0.05)
        installer.pip(pin("pip"), progress="off")
        screen.step("torch", 0.4)
        install_torch(installer, choice)
        screen.step("JupyterLab and the rest", 0.5)
        packages = REQUIREMENTS.read_text(encoding="utf-8").count("\n")
        installer.pip("--no-deps", "--requirement", str(REQUIREMENTS), packages=packages)
        if (packages_folder := ask_python()) is None:
            raise Trouble("the environment's Python doesn't run any more: run this again.")
        (packages_folder / "lockstep.pth").write_text(f"{ROOT / 'src'}\n", encoding="utf-8")
        for file in (REQUIREMENTS, PYPROJECT):
            shutil.copyfile(file, STATE / file.name)
        screen.line("  Ready.")


@contextlib.contextmanager
def locked(screen: "Screen") -> Iterator[int]:
    """Keep a second `./lockstep` out. Yields the lock's file descriptor, for pip to inherit."""
    import fcntl

    STATE.mkdir(parents=True, exist_ok=True)
    with LOCK.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            screen.line("Another ./lockstep is making the environment; waiting for it.")
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            pass  # Some network file systems have no locks.
        yield lock.fileno()


def examine(torch_request: str) -> Condition:
    if not os.path.lexists(PYTHON) and not WRITING.exists():
        return Condition.MISSING
    if WRITING.exists():
        return Condition.UNFINISHED
    if recorded("home") not in (None, f"{ROOT}\n"):
        return Condition.MOVED
    if torch_request and (recorded("torch") or torch_request).splitlines()[0] != torch_request:
        return Condition.OTHER_TORCH
    if not ask_python():
        return Condition.BROKEN
    same = all(recorded(file.name) == file.read_text(encoding="utf-8") for file in (PYPROJECT, REQUIREMENTS))
    return Condition.FRESH if same else Condition.OUTDATED


def recorded(name: str) -> str | None:
    """What an earlier run wrote into this file; None if nothing."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return (STATE / name).read_text(encoding="utf-8") or None
    return None


def ask_python() -> Path | None:
    """Where the environment's Python looks for packages; None if it doesn't run, is too old or has no pip."""
    question = "import pip, sys, sysconfig; assert sys.version_info >= (3, 10); print(sysconfig.get_path('purelib'))"
    asked = [str(PYTHON), "-I", "-c", question]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return Path(subprocess.run(asked, capture_output=True, text=True, timeout=60, check=True).stdout.strip())
    return None


def pin(name: str) -> str:
    """The exact requirement of this package in pyproject.toml. Python 3.10 has no TOML reader."""
    found = re.search(rf'^    "({name}==[^"]+)",$', PYPROJECT.read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        raise Trouble(f"pyproject.toml has no exact version of {name}: restore it with git checkout pyproject.toml.")
    return found[1]


def create(installer: "Installer") -> None:
    """An environment with pip in it and nothing else."""
    WRITING.touch()
    for path in [*VENV.iterdir(), *STATE.iterdir()]:
        if path not in (STATE, WRITING, LOCK, LOG):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    installer.screen.step("an empty environment", 0.05)
    installer.run(base_python(), "-I", "-m", "venv", str(VENV))
    WRITING.unlink()


def base_python() -> str:
    """This Python by the name that holds its version: /usr/bin/python3 may be another one after an upgrade."""
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return shutil.which(name, path=str(Path(sys.executable).parent)) or sys.executable


# ---------------------------------------------------------------- which torch


def install_torch(installer: "Installer", choice: str) -> None:
    """torch's CPU build unless there is an NVIDIA GPU; what the user asked for in pip's own words, as it is."""
    named = re.fullmatch(r"(?:torch==)?(\d+(?:\.\d+)*)", choice)
    version = named[1] if named else pin("torch").partition("==")[2]
    requirement = f"torch=={version}" if named or choice in ("auto", "cpu", "cuda") else choice
    if recorded("torch") == f"{choice}\n{requirement}\n":
        return
    say = installer.screen.line
    if requirement != f"torch=={version}":
        say(f"  LOCKSTEP_TORCH={choice}")
        installer.pip(requirement, packages=20)
    elif sys.platform != "linux":  # Elsewhere, no build carries CUDA.
        say(f"  torch {version}")
        installer.pip("--no-deps", requirement)
    elif choice == "cuda" or (choice != "cpu" and has_gpu()):
        say(f"  CUDA build of torch {version}, 3 to 4 GB to download")
        installer.pip(f"{requirement},!={version}+cpu", packages=28)
    else:
        say(f"  {'LOCKSTEP_TORCH=cpu' if choice == 'cpu' else 'no NVIDIA GPU'}: CPU build of torch {version}")
        if not install_cpu_build(installer, version):
            if choice == "cpu":
                raise Trouble(f"no index gave a CPU build of torch {version}: see {LOG}, or name a wheel.")
            say("  none found: taking the CUDA build, 3 to 4 GB to download (or Ctrl-C, and set LOCKSTEP_TORCH)")
            installer.pip(requirement, packages=28)
    (STATE / "torch").write_text(f"{choice}\n{requirement}\n", encoding="utf-8")


def install_cpu_build(installer: "Installer", version: str) -> bool:
    """From an index that pip is configured with, or from PyTorch's own: uv knows where that is."""
    try:
        installer.pip("--no-deps", f"torch=={version}+cpu")
    except Trouble:
        uv = [str(PYTHON), "-I", "-m", "uv", "--no-config", "pip", "install", "--python", str(PYTHON)]
        try:
            installer.pip(pin("uv"))
            installer.install(*uv, "--torch-backend", "cpu", "--no-deps", f"torch=={version}")
        except Trouble:
            return False
    return True


def has_gpu() -> bool:
    """Whether an NVIDIA driver is there and has a GPU."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return b"GPU" in subprocess.run(["nvidia-smi", "-L"], capture_output=True, timeout=60, check=True).stdout
    return False


# ---------------------------------------------------------------- running pip


class Installer:
    """Runs pip and uv. What they say goes to the log, how far they are to the screen."""

    def __init__(self, screen: "Screen", lock: int) -> None:
        self.screen = screen
        self.lock = lock
        self.packages = 1  # that are expected, then those that pip writes
        self.found = 0
        self.before: int | None = None  # how many packages were there when pip started to write

    def pip(self, *arguments: str, packages: int = 1, progress: str = "raw") -> None:
        """Install with pip about this number of packages. An old pip doesn't know the progress that is for programs."""
        self.packages = packages
        self.install(str(PYTHON), "-I", "-m", "pip", "install", "--no-input", "--progress-bar", progress, *arguments)

    def install(self, *command: str) -> None:
        """What fails before it writes a package, without a network for example, leaves the environment sound."""
        WRITING.touch()
        self.found, self.before = 0, None
        try:
            self.run(*command)
        except Trouble:
            if self.before is None:
                WRITING.unlink()
            raise
        WRITING.unlink()

    def run(self, *command: str) -> None:
        """Run a program to its end; Trouble if it fails."""
        # The user's settings for pip count, but for one that would install elsewhere. explain() reads English.
        settings = {"PIP_RETRIES": "3", **os.environ, "PIP_USER": "0", "LC_ALL": "C.UTF-8"}
        process = subprocess.Popen(command, stdout=PIPE, stderr=STDOUT, env=settings, pass_fds=[self.lock])
        assert process.stdout is not None
        said, rest, chunk = [f"$ {' '.join(command)}"], b"", b"."
        try:
            while chunk:
                self.tick()
                if select.select([process.stdout], [], [], 0.2)[0]:
                    chunk = os.read(process.stdout.fileno(), 65536)
                    *lines, rest = (rest + (chunk or b"\n")).split(b"\n")
                    said += filter(self.is_news, (line.decode(errors="replace") for line in lines))
        except BaseException:
            process.terminate()
            raise
        finally:
            process.wait()
            with LOG.open("a", encoding="utf-8") as log:
                log.write("\n".join(said) + "\n")
        if process.returncode:
            raise explain("\n".join(said))

    def is_news(self, line: str) -> bool:
        """See how far pip is; False if a line tells that and nothing else."""
        first, _, rest = line.strip().partition(" ")
        if first == "Progress" and (sizes := [int(number) for number in re.findall(r"\d+", rest)])[1:]:
            self.screen.detail = f"{sizes[0] / 1e6:.0f} of {sizes[1] / 1e6:.0f} MB"
            self.screen.move((max(0, self.found - 1) + sizes[0] / max(1, sizes[1])) / self.packages / 2)
            return False
        if first in ("Collecting", "Processing") or line.startswith("Requirement already satisfied"):
            self.found += 1
            self.screen.detail = re.split(r"[\s=<>!~;\[]", rest)[0] if first == "Collecting" else ""
            self.screen.move((self.found - 1) / self.packages / 2)
        elif line.startswith("Installing collected packages") or first == "Prepared":  # what uv says before it writes
            self.packages, self.before = line.count(",") + 1, self.count()
        return True

    def tick(self) -> None:
        """pip doesn't say how far it is in writing, but what it has written can be counted."""
        if self.before is not None:
            written = min(self.packages, self.count() - self.before)
            self.screen.detail = f"{written} of {self.packages} written"
            self.screen.move(0.5 + written / self.packages / 2)
        self.screen.draw()

    @staticmethod
    def count() -> int:
        return sum(1 for _ in VENV.glob("lib/python*/site-packages/*.dist-info"))


DISK_FULL = r"No space left on device|Disk quota exceeded|os error 28"
TROUBLES = {
    DISK_FULL: "the disk is full: free 2 GB (8 GB for CUDA) at {root} and in {temporary}, then run this again.",
    r"CERTIFICATE_VERIFY_FAILED|SSLError|SSLCertVerificationError": (
        "the package index has a certificate that pip doesn't trust (a proxy?): set PIP_CERT to your network's"
        " certificate file, then run this again."
    ),
    r"NewConnectionError|Failed to establish|[Nn]ame ?[Rr]esolution|(Connect|Connection|Read)Timeout|Max retries"
    r"|Connection (refused|reset|aborted|broken)|Network is unreachable|ProxyError|ProtocolError|IncompleteRead"
    r"|timed out|Request failed after|[45]\d\d (Server|Client) Error": (
        "the package index doesn't answer: check the network (or PIP_INDEX_URL, HTTPS_PROXY), then run this again;"
        " what is finished is kept."
    ),
    r"Read-only file system|Permission denied": (
        "cannot write to {root}/.venv: copy {root} to a folder of your own and run it there (or set LOCKSTEP_PYTHON to"
        " a Python that has the packages)."
    ),
    r"No matching distribution found for (?P<missing>\S+)": (
        "there is no build of {missing} for {here}: take Python 3.12, or another LOCKSTEP_TORCH, and run this again."
    ),
}


def explain(output: str) -> Trouble | DiskFull:
    """What a program's output means for the user; what it said last is what it failed of."""
    end = output[-4000:]
    here = f"Python {sys.version_info.major}.{sys.version_info.minor} on {platform.system()} {platform.machine()}"
    for pattern, sentence in TROUBLES.items():
        if found := re.search(pattern, end):
            temporary = os.environ.get("TMPDIR", "/tmp")
            words = sentence.format(root=ROOT, temporary=temporary, here=here, **found.groupdict())
            return DiskFull(words) if pattern == DISK_FULL else Trouble(words)
    lines = [line.strip() for line in end.splitlines() if line.strip()]
    last = next((line for line in reversed(lines) if line.lower().startswith("error")), lines[-1])
    return Trouble(f"the environment could not be made ({last[:160]}): see {LOG}, then run this again.")


class Screen:
    """On a terminal one line that moves, with the seconds that a step has taken; elsewhere a line for each step."""

    def __init__(self) -> None:
        self.live = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self.name = self.detail = ""
        self.start = self.share = self.done = 0.0
        self.since = time.monotonic()

    def line(self, text: str) -> None:
        """A line that stays; on a terminal, wrapped at words."""
        if sys.stderr.isatty():
            text = textwrap.fill(
                text, self.columns(), subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
            )
        sys.stderr.write(("\r\x1b[K" if self.live else "") + text + "\n")
        sys.stderr.flush()

    @staticmethod
    def columns() -> int:
        """stdout may be a file; a terminal that does not know its width says 0."""
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80

    def step(self, name: str, share: float) -> None:
        """What follows fills this share of the bar."""
        self.name, self.detail, self.since = name, "", time.monotonic()
        self.start, self.share = self.start + self.share, share
        self.move(0)
        if not self.live:
            self.line(f"  {name} ...")
        self.draw()

    def move(self, part: float) -> None:
        """This part of the step is done; the bar never goes back."""
        self.done = max(self.done, self.start + min(1.0, part) * self.share)

    def draw(self) -> None:
        if not self.live:
            return
        bar = ("#" * round(self.done * 20)).ljust(20, ".")
        detail = f"{self.detail}, " if self.detail else ""
        text = f"  [{bar}] {self.done:4.0%}  {self.name}: {detail}{time.monotonic() - self.since:.0f} s"
        sys.stderr.write("\r\x1b[K" + text[: self.columns() - 1])
        sys.stderr.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
