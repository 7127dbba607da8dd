"""Make or mend the environment in `.venv`, then hand over to the command line.

`./lockstep` runs this file with any Python it finds, when `.venv` is missing, unfinished or out of date. It uses
the standard library alone. What it promises: a learner sees at once that something moves; whatever goes wrong is
one line that says what to do; whatever interrupts it, the same command run again mends it.

How it keeps that promise. In `.venv/lockstep` lie

    pyproject.toml   a copy, written last of all: the environment is finished, and made from these pins
    home             the checkout it was made for: its programs hold absolute paths, so a moved one is made anew
    torch            the choice of torch it was made with
    writing          there while packages are being written; what was killed then is not trusted but made anew
    lock             held by this process and by the pip it starts, so that a second `./lockstep` waits for both
    install.log      everything that pip said

An environment without any of these (made by hand, or by an editor) is adopted: what it lacks is added.

LOCKSTEP_TORCH chooses the build of torch: cpu, cuda, anything that pip can install (torch==2.9.1, a wheel), or
auto. The choice holds until another is made.
"""

import sys

if sys.version_info < (3, 10):  # For this line to be seen, the whole file must parse on any Python 3.
    sys.stderr.write(
        f"lockstep: Python {sys.version.split()[0]} is too old: install 3.10 or newer and run this again.\n"
    )
    sys.exit(3)

import ast
import contextlib
import errno
import json
import os
import platform
import re
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import FrameType
from typing import NoReturn, TextIO

EXIT_TROUBLE = 3
GIGABYTE = 1_000_000_000
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Trouble(Exception):
    """What went wrong and what to do about it, in one line for the user."""


class DiskFull(Trouble):
    """The one trouble that trying another way cannot help."""


class Interrupted(BaseException):
    """A signal asked us to stop; carries its number."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def main(arguments: list[str]) -> NoReturn:
    """Leave a finished environment behind and become the command line in it."""
    place = Place(Path(__file__).resolve().parents[2])
    screen = Screen(sys.stderr)
    for number in STOPPING:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, for one, means it
            signal.signal(number, interrupt)
    try:
        make(place, os.environ.get("LOCKSTEP_TORCH", "").strip(), screen)
    except Trouble as trouble:
        screen.line(f"lockstep: {trouble}")
        sys.exit(EXIT_TROUBLE)
    except Interrupted as interrupted:
        screen.line("lockstep: interrupted; the same command goes on from here.")
        sys.exit(128 + interrupted.number)
    except OSError as error:
        screen.line(f"lockstep: {explain(f'{error.strerror}: {error.filename}', place)}")
        sys.exit(EXIT_TROUBLE)
    os.execv(place.python, [str(place.python), "-m", "lockstep", *arguments])


def interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise Interrupted(number)


# ---------------------------------------------------------------- where things lie


@dataclass(frozen=True)
class Place:
    """The checkout and the paths in it that matter here."""

    root: Path

    @property
    def venv(self) -> Path:
        return self.root / ".venv"

    @property
    def python(self) -> Path:
        return self.venv / "bin" / "python"

    @property
    def state(self) -> Path:
        return self.venv / "lockstep"

    @property
    def writing(self) -> Path:
        return self.state / "writing"

    @property
    def log(self) -> Path:
        return self.state / "install.log"

    @property
    def pins(self) -> str:
        return (self.root / "pyproject.toml").read_text(encoding="utf-8")

    def recorded(self, name: str) -> str | None:
        """What an earlier run left in one of the state files; None if it left none."""
        with contextlib.suppress(OSError, UnicodeDecodeError):
            return (self.state / name).read_text(encoding="utf-8")
        return None

    def record(self, name: str, text: str) -> None:
        """Write a state file whole or not at all."""
        draft = self.state / f"{name}.new"
        draft.write_text(text, encoding="utf-8")
        draft.replace(self.state / name)


def pinned(pins: str, table: str) -> list[str]:
    """The requirements in one list of pyproject.toml.

    Python 3.10 has no TOML reader. A TOML array of strings, comments included, is also a Python list.
    """
    found = re.search(rf"^{table} = (\[.*?^\])", pins, re.MULTILINE | re.DOTALL)
    if found is None:
        raise Trouble(f"pyproject.toml has no list named {table}: restore it with git checkout pyproject.toml.")
    return [str(requirement) for requirement in ast.literal_eval(found[1])]


def requirement_for(name: str, requirements: list[str]) -> str:
    return next(line for line in requirements if re.match(rf"{name}\b", line))


# ---------------------------------------------------------------- what state it is in


class Condition(Enum):
    FRESH = "finished, and made from these pins"
    OUTDATED = "sound, but made from other pins, or not by us"
    MISSING = "not there yet"
    BROKEN = "interrupted while packages were written, moved, without its Python, or made for another torch"


@dataclass(frozen=True)
class Interpreter:
    """The environment's Python, as it describes itself."""

    version: str
    is_supported: bool
    packages: Path
    has_pip: bool


