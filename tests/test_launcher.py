"""The launcher and the environment it makes, on copies of the checkout, from the first use to the worst day.

Everything here is the real launcher and the real bootstrap.py, but for this: `python -m venv` leaves out the real pip,
which would take seconds, and installs a small one that writes what pip writes, keeps a journal and fails on request.
"""

import contextlib
import json
import os
import pty
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PYTHON = str(Path(getattr(sys, "_base_executable", sys.executable)).resolve())
SECONDS = 60.0  # A deadline for what takes a fraction of one second; no test measures time.

pytestmark = pytest.mark.skipif(os.name != "posix", reason="not run: ./lockstep is a POSIX shell script")

JOURNAL = """
import os, sys
from pathlib import Path
machine = Path(os.environ["MACHINE"])
def note(*words):
    with open(machine / "journal", "a") as journal:
        journal.write("\\t".join(words) + "\\n")
"""

# Runs in place of bootstrap.py in the copy: the same program, with one function and the platform replaced.
BOOTSTRAP = f"""{JOURNAL}
import runpy
note("bootstrap")
main = runpy.run_path(str(Path(__file__).with_name("real_bootstrap.py")), run_name="real")["main"]
main.__globals__["base_python"] = lambda: str(machine / "base")
sys.platform = os.environ["PLATFORM"]
main(sys.argv[1:])
"""

# `base -I -m venv TARGET`
BASE = f"""#!{PYTHON} -I{JOURNAL}
import shutil, venv
note("venv")
venv.create(sys.argv[-1], with_pip=False, symlinks=True)
shutil.copytree(machine / "pip", next(Path(sys.argv[-1]).glob("lib/python*/site-packages")) / "pip", dirs_exist_ok=True)
"""

# pip and, under the name uv, uv. TORCH lists what pip's index has, with "uv" for what uv finds. TROUBLE is STEP:WHAT,
# STEP being the name of a package, or rest.
PIP = f"""{JOURNAL}
import shutil, time
tool, packages = Path(__file__).parent, Path(__file__).parents[1]
*options, wanted = sys.argv[1:]
note(tool.name, *options, wanted)
assert os.environ["PIP_USER"] == "0"  # or the user's own settings could send packages elsewhere
step = "rest" if "--requirement" in options else wanted.partition("=")[0]
names = [line.split()[0] for line in open(wanted) if line[0].isalpha()] if step == "rest" else [wanted]
where, _, trouble = os.environ.get("TROUBLE", "").partition(":")
trouble = trouble if where == step else ""
print("Collecting", wanted, flush=True)
if trouble.startswith("say "):
    sys.exit(trouble[4:])
if wanted.startswith("torch==") and (wanted if tool.name == "pip" else "uv") not in os.environ["TORCH"].split():
    sys.exit("ERROR: No matching distribution found for " + wanted)
print("Progress 500 of 1000", flush=True)
print("Prepared" if tool.name == "uv" else "Installing collected packages:", ", ".join(names), flush=True)
if trouble == "hang":
    (packages / "half-written").touch()
    (machine / "reached").touch()
    while not (machine / "release").exists():
        time.sleep(0.01)
if trouble == "fill":
    (packages / "huge").write_bytes(bytes(8_000_000))
for name in names:
    (packages / (Path(name).name.partition("=")[0] + ".dist-info")).mkdir(exist_ok=True)
    (packages / (Path(name).name.partition("=")[0] + ".dist-info") / "requirement").write_text(name)
if step == "uv":
    shutil.copytree(tool, packages / "uv", dirs_exist_ok=True)
"""

CLI = """
import json, sys
print(json.dumps({"arguments": sys.argv[1:], "prefix": sys.prefix, "file": __file__, "path": sys.path}))
sys.exit(7 if "fail" in sys.argv else 0)
"""


@dataclass(frozen=True)
class Ended:
    code: int
    output: str
    errors: str

    @property
    def seen(self) -> dict[str, list[str]]:
        """What the command line saw of the hand-over."""
        assert self.code in (0, 7), self.errors
        found: dict[str, list[str]] = json.loads(self.output)
        return found

    def is_trouble(self, *words: str) -> bool:
        """One last line with our name and these words, no traceback, and the exit code for it."""
        lines = [line for line in self.errors.splitlines() if line.startswith("lockstep:")]
        assert (self.code, self.output, lines) == (3, "", self.errors.splitlines()[-1:]), self
        assert "Traceback" not in self.errors
        assert [word for word in words if word not in lines[0]] == [], lines[0]
        return True


class Checkout:
    """A copy of the checkout, and a machine with little on it to run it on."""

    def __init__(self, root: Path, machine: Path) -> None:
        self.root, self.machine = root, machine
        self.venv = root / ".venv"
        self.launcher = root / "lockstep"

    @property
    def packages(self) -> Path:
        return next(self.venv.glob("lib/python*/site-packages"))

    def start(self, *command: str | Path, cwd: Path | None = None, **settings: str) -> "subprocess.Popen[str]":
        machine = {"MACHINE": str(self.machine), "PATH": f"{self.machine}/bin", "PLATFORM": "linux"}
        environment = {**machine, "TORCH": "torch==2.13.0+cpu torch==2.13.0", **settings}
        out = err = subprocess.PIPE
        return subprocess.Popen(command, cwd=cwd or self.machine, env=environment, stdout=out, stderr=err, text=True)

    def run(self, *arguments: str, **settings: str) -> Ended:
        return finish(self.start(self.launcher, *arguments, **settings))

    def run_into_hang(self, *arguments: str, step: str) -> "subprocess.Popen[str]":
        process = self.start(self.launcher, *arguments, TROUBLE=f"{step}:hang")
        wait_until((self.machine / "reached").exists)
        return process

    def journal(self) -> list[list[str]]:
        """What was started since the last call, with its arguments: bootstrap, venv, pip, uv."""
        path = self.machine / "journal"
        entries = [line.split("\t") for line in path.read_text().splitlines()] if path.exists() else []
        path.unlink(missing_ok=True)
        return entries

    def started(self) -> list[str]:
        return [entry[0] for entry in self.journal()]

    def command(self, name: str, script: str) -> None:
        """Put a command on the machine's PATH."""
        (self.machine / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
        (self.machine / "bin" / name).chmod(0o755)

    def replace(self, file: str, old: str, new: str) -> None:
        text = (self.root / file).read_text()
        assert old in text
        (self.root / file).write_text(text.replace(old, new))


def torches(journal: list[list[str]]) -> list[str]:
    """Which torch was asked for, in order: TOOL REQUIREMENT."""
    return [f"{entry[0]} {entry[-1]}" for entry in journal if "torch" in Path(entry[-1]).name]


def finish(process: "subprocess.Popen[str]") -> Ended:
    output, errors = process.communicate(timeout=SECONDS)
    return Ended(process.returncode, output, errors)


def wait_until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not happened():
        assert time.monotonic() < deadline, "what the test waits for never happened"
        time.sleep(0.01)


@pytest.fixture
def checkout(tmp_path: Path) -> Iterator[Checkout]:
    made = Checkout(tmp_path / "a checkout", tmp_path / "machine")
    package = made.root / "src" / "lockstep"
    for folder in (made.machine / "bin", made.machine / "pip", package):
        folder.mkdir(parents=True)
    for tool in ("cmp", "fold", "readlink", "stty"):
        (made.machine / "bin" / tool).symlink_to(shutil.which(tool) or "/not there")
    (made.machine / "pip" / "__main__.py").write_text(PIP)
    (made.machine / "pip" / "__init__.py").touch()
    (made.machine / "base").write_text(BASE)
    (made.machine / "base").chmod(0o755)
    for file in ("lockstep", "pyproject.toml", "requirements.lock"):
        shutil.copy(ROOT / file, made.root)
    shutil.copy(ROOT / "src" / "lockstep" / "bootstrap.py", package / "real_bootstrap.py")
    for name, text in (("bootstrap", BOOTSTRAP), ("__init__", ""), ("__main__", CLI)):
        (package / f"{name}.py").write_text(text)
    made.command("python3", f'exec "{PYTHON}" "$@"')
    yield made
    (made.machine / "release").touch()  # Lets go of any pip that a test left hanging.


# ---------------------------------------------------------------- the good days


def test_first_use_makes_the_environment_and_the_next_only_uses_it(checkout: Checkout) -> None:
    outcome = checkout.run("lab", "--allow-root", "--port", "9 9", "")
    assert outcome.seen["arguments"] == ["lab", "--allow-root", "--port", "9 9", ""]
    assert outcome.seen["prefix"] == str(checkout.venv)
    assert outcome.seen["file"] == str(checkout.root / "src" / "lockstep" / "__main__.py")
    lock = str(checkout.root / "requirements.lock")
    assert [entry[-1] for entry in checkout.journal()] == ["bootstrap", "venv", "pip==26.3", "torch==2.13.0+cpu", lock]
    assert "Making the environment" in outcome.errors and "\r" not in outcome.errors and "\x1b" not in outcome.errors
    assert (checkout.packages / "jupyterlab.dist-info").is_dir()

    (checkout.machine / "bin" / "python3").unlink()
    again = checkout.run("status", "a b", "fail")
    assert (again.code, again.errors, checkout.started()) == (7, "", [])
    assert again.seen["arguments"] == ["status", "a b", "fail"]


@pytest.mark.parametrize("asked", ["-h", "--help", "lab --help", "lab --port 1 -h", "run --help", "author check -h"])
def test_help_is_there_before_the_environment_is_made(checkout: Checkout, asked: str) -> None:
    outcome = checkout.run(*asked.split())
    assert (outcome.code, outcome.errors, checkout.started()) == (0, "", [])
    assert "./lockstep lab " in outcome.output and "./lockstep test " in outcome.output
    assert max(map(len, outcome.output.splitlines())) <= 80


def test_a_script_has_help_of_its_own(checkout: Checkout) -> None:
    assert checkout.run("run", "train.py", "--help").seen["arguments"] == ["run", "train.py", "--help"]


def test_runs_through_symlinks_from_anywhere(checkout: Checkout) -> None:
    elsewhere = checkout.machine / "else where"
    elsewhere.mkdir()
    (elsewhere / "absolute").symlink_to(checkout.launcher)
    (elsewhere / "relative").symlink_to("absolute")
    (checkout.machine / "from above").symlink_to("else where/relative")
    path = f"{checkout.machine}/bin:/usr/bin:/bin"
    for command in ([str(elsewhere / "absolute")], ["./relative"], ["sh", "relative"], ["../from above"]):
        assert finish(checkout.start(*command, cwd=elsewhere, PATH=path)).seen["prefix"] == str(checkout.venv)
    assert checkout.started().count("bootstrap") == 1


def on_a_terminal(checkout: Checkout, columns: int, **settings: str) -> tuple[int, str]:
    """The exit status, and what a terminal of this width received."""
    ours, theirs = pty.openpty()
    command = f'exec 2>{os.ttyname(theirs)}; stty cols {columns} <&2; exec "$0"'
    process = checkout.start("/bin/sh", "-c", command, checkout.launcher, TERM="xterm", **settings)
    seen = os.read(ours, 65536)
    os.close(theirs)  # The shell has it by now.
    with contextlib.suppress(OSError):  # Linux reports the end of a terminal as an error.
        while chunk := os.read(ours, 65536):
            seen += chunk
    os.close(ours)
    return finish(process).code, seen.decode()


def test_a_terminal_sees_a_bar_that_moves(checkout: Checkout) -> None:
    code, seen = on_a_terminal(checkout, 80, TORCH="uv")
    assert code == 0
    shares = [int(part.split("%")[0].split()[-1]) for part in seen.split("\r\x1b[K") if "%" in part]
    assert shares == sorted(shares) and shares[0] == 0 and len(set(shares)) > 4


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"LOCKSTEP_PYTHON": "/no/such"}, "correct it, or unset it to let ./lockstep make its own environment."),
        ({"TROUBLE": "pip:say Network is unreachable"}, "(or PIP_INDEX_URL, HTTPS_PROXY), then run this again;"),
    ],
    ids=["launcher", "bootstrap"],
)
def test_on_a_terminal_lines_are_wrapped_at_words(checkout: Checkout, settings: dict[str, str], words: str) -> None:
    code, seen = on_a_terminal(checkout, 34, **settings)
    lines = [line.rpartition("\x1b[K")[2] for line in seen.split("\r\n")]
    assert code == 3 and max(map(len, lines)) <= 34, lines
    assert words in " ".join(line.strip() for line in lines)