def ask_interpreter(place: Place) -> Interpreter | None:
    """None if it does not run."""
    question = (
        "import importlib.util, json, platform, sys, sysconfig;"
        "print(json.dumps([platform.python_version(), sys.version_info >= (3, 10), sysconfig.get_path('purelib'),"
        " importlib.util.find_spec('pip') is not None]))"
    )
    try:
        answer = subprocess.run(
            [place.python, "-I", "-c", question], capture_output=True, text=True, timeout=60, check=True
        )
        version, is_supported, packages, has_pip = json.loads(answer.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return Interpreter(version, is_supported, Path(packages), has_pip)


def condition(place: Place, torch_request: str) -> Condition:
    if place.writing.exists():
        return Condition.BROKEN
    if not os.path.lexists(place.python):
        return Condition.MISSING
    interpreter = ask_interpreter(place)
    if interpreter is None or not interpreter.is_supported:
        return Condition.BROKEN
    if place.recorded("home") not in (None, f"{place.root}\n"):
        return Condition.BROKEN
    if torch_request and place.recorded("torch") not in (None, f"{torch_request}\n"):
        return Condition.BROKEN
    return Condition.FRESH if place.recorded("pyproject.toml") == place.pins else Condition.OUTDATED


# ---------------------------------------------------------------- the work


def make(place: Place, torch_request: str, screen: "Screen") -> None:
    """Bring the environment to FRESH, from wherever it is."""
    with locked(place, screen) as lock:
        found = condition(place, torch_request)
        if found is Condition.FRESH:
            return
        work = Work(place, screen, lock)
        screen.line(TITLES[found])
        choice = torch_request or (place.recorded("torch") or "auto").strip()
        place.log.write_text("", encoding="utf-8")
        # From here on, and until all is done, it does not count as finished.
        (place.state / "pyproject.toml").unlink(missing_ok=True)
        if found is not Condition.OUTDATED:
            create(work)
        place.record("home", f"{place.root}\n")
        install(work, choice)
        place.record("torch", f"{choice}\n")
        place.record("pyproject.toml", place.pins)
        screen.done("Ready.")


TITLES = {
    Condition.MISSING: "Making the environment (once, about a minute)",
    Condition.BROKEN: "Making the environment anew, about a minute (interrupted, moved, or for another torch)",
    Condition.OUTDATED: "Bringing the environment up to date",
}


@contextlib.contextmanager
def locked(place: Place, screen: "Screen") -> Iterator[int]:
    """Keep a second `./lockstep` out; yields the lock's file descriptor, for pip to inherit.

    Where the file system knows no locks, go on without.
    """
    import fcntl

    try:
        place.state.mkdir(parents=True, exist_ok=True)
        lock = os.open(place.state / "lock", os.O_RDWR | os.O_CREAT, 0o666)
    except PermissionError as error:
        raise read_only(place) from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            screen.line("Another ./lockstep is making the environment; waiting for it.")
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                raise
        yield lock
    finally:
        os.close(lock)


@dataclass(frozen=True)
class Work:
    """What every step needs."""

    place: Place
    screen: "Screen"
    lock: int

    def run(self, command: list[str], output: "InstallerOutput | None" = None) -> str:
        """Run a program to its end, its output in the log, the bar alive; Trouble if it fails.

        Returns what it said, and lets `output` read each line as it comes.
        """
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment_for_pip(),
            pass_fds=(self.lock,),
        )
        with self.place.log.open("a", encoding="utf-8", errors="replace") as log:
            log.write(f"$ {' '.join(command)}\n")
            lines = Lines(log, output.read if output else lambda line: None)
            try:
                follow(process, lines, output.tick if output else self.screen.tick)
            except BaseException:
                lines.feed(stop(process) + b"\n")
                raise
        if process.wait() != 0:
            raise explain("\n".join(lines.seen), self.place)
        return "\n".join(lines.seen)

    def pip(self, *arguments: str, share: float, packages: int = 1, progress: str = "raw") -> None:
        """Install with pip: about this number of packages, which fill this share of the bar."""
        command = [*self.module("pip"), "install", "--no-input", "--progress-bar", progress, *arguments]
        self.install(command, InstallerOutput(self, share, packages))

    def module(self, name: str) -> list[str]:
        """How to run a module with the environment's Python, whatever PYTHONPATH and the like say."""
        return [str(self.place.python), "-I", "-m", name]

    def install(self, command: list[str], output: "InstallerOutput") -> None:
        """Leave the mark `writing` for as long as packages are being written.

        A program that stops before it writes anything (no network, say) leaves the environment as it was, so
        what is finished by then is kept.
        """
        self.place.writing.touch()
        try:
            self.run(command, output)
        except (Trouble, Interrupted):
            if not output.has_written:
                self.place.writing.unlink()
            raise
        self.place.writing.unlink()
        self.screen.settle()