# ---------------------------------------------------------------- it repairs itself


KILLED = [(signal.SIGKILL, step) for step in ("pip", "torch", "rest")]
STOPPED = [(number, "rest") for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]


@pytest.mark.parametrize(("number", "step"), KILLED + STOPPED)
def test_interrupted_while_writing_is_made_again(checkout: Checkout, number: signal.Signals, step: str) -> None:
    process = checkout.run_into_hang(step=step)
    process.send_signal(number)
    if number == signal.SIGKILL:
        (checkout.machine / "release").touch()
    outcome = finish(process)  # pip hangs for good unless it was ended: it holds the pipes that this reads.
    if number == signal.SIGKILL:
        assert outcome.code == -number
    else:
        assert outcome.code == 128 + number and "Traceback" not in outcome.errors
        assert outcome.errors.splitlines()[-1].startswith("lockstep: interrupted")
    assert (checkout.packages / "half-written").exists()
    checkout.journal()
    again = checkout.run()
    assert again.seen["prefix"] == str(checkout.venv) and "did not finish" in again.errors
    assert not (checkout.packages / "half-written").exists()
    assert "venv" in checkout.started()


def test_what_is_finished_is_kept_when_the_network_fails(checkout: Checkout) -> None:
    assert checkout.run(TROUBLE="rest:say Network is unreachable").is_trouble("check the network", "is kept")
    checkout.journal()
    assert checkout.run().code == 0
    assert [entry[-1][:5] for entry in checkout.journal()[:-1]] == ["boots", "pip=="]  # neither venv nor torch


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("requirements.lock", "rich==", "rich==9"),
        pytest.param("pyproject.toml", "torch==2.13.0", "torch==2.13.1", marks=pytest.mark.slow),
    ],
)
def test_an_update(checkout: Checkout, file: str, old: str, new: str) -> None:
    checkout.run()
    before = (checkout.root / file).read_text()
    checkout.replace(file, old, new)
    torch = "torch==2.13.0+cpu torch==2.13.1+cpu"
    assert checkout.run(TROUBLE="rest:say ERROR: no", TORCH=torch).code == 3
    (checkout.root / file).write_text(before)
    checkout.journal()
    assert checkout.run(TORCH=torch).code == 0  # An update cut short doesn't count, though the files are as before.
    assert "bootstrap" in checkout.started()
    checkout.replace(file, old, new)
    outcome = checkout.run(TORCH=torch)
    assert "Updating" in outcome.errors and "venv" not in checkout.started()
    installed = checkout.packages / f"{old.partition('=')[0]}.dist-info" / "requirement"
    assert installed.read_text().startswith(new)
    checkout.run(TORCH=torch)
    assert checkout.started() == []


@pytest.mark.parametrize("trouble", ["", "rest:say ERROR: no"], ids=["finished", "unfinished"])
def test_moved_or_without_its_python_it_is_made_again(checkout: Checkout, trouble: str) -> None:
    checkout.run(TROUBLE=trouble)
    checkout.journal()
    moved = Checkout(checkout.root.rename(checkout.root.with_name("moved")), checkout.machine)
    outcome = moved.run()
    assert outcome.seen["prefix"] == str(moved.venv) and str(checkout.root) not in outcome.output
    assert "venv" in checkout.started() and "it was made for another folder" in outcome.errors
    for link in (moved.venv / "bin").glob("python*"):
        link.unlink()
        link.symlink_to(checkout.machine / "removed by an upgrade")
    outcome = moved.run()
    assert outcome.seen["prefix"] == str(moved.venv) and "its Python cannot be used" in outcome.errors
    assert "venv" in checkout.started()


def test_an_environment_made_by_hand_is_adopted(checkout: Checkout) -> None:
    assert finish(checkout.start(checkout.machine / "base", checkout.venv)).code == 0
    (checkout.packages / "of_my_own.py").touch()
    checkout.journal()
    assert checkout.run().seen["prefix"] == str(checkout.venv)
    assert "venv" not in checkout.started() and (checkout.packages / "of_my_own.py").exists()