def create(work: Work) -> None:
    """An environment with pip in it and nothing else."""
    place = work.place
    check_can_create()
    place.writing.touch()
    for child in place.venv.iterdir():
        if child != place.state:
            shutil.rmtree(child) if child.is_dir() and not child.is_symlink() else child.unlink()
    work.screen.phase("an empty environment")
    work.run([base_python(), "-I", "-m", "venv", str(place.venv)])
    place.writing.unlink()


def check_can_create() -> None:
    """Debian ships Python without the module that puts pip into an environment."""
    try:
        import ensurepip
        import venv  # noqa: F401
    except ImportError as error:
        package = f"python3.{sys.version_info.minor}-venv"
        raise Trouble(
            f"this Python ({sys.executable}) cannot make environments: install the package {package}"
            f" (sudo apt install {package}) and run this again."
        ) from error
    del ensurepip


def base_python() -> str:
    """This Python, by a name that carries its version where there is one.

    An environment made from /usr/bin/python3 breaks in silence when that becomes another version.
    """
    versioned = Path(sys.executable).parent / f"python{sys.version_info.major}.{sys.version_info.minor}"
    return str(versioned) if versioned.exists() else sys.executable


def install(work: Work, choice: str) -> None:
    """pip, then torch, then all the rest, then the way to our own source."""
    place, screen = work.place, work.screen
    interpreter = interpreter_with_pip(work)
    tools, dependencies = pinned(place.pins, "bootstrap"), pinned(place.pins, "dependencies")
    screen.phase("pip")
    # The pip that comes with an older Python does not know raw progress, nor some of the rest.
    work.pip(requirement_for("pip", tools), share=0.05, progress="off")

    torch_pin = requirement_for("torch", dependencies)
    plan = choose_torch(work, choice, torch_pin)
    screen.line(f"  Python {interpreter.version} · {plan.sentence}")
    check_space(place, plan)
    install_torch(work, plan, requirement_for("uv", tools))

    rest = [line for line in dependencies if line != torch_pin or not plan.replaces_pin]
    requirements = place.state / "requirements.txt"
    requirements.write_text("\n".join(rest) + "\n", encoding="utf-8")
    screen.phase("JupyterLab and the rest")
    work.pip("--requirement", str(requirements), share=0.5, packages=130)
    (interpreter.packages / "lockstep.pth").write_text(f"{place.root / 'src'}\n", encoding="utf-8")