@pytest.mark.parametrize("first_is_killed", [False, True])
def test_a_second_use_waits_for_the_first_and_its_pip(checkout: Checkout, first_is_killed: bool) -> None:
    first = checkout.run_into_hang("first", step="torch")
    if first_is_killed:
        first.kill()
        first.wait(timeout=SECONDS)
    second = checkout.start(checkout.launcher, "second")
    assert second.stderr is not None and "waiting" in second.stderr.readline()
    (checkout.machine / "release").touch()
    finish(first)
    assert finish(second).seen["arguments"] == ["second"]
    assert checkout.started().count("venv") == 1 + first_is_killed


# ---------------------------------------------------------------- one clear line each


def test_which_python_makes_the_environment(checkout: Checkout) -> None:
    (checkout.machine / "bin" / "python3").unlink()
    assert checkout.run().is_trouble("no Python was found", "install Python 3.10")
    checkout.command("python3", 'case "$*" in *-V*) echo "Python 3.8.18" ;; *) exit 4 ;; esac')
    assert checkout.run().is_trouble("Python 3.8.18 is too old", "3.10")
    checkout.command("python3.13", 'case "$*" in *%d-venv*) echo python3.13-venv ;; *) exit 1 ;; esac')
    assert checkout.run().is_trouble("python3.13 cannot make environments", "sudo apt install python3.13-venv")
    assert not checkout.venv.exists()
    checkout.command("python3.14", "exit 127")  # as pyenv leaves for versions that are not switched on
    checkout.command("python3.12", f'exec "{PYTHON}" "$@"')
    assert checkout.run().code == 0


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("WARNING: Retrying: broken by 'NewConnectionError(...)'", "doesn't answer: check the network"),
        ("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed", "PIP_CERT"),
        ("ERROR: Could not install packages: [Errno 28] No space left on device", "disk is full: free 2 GB"),
        ("OSError: [Errno 30] Read-only file system: 'x'", "cannot write"),
        ("ERROR: No matching distribution found for rich==15", "no build of rich==15 for Python 3."),
        ("ERROR: something never seen before\nafterthought", "(ERROR: something never seen before): see "),
    ],
)
def test_what_pip_says_becomes_one_line(said: str, words: str) -> None:
    explain = runpy.run_path(str(ROOT / "src" / "lockstep" / "bootstrap.py"))["explain"]
    line = str(explain(f"$ pip install\n{said}\n"))
    assert words in line and "\n" not in line


@pytest.mark.parametrize(
    ("mounting", "words"),
    [
        ("mkdir .venv && mount -t tmpfs -o size=2m tmpfs .venv", "disk is full"),
        ('mount --bind . . && mount -o remount,bind,ro . && cd "$PWD"', "cannot write to"),
    ],
)
def test_a_disk_that_is_really_full_or_read_only(checkout: Checkout, mounting: str, words: str) -> None:
    if os.geteuid() != 0 or (unshare := shutil.which("unshare")) is None:
        pytest.skip("not run: mounting needs root and unshare")
    command = (unshare, "--mount", "sh", "-c", f"{mounting} || exit 99; exec ./lockstep")
    path = f"{checkout.machine}/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    outcome = finish(checkout.start(*command, cwd=checkout.root, PATH=path, TROUBLE="rest:fill"))
    if outcome.code in (1, 99) and "lockstep:" not in outcome.errors:
        pytest.skip(f"not run: this root may not mount: {outcome.errors.strip()}")
    assert outcome.is_trouble(words)


# ---------------------------------------------------------------- the user's choices


def test_lockstep_python_is_used_as_it_is(checkout: Checkout) -> None:
    assert checkout.run(LOCKSTEP_PYTHON="/no/such").is_trouble("/no/such", "unset it")
    checkout.command("my python", f'exec "{PYTHON}" "$@"')
    for name in ("my python", str(checkout.machine / "bin" / "my python")):
        seen = checkout.run("check", "a b", LOCKSTEP_PYTHON=name, PYTHONPATH="/of/mine").seen
        assert seen["arguments"] == ["check", "a b"]
        assert seen["path"].index(str(checkout.root / "src")) < seen["path"].index("/of/mine")
    assert not checkout.venv.exists() and checkout.started() == []