def interpreter_with_pip(work: Work) -> Interpreter:
    """uv, for one, makes environments without pip."""
    found = ask_interpreter(work.place)
    if found is not None and not found.has_pip:
        check_can_create()
        work.run(work.module("ensurepip"))
    if found is None:
        raise Trouble(f"the environment's Python does not run: delete {work.place.venv} and run this again.")
    return found


# ---------------------------------------------------------------- which torch


class Source(Enum):
    NOTHING = "it is there already"
    PIP = "whatever pip is configured to take"
    CPU_INDEX = "the CPU builds that PyTorch itself publishes; uv knows where"


@dataclass(frozen=True)
class Offer:
    """What pip would install for our pin of torch."""

    version: str
    carries_cuda: bool


@dataclass(frozen=True)
class TorchPlan:
    source: Source
    requirement: str
    sentence: str
    carries_cuda: bool = False
    replaces_pin: bool = False


def choose_torch(work: Work, choice: str, pin: str) -> TorchPlan:
    if choice not in ("auto", "cpu", "cuda"):
        return TorchPlan(Source.PIP, choice, f"LOCKSTEP_TORCH={choice}", replaces_pin=True)
    return plan_torch(choice, pin, offered(work, pin), driver_answers())


def plan_torch(choice: str, pin: str, offer: Offer | None, driver: bool) -> TorchPlan:
    """Decide which torch to install; `offer` is None where one that satisfies the pin is installed already.

    A build with a local part in its version, such as 2.13.0+cpu, is one that somebody configured pip to offer
    on this machine; that is respected unless LOCKSTEP_TORCH says otherwise.
    """
    version = pin.partition("==")[2]
    if offer is None:
        return TorchPlan(Source.NOTHING, pin, f"torch {version} is there already")
    if choice == "cuda":
        # Three equals signs compare as text, and so pass over 2.13.0+cpu.
        exact = f"torch==={version}" if offer.version.endswith("+cpu") else pin
        return TorchPlan(Source.PIP, exact, f"LOCKSTEP_TORCH=cuda: CUDA build of torch {version}, about 3 GB", True)
    reason = "LOCKSTEP_TORCH=cpu: " if choice == "cpu" else "" if driver else "no NVIDIA driver: "
    if not offer.carries_cuda:
        kind = "CPU build of torch" if offer.version.endswith("+cpu") else "torch"
        return TorchPlan(Source.PIP, pin, f"{reason}{kind} {version}")
    if choice == "auto" and (driver or "+" in offer.version):
        return TorchPlan(Source.PIP, pin, f"{reason}CUDA build of torch {version}, about 3 GB", True)
    return TorchPlan(Source.CPU_INDEX, pin, f"{reason}CPU build of torch {version}")


def offered(work: Work, pin: str) -> Offer | None:
    """Ask pip what it would install for the pin. This reads metadata and downloads no build."""
    work.screen.phase("which torch")
    report = work.place.state / "torch.json"
    work.run([*work.module("pip"), "install", "--no-input", "--dry-run", "--no-deps", "--report", str(report), pin])
    found = json.loads(report.read_text(encoding="utf-8"))["install"]
    if not found:
        return None
    metadata = found[0]["metadata"]
    needed = [line for line in metadata.get("requires_dist", []) if applies_here(line)]
    return Offer(metadata["version"], any(re.match(r"(nvidia|cuda)-", line) for line in needed))