def test_run_uses_the_active_environment_of_another_project(checkout: Checkout, tmp_path: Path) -> None:
    theirs = tmp_path / "project"
    (theirs / "bin").mkdir(parents=True)
    python = theirs / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        seen = checkout.run("run", "a b", **{variable: str(theirs)}).seen
        assert seen["arguments"] == ["run", "a b"] and str(checkout.root / "src") in seen["path"]
    assert not checkout.venv.exists() and checkout.started() == []
    python.write_text("#!/bin/sh\necho msgspec and typer\n")  # what the probe finds lacking
    ended = checkout.run("run", "x", VIRTUAL_ENV=str(theirs))
    assert (
        f"lacks msgspec and typer, so this runs with the packages of Lockstep's own. To use yours: {python} -m pip"
        in ended.errors
    )
    assert checkout.venv.exists()


CPU, PLAIN, CUDA = "torch==2.13.0+cpu", "torch==2.13.0", "torch==2.13.0,!=2.13.0+cpu"
NO_GPU, FETCHING = "no NVIDIA GPU: CPU build of torch 2.13.0", "CUDA build of torch 2.13.0, 3 to 4 GB"
WHEEL = "/of mine/torch-2.9.1.whl"


@pytest.mark.parametrize(
    ("choice", "gpu", "indexes", "asked_for", "said"),
    [
        ("", False, CPU, [f"pip {CPU}"], NO_GPU),
        ("", False, f"{PLAIN} uv", [f"pip {CPU}", f"uv {PLAIN}"], NO_GPU),
        ("", False, PLAIN, [f"pip {CPU}", f"uv {PLAIN}", f"pip {PLAIN}"], "none found: taking the CUDA build, 3 to"),
        ("", True, f"{CPU} {CUDA}", [f"pip {CUDA}"], FETCHING),
        ("cuda", False, f"{CPU} {CUDA}", [f"pip {CUDA}"], FETCHING),
        ("cpu", True, f"{CPU} {CUDA}", [f"pip {CPU}"], "LOCKSTEP_TORCH=cpu"),
        ("2.11", False, "torch==2.11+cpu", ["pip torch==2.11+cpu"], "CPU build of torch 2.11"),
        ("2.11", False, "torch==2.11", ["pip torch==2.11+cpu", "uv torch==2.11", "pip torch==2.11"], "3 to 4 GB"),
        (WHEEL, False, "", [f"pip {WHEEL}"], WHEEL),
    ],
)
def test_which_torch(checkout: Checkout, choice: str, gpu: bool, indexes: str, asked_for: list[str], said: str) -> None:
    if gpu:
        checkout.command("nvidia-smi", "echo 'GPU 0: NVIDIA H200'")
    outcome = checkout.run(LOCKSTEP_TORCH=choice, TORCH=indexes)
    assert outcome.code == 0 and said in outcome.errors
    journal = checkout.journal()
    assert torches(journal) == asked_for
    for uv in (entry for entry in journal if entry[0] == "uv"):
        assert uv[-6:-1] == ["--python", str(checkout.venv / "bin" / "python"), "--torch-backend", "cpu", "--no-deps"]
    checkout.run(LOCKSTEP_TORCH=choice)
    checkout.run()  # The choice holds when it isn't repeated,
    assert checkout.started() == []
    checkout.replace("pyproject.toml", "[project]", "\n[project]")
    checkout.run()  # also through an update;
    assert torches(checkout.journal()) == []
    outcome = checkout.run(LOCKSTEP_TORCH="2.8", TORCH="torch==2.8+cpu")  # another one is another environment.
    assert "LOCKSTEP_TORCH names another torch" in outcome.errors
    assert checkout.started()[:2] == ["bootstrap", "venv"]


def test_torch_that_cannot_be_had(checkout: Checkout) -> None:
    assert checkout.run(LOCKSTEP_TORCH="cpu", TORCH=PLAIN).is_trouble("no index gave a CPU build")
    assert checkout.run(LOCKSTEP_TORCH="9.9", TORCH="").is_trouble("no build of torch==9.9", "LOCKSTEP_TORCH")
    assert checkout.run(TROUBLE="torch:say ERROR: No space left on device", TORCH=PLAIN).is_trouble("disk is full")
    assert torches(checkout.journal())[-1] == f"pip {CPU}"  # A full disk is no reason to try the bigger build.


def test_only_builds_for_linux_carry_cuda(checkout: Checkout) -> None:
    checkout.run(PLATFORM="darwin", TORCH=PLAIN)
    assert torches(checkout.journal()) == [f"pip {PLAIN}"]