def applies_here(requirement: str) -> bool:
    """Whether the parts of a requirement's marker that name a platform name this one."""
    named = dict(re.findall(r"platform_(system|machine) == [\"'](\w+)[\"']", requirement))
    here = {"system": platform.system(), "machine": platform.machine()}
    return all(here[part] == value for part, value in named.items())


def driver_answers() -> bool:
    """Whether an NVIDIA driver is there and has a device. Asked in a process apart: it may crash or hang."""
    question = (
        "import ctypes, sys; cuda = ctypes.CDLL('libcuda.so.1'); count = ctypes.c_int(0);"
        "sys.exit(cuda.cuInit(0) != 0 or cuda.cuDeviceGetCount(ctypes.byref(count)) != 0 or count.value < 1)"
    )
    try:
        answer = subprocess.run([sys.executable, "-I", "-c", question], capture_output=True, timeout=30)
    except subprocess.TimeoutExpired:
        return False
    return answer.returncode == 0


def check_space(place: Place, plan: TorchPlan) -> None:
    """Say so before the download, not after it, if the environment cannot fit."""
    if plan.source is Source.NOTHING:
        return
    needed = 7.0 if plan.carries_cuda else 1.5
    free = shutil.disk_usage(place.venv).free / GIGABYTE
    if free < needed:
        raise DiskFull(
            f"not enough room on the disk: the environment takes {needed:g} GB and {free:.1f} GB are free at"
            f" {place.root}; free some and run this again."
        )


def install_torch(work: Work, plan: TorchPlan, uv: str) -> None:
    """Without its dependencies where that is one file: they come with the rest, and the bar tells the truth."""
    if plan.source is Source.NOTHING:
        work.screen.open_share(0.4)
        work.screen.settle()
        return
    work.screen.phase("torch")
    if plan.source is Source.CPU_INDEX:
        if install_from_cpu_index(work, plan, uv):
            return
        work.screen.line(
            "  PyTorch's own index gave no CPU build: taking the one with CUDA, about 3 GB"
            " (to choose another: Ctrl-C, then LOCKSTEP_TORCH=<wheel or requirement>)"
        )
        check_space(work.place, TorchPlan(Source.PIP, plan.requirement, "", carries_cuda=True))
        work.pip(plan.requirement, share=0.4, packages=28)
    elif plan.carries_cuda:
        work.pip(plan.requirement, share=0.4, packages=28)
    elif plan.replaces_pin:
        work.pip(plan.requirement, share=0.4, packages=10)
    else:
        work.pip("--no-deps", plan.requirement, share=0.4)


def install_from_cpu_index(work: Work, plan: TorchPlan, uv: str) -> bool:
    """False if uv did not get it, or pip did not get uv."""
    python = str(work.place.python)
    target = ["--python", python, "--torch-backend", "cpu"]
    try:
        work.pip(uv, share=0.05)
        work.install([*work.module("uv"), "pip", "install", *target, plan.requirement], InstallerOutput(work, 0.4, 12))
    except DiskFull:
        raise
    except Trouble:
        return False
    return True


# ---------------------------------------------------------------- running pip


def environment_for_pip() -> dict[str, str]:
    """The user's settings for pip count: indexes, proxies, certificates. Not those that would misplace files."""
    misleading = ("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_QUIET", "PIP_VERBOSE")
    environment = {name: value for name, value in os.environ.items() if name not in misleading}
    environment.setdefault("PIP_RETRIES", "3")
    # The system's own messages come in the user's language; explain() reads English.
    return {**environment, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_USER": "0", "LC_ALL": "C.UTF-8"}


class Lines:
    """Takes a program's output as it comes, and hands it on to the log and to a reader in whole lines."""

    def __init__(self, log: TextIO, read: Callable[[str], None]) -> None:
        self.log = log
        self.read = read
        self.seen: list[str] = []
        self.rest = b""

    def feed(self, chunk: bytes) -> None:
        *whole, self.rest = (self.rest + chunk).split(b"\n")
        for line in whole:
            self.note(line.decode(errors="replace").rstrip("\r"))

    def note(self, line: str) -> None:
        self.seen.append(line)
        self.read(line)
        if not line.startswith("Progress "):
            self.log.write(line + "\n")


def follow(process: "subprocess.Popen[bytes]", lines: Lines, tick: Callable[[], None]) -> None:
    """Read a program's output to its end; `tick` is called a few times a second meanwhile."""
    assert process.stdout is not None
    descriptor = process.stdout.fileno()
    while True:
        tick()
        if not select.select([descriptor], [], [], 0.2)[0]:
            continue
        with undisturbed():
            chunk = os.read(descriptor, 65536)
            lines.feed(chunk or b"\n")
        if not chunk:
            return


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Signals wait, so that no line is lost between being read and being noted.

    On the line that says that writing begins depends whether an interrupted environment is trusted.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def stop(process: "subprocess.Popen[bytes]") -> bytes:
    """End a program we started, wait until it has, and return what it still had to say."""
    process.terminate()
    try:
        rest, _ = process.communicate(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        rest, _ = process.communicate()
    return rest


class InstallerOutput:
    """Reads the lines of pip or uv: how far it is, and whether it has begun to write packages."""

    def __init__(self, work: Work, share: float, packages: int) -> None:
        self.screen = work.screen
        self.venv = work.place.venv
        self.expected = packages
        self.collected = 0
        self.has_written = False
        self.to_write = 0
        self.there_before = self.there()
        self.screen.open_share(share)

    def read(self, line: str) -> None:
        first, _, rest = line.strip().partition(" ")
        if first in ("Collecting", "Processing") or line.startswith("Requirement already satisfied"):
            self.collected += 1
            self.advance(0.0, re.split(r"[\s=<>!~;\[]", Path(rest).name)[0] if first == "Collecting" else "")
        elif first == "Progress":
            done, _, total = rest.partition(" of ")
            if done.isdigit() and total.isdigit():
                self.advance(int(done) / max(1, int(total)), f"{int(done) / 1e6:.0f} of {int(total) / 1e6:.0f} MB")
        elif line.startswith("Installing collected packages"):
            self.has_written, self.to_write = True, line.count(",") + 1
        elif first == "Resolved":  # uv's word before it fetches and writes
            self.has_written = True

    def advance(self, of_this_file: float, detail: str) -> None:
        """Finding and fetching is the first half of a share, writing the second."""
        done = max(0, self.collected - 1) + of_this_file
        self.screen.advance(0.5 * min(1.0, done / self.expected), detail)

    def tick(self) -> None:
        """pip does not say how far it has come in writing, but what it has written can be counted."""
        if self.to_write:
            written = min(self.to_write, self.there() - self.there_before)
            detail = f"{written} of {self.to_write} packages" if self.to_write > 1 else "writing its files"
            self.screen.advance(0.5 + 0.5 * written / self.to_write, detail)
        else:
            self.screen.tick()

    def there(self) -> int:
        return sum(1 for _ in self.venv.glob("lib/python*/site-packages/*.dist-info"))


# ---------------------------------------------------------------- saying what happens


NETWORK = (
    r"NewConnectionError|NameResolutionError|Failed to establish|name resolution|ConnectTimeout|ReadTimeout"
    r"|Max retries|ProxyError|Connection (refused|reset|aborted|broken)|Network is unreachable|ProtocolError"
    r"|IncompleteRead|timed out|Request failed after|[45]\d\d (Server|Client) Error"
)


def explain(output: str, place: Place) -> Trouble:
    """What a program's output means for the user; what it said last is what it died of."""
    end = output[-4000:]
    if re.search(r"No space left on device|Disk quota exceeded|os error 28", end):
        temporary = os.environ.get("TMPDIR", "/tmp")
        return DiskFull(f"the disk is full: free about 2 GB at {place.root} and in {temporary}, then run this again.")
    if re.search(r"CERTIFICATE_VERIFY_FAILED|SSLError|SSLCertVerificationError", end):
        return Trouble(
            "the package index shows a certificate that pip does not trust (a proxy?): set PIP_CERT to your network's"
            " certificate file, then run this again."
        )
    if re.search(NETWORK, end):
        return Trouble(
            "the package index does not answer: check the network (or PIP_INDEX_URL, HTTPS_PROXY), then run this again;"
            " what is finished is kept."
        )
    if re.search(r"Read-only file system|Permission denied", end):
        return read_only(place)
    missing = re.search(r"No matching distribution found for (\S+)", end)
    if missing:
        return Trouble(
            f"there is no build of {missing[1]} for Python {sys.version_info.major}.{sys.version_info.minor} on"
            f" {platform.system()} {platform.machine()}: install Python 3.12, then run this again."
        )
    lines = [line.strip() for line in end.splitlines() if line.strip()] or ["it said nothing"]
    last = next((line for line in reversed(lines) if line.lower().startswith("error")), lines[-1])
    return Trouble(f"the environment could not be made ({last[:160]}): see {place.log}, then run this again.")


def read_only(place: Place) -> Trouble:
    return Trouble(
        f"cannot write to {place.venv}: copy {place.root} to a folder of your own and run it there"
        " (or set LOCKSTEP_PYTHON to a Python that has the packages)."
    )


class Screen:
    """One bar for the whole on a terminal; elsewhere one plain line a phase."""

    WIDTH = 20

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.live = stream.isatty() and os.environ.get("TERM") != "dumb"
        self.full, self.empty = ("█", "░") if can_print("█░·", stream) else ("#", ".")
        self.fraction = self.start = self.share = 0.0
        self.name = self.detail = ""
        self.since = time.monotonic()

    def line(self, text: str) -> None:
        """A line that stays."""
        self.clear()
        self.stream.write((text if self.full == "█" else text.replace("·", "-")) + "\n")
        self.stream.flush()

    def phase(self, name: str) -> None:
        self.name, self.detail, self.since = name, "", time.monotonic()
        if not self.live:
            self.line(f"  {name} …" if self.full == "█" else f"  {name} ...")
        self.tick()

    def open_share(self, share: float) -> None:
        """What comes next fills this part of the bar."""
        self.start, self.share = self.fraction, share

    def advance(self, part: float, detail: str) -> None:
        """`part` of the share that is open is done; the bar never goes back."""
        self.fraction = max(self.fraction, min(1.0, self.start + part * self.share))
        self.detail = detail or self.detail
        self.tick()

    def settle(self) -> None:
        """The share that is open is done."""
        self.advance(1.0, "")
        self.detail = ""

    def done(self, text: str) -> None:
        self.fraction, self.name, self.detail = 1.0, "", ""
        if self.live:
            self.tick()
            self.stream.write("\n")
        else:
            self.line(f"  {text}")

    def tick(self) -> None:
        """Draw the bar as it is now, with the seconds that the phase has taken, so that it never seems dead."""
        if not self.live:
            return
        filled = round(self.fraction * self.WIDTH)
        seconds = f"{time.monotonic() - self.since:.0f} s" if self.name else ""
        words = " · ".join(part for part in (self.name, self.detail, seconds) if part)
        text = f"  {self.full * filled}{self.empty * (self.WIDTH - filled)} {self.fraction:4.0%}   {words}"
        room = shutil.get_terminal_size().columns - 1
        self.stream.write("\r\x1b[K" + (text if self.full == "█" else text.replace("·", "-"))[:room])
        self.stream.flush()

    def clear(self) -> None:
        if self.live:
            self.stream.write("\r\x1b[K")


def can_print(text: str, stream: TextIO) -> bool:
    try:
        text.encode(stream.encoding)
    except UnicodeEncodeError:
        return False
    return True


if __name__ == "__main__":
    main(sys.argv[1:])
