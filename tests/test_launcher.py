"""The launcher and the environment it makes, on copies of the checkout, from the first use to the worst day.

Everything here is the real launcher and the real bootstrap.py. Only two things are not: `python -m venv` leaves
out the real pip (which would take seconds) and puts a small one in its place, which writes what pip writes, keeps
a journal and fails on request; and whether a driver answers is told by the test.
"""

import contextlib
import importlib.util
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
PYTHON = str(Path(getattr(sys, "_base_executable", sys.executable)).resolve())
SECONDS = 60.0  # A deadline for what takes a fraction of one second; no test measures time.

pytestmark = pytest.mark.skipif(os.name != "posix", reason="not run: ./lockstep is a POSIX shell script")

# Stands in for bootstrap.py in the copy: the same program, with two functions replaced.
BOOTSTRAP = """
import importlib.util, os, sys
from pathlib import Path
here = Path(__file__).resolve().parent
with open(os.environ["FAKE_JOURNAL"], "a") as journal:
    journal.write('["bootstrap"]\\n')
spec = importlib.util.spec_from_file_location("real_bootstrap", here / "real_bootstrap.py")
real = sys.modules["real_bootstrap"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(real)
real.base_python = lambda: os.environ["FAKE_BASE"]
real.driver_answers = lambda: os.environ.get("FAKE_DRIVER") == "yes"
real.GIGABYTE = 1  # Whatever is free on the disk of the tests is enough.
if __name__ == "__main__":
    real.main(sys.argv[1:])
"""

# `fake -I -m venv TARGET`
BASE = """#!{python} -I
import json, os, shutil, sys, venv
from pathlib import Path
target = Path(sys.argv[-1])
with open(os.environ["FAKE_JOURNAL"], "a") as journal:
    journal.write('["venv"]\\n')
venv.create(target, with_pip=False, symlinks=True)
packages = next(target.glob("lib/python*/site-packages"))
shutil.copytree(Path(__file__).parent / "pip", packages / "pip", dirs_exist_ok=True)
"""

# pip, and under the name uv also uv. FAKE_TROUBLE is STEP:WHAT, STEP being pip, torch, rest, uv or "no uv".
PIP = """
import json, os, sys, time
from pathlib import Path

packages = Path(__file__).resolve().parents[1]
tool = Path(__file__).resolve().parent.name
arguments = sys.argv[1:]
with open(os.environ["FAKE_JOURNAL"], "a") as journal:
    journal.write(json.dumps([tool, *arguments]) + "\\n")

def installed(name):
    return (packages / f"{name}.dist-info").is_dir()

if "--dry-run" in arguments:
    metadata = json.loads(os.environ["FAKE_OFFER"])
    report = {"install": [] if installed("torch") else [{"metadata": metadata}]}
    Path(arguments[arguments.index("--report") + 1]).write_text(json.dumps(report))
    sys.exit(0)

if "--requirement" in arguments:
    step = "rest"
    wanted = Path(arguments[arguments.index("--requirement") + 1]).read_text().splitlines()
else:
    wanted = arguments[-1:]
    step = "uv" if tool == "uv" else "no uv" if wanted[0].startswith("uv") else wanted[0].partition("=")[0]
where, _, what = os.environ.get("FAKE_TROUBLE", "").partition(":")
trouble = what if where == step else ""

def wait_for_release():
    Path(os.environ["FAKE_REACHED"]).touch()
    while not Path(os.environ["FAKE_RELEASE"]).exists():
        time.sleep(0.01)

for line in wanted:
    print("Collecting", line, flush=True)
if trouble == "hang-fetching":
    wait_for_release()
if trouble.startswith("say "):
    print(trouble[4:], flush=True)
    sys.exit(1)
print("Resolved" if tool == "uv" else "Installing collected packages:", ", ".join(wanted), flush=True)
if trouble == "hang-writing":
    (packages / "half-written").touch()
    wait_for_release()
if trouble == "fill-disk":
    (packages / "huge").write_bytes(bytes(8_000_000))
for line in wanted:
    name = line.partition("=")[0]
    (packages / f"{name}.dist-info").mkdir(exist_ok=True)
    (packages / f"{name}.dist-info" / "requirement").write_text(line)
    if name == "uv":
        (packages / "uv").mkdir(exist_ok=True)
        (packages / "uv" / "__main__.py").write_text(Path(__file__).read_text())
"""

CLI = """
import json, sys
print(json.dumps({"arguments": sys.argv[1:], "prefix": sys.prefix, "file": __file__, "path": sys.path}))
sys.exit(7 if "fail" in sys.argv else 0)
"""

CPU_OFFER = json.dumps({"version": "2.13.0+cpu", "requires_dist": ["sympy"]})
CUDA_OFFER = json.dumps({"version": "2.13.0", "requires_dist": ["sympy", "nvidia-nccl-cu13==2.29.7"]})


@dataclass
class Checkout:
    """A copy of the checkout, and a machine with little on it to run it on."""

    root: Path
    machine: Path

    @property
    def venv(self) -> Path:
        return self.root / ".venv"

    @property
    def packages(self) -> Path:
        return next(self.venv.glob("lib/python*/site-packages"))

    @property
    def reached(self) -> Path:
        return self.machine / "reached"

    @property
    def release(self) -> Path:
        return self.machine / "release"

    def environment(self, **settings: str) -> dict[str, str]:
        return {
            "PATH": str(self.machine / "bin"),
            "FAKE_JOURNAL": str(self.machine / "journal"),
            "FAKE_BASE": str(self.machine / "base"),
            "FAKE_OFFER": CPU_OFFER,
            "FAKE_REACHED": str(self.reached),
            "FAKE_RELEASE": str(self.release),
            **settings,
        }

    def start(self, *arguments: str, cwd: Path | None = None, **settings: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [self.root / "lockstep", *arguments],
            cwd=cwd or self.machine,
            env=self.environment(**settings),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str, cwd: Path | None = None, **settings: str) -> "Outcome":
        return finish(self.start(*arguments, cwd=cwd, **settings))

    def journal(self) -> list[list[str]]:
        """What was started since the last call: bootstrap, venv, pip, uv."""
        path = self.machine / "journal"
        entries = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        path.unlink(missing_ok=True)
        return entries

    def python(self, name: str, script: str) -> None:
        """Put a command on the machine's PATH."""
        command = self.machine / "bin" / name
        command.write_text(f"#!/bin/sh\n{script}\n")
        command.chmod(0o755)


@dataclass(frozen=True)
class Outcome:
    code: int
    output: str
    errors: str

    @property
    def seen(self) -> dict[str, object]:
        """What the command line saw of the hand-over."""
        assert self.code in (0, 7), self.errors
        found: dict[str, object] = json.loads(self.output)
        return found

    def is_trouble(self, *words: str) -> bool:
        """One line that starts with our name and holds these words, no traceback, and the exit code for it."""
        lines = [line for line in self.errors.splitlines() if line.startswith("lockstep:")]
        assert self.code == 3, self
        assert len(lines) == 1, self.errors
        assert self.errors.splitlines()[-1] == lines[0], self.errors
        assert "Traceback" not in self.errors
        assert self.output == ""
        for word in words:
            assert word in lines[0]
        return True


def finish(process: "subprocess.Popen[str]") -> Outcome:
    output, errors = process.communicate(timeout=SECONDS)
    return Outcome(process.returncode, output, errors)


def tools(journal: list[list[str]]) -> list[str]:
    return [entry[0] for entry in journal]


def wait_until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not happened():
        assert time.monotonic() < deadline, "what the test waits for never happened"
        time.sleep(0.01)


@pytest.fixture
def checkout(tmp_path: Path) -> Iterator[Checkout]:
    machine, root = tmp_path / "machine", tmp_path / "a checkout"
    (machine / "bin").mkdir(parents=True)
    (machine / "pip").mkdir()
    (machine / "pip" / "__init__.py").touch()
    (machine / "pip" / "__main__.py").write_text(PIP)
    (machine / "base").write_text(BASE.format(python=PYTHON))
    (machine / "base").chmod(0o755)
    for tool in ("cmp", "readlink"):
        found = shutil.which(tool)
        assert found is not None, f"the launcher needs {tool}"
        (machine / "bin" / tool).symlink_to(found)

    package = root / "src" / "lockstep"
    package.mkdir(parents=True)
    shutil.copy(ROOT / "lockstep", root)
    shutil.copy(ROOT / "pyproject.toml", root)
    shutil.copy(ROOT / "src" / "lockstep" / "bootstrap.py", package / "real_bootstrap.py")
    (package / "bootstrap.py").write_text(BOOTSTRAP)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(CLI)

    made = Checkout(root, machine)
    made.python("python3", f'exec "{PYTHON}" "$@"')
    yield made
    made.release.touch()  # Lets go of any pip that a test left hanging.


@pytest.fixture(scope="module")
def bootstrap() -> ModuleType:
    path = ROOT / "src" / "lockstep" / "bootstrap.py"
    spec = importlib.util.spec_from_file_location("bootstrap_under_test", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


# ---------------------------------------------------------------- the good days


def test_first_use_makes_the_environment_and_hands_over(checkout: Checkout) -> None:
    outcome = checkout.run("lab", "--no-browser", "--port", "9 9", "")
    assert outcome.seen["arguments"] == ["lab", "--no-browser", "--port", "9 9", ""]
    assert outcome.seen["prefix"] == str(checkout.venv)
    assert outcome.seen["file"] == str(checkout.root / "src" / "lockstep" / "__main__.py")
    journal = checkout.journal()
    assert tools(journal) == ["bootstrap", "venv", "pip", "pip", "pip", "pip"]
    assert [entry[-1] for entry in journal[2:5]] == ["pip==26.3", "torch==2.13.0", "torch==2.13.0"]
    assert "Making the environment" in outcome.errors
    assert "no NVIDIA driver: CPU build of torch 2.13.0" in outcome.errors
    assert "\r" not in outcome.errors and "\x1b" not in outcome.errors
    assert (checkout.packages / "jupyterlab.dist-info").is_dir()


def test_exit_code_of_the_command_line_is_the_launchers(checkout: Checkout) -> None:
    assert checkout.run("fail").code == 7
    assert checkout.run("fail").code == 7


def test_second_use_starts_nothing_but_the_command_line(checkout: Checkout) -> None:
    checkout.run()
    checkout.journal()
    (checkout.machine / "bin" / "python3").unlink()
    outcome = checkout.run("status", "a b")
    assert outcome.seen["arguments"] == ["status", "a b"]
    assert outcome.seen["prefix"] == str(checkout.venv)
    assert outcome.errors == ""
    assert checkout.journal() == []


def test_runs_through_symlinks_from_anywhere(checkout: Checkout) -> None:
    checkout.run()
    elsewhere = checkout.machine / "else where"
    elsewhere.mkdir()
    (elsewhere / "absolute").symlink_to(checkout.root / "lockstep")
    (elsewhere / "relative").symlink_to("absolute")
    (checkout.machine / "from above").symlink_to("else where/relative")
    for command in ([str(elsewhere / "absolute")], ["./relative"], ["sh", "relative"], ["../from above"]):
        answer = subprocess.run(
            command,
            cwd=elsewhere,
            env={**checkout.environment(), "PATH": f"{checkout.machine}/bin:/usr/bin:/bin"},
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        assert json.loads(answer.stdout)["prefix"] == str(checkout.venv), answer.stderr
    assert tools(checkout.journal()).count("bootstrap") == 1


def test_a_terminal_sees_a_bar_that_moves(checkout: Checkout) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [checkout.root / "lockstep"],
        env=checkout.environment(TERM="xterm"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=theirs,
    )
    os.close(theirs)
    seen = b""
    with contextlib.suppress(OSError):  # Linux reports the end of a terminal as an error.
        while chunk := os.read(ours, 65536):
            seen += chunk
    assert process.wait(timeout=SECONDS) == 0
    os.close(ours)
    shares = [int(part.split(b"%")[0].split()[-1]) for part in seen.split(b"\r\x1b[K") if b"%" in part]
    assert shares == sorted(shares)
    assert shares[0] == 0 and shares[-1] == 100 and len(set(shares)) > 4


# ---------------------------------------------------------------- it mends itself


@pytest.mark.parametrize("step", ["pip", "torch", "rest"])
def test_killed_while_writing_is_made_anew(checkout: Checkout, step: str) -> None:
    process = checkout.start(FAKE_TROUBLE=f"{step}:hang-writing")
    wait_until(checkout.reached.exists)
    process.kill()
    checkout.release.touch()
    finish(process)
    assert (checkout.packages / "half-written").exists()
    checkout.journal()
    outcome = checkout.run("lab")
    assert outcome.seen["arguments"] == ["lab"]
    assert "anew" in outcome.errors
    assert not (checkout.packages / "half-written").exists()
    assert "venv" in tools(checkout.journal())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_pip_too_and_the_next_use_mends(checkout: Checkout, number: signal.Signals) -> None:
    process = checkout.start(FAKE_TROUBLE="rest:hang-writing")
    wait_until(checkout.reached.exists)
    process.send_signal(number)
    outcome = finish(process)  # pip hangs for good unless it was ended: it holds the pipes that this reads.
    assert outcome.code == 128 + number
    assert "interrupted" in outcome.errors.splitlines()[-1]
    assert "Traceback" not in outcome.errors
    assert checkout.run().seen["prefix"] == str(checkout.venv)
    assert not (checkout.packages / "half-written").exists()


def test_interrupted_while_fetching_keeps_what_is_finished(checkout: Checkout) -> None:
    process = checkout.start(FAKE_TROUBLE="rest:hang-fetching")
    wait_until(checkout.reached.exists)
    process.send_signal(signal.SIGINT)
    finish(process)
    checkout.journal()
    assert checkout.run().code == 0
    journal = checkout.journal()
    assert "venv" not in tools(journal)
    assert [entry for entry in journal if entry[-1].startswith("torch") and "--dry-run" not in entry] == []


def test_changed_pins_are_brought_up_to_date_in_place(checkout: Checkout) -> None:
    checkout.run()
    checkout.journal()
    pyproject = checkout.root / "pyproject.toml"
    pyproject.write_text(pyproject.read_text().replace('"rich==15.0.0"', '"rich==15.0.1"'))
    outcome = checkout.run()
    assert "up to date" in outcome.errors
    assert "venv" not in tools(checkout.journal())
    assert (checkout.packages / "rich.dist-info" / "requirement").read_text() == "rich==15.0.1"
    checkout.run()
    assert checkout.journal() == []


def test_an_update_cut_short_does_not_count_when_the_pins_return(checkout: Checkout) -> None:
    checkout.run()
    pyproject = checkout.root / "pyproject.toml"
    before = pyproject.read_text()
    pyproject.write_text(before.replace('"rich==15.0.0"', '"rich==15.0.1"'))
    assert checkout.run(FAKE_TROUBLE="torch:say x").code == 0  # torch is there: nothing to do, nothing to fail
    pyproject.write_text(before.replace('"rich==15.0.0"', '"rich==15.0.2"'))
    assert checkout.run(FAKE_TROUBLE="rest:say ERROR: no").code == 3
    pyproject.write_text(before.replace('"rich==15.0.0"', '"rich==15.0.1"'))
    checkout.journal()
    assert checkout.run().code == 0
    assert "bootstrap" in tools(checkout.journal())


def test_a_moved_checkout_is_made_anew(checkout: Checkout) -> None:
    checkout.run()
    checkout.journal()
    moved = Checkout(checkout.root.rename(checkout.root.with_name("moved")), checkout.machine)
    outcome = moved.run()
    assert outcome.seen["prefix"] == str(moved.venv)
    assert outcome.seen["file"] == str(moved.root / "src" / "lockstep" / "__main__.py")
    assert str(checkout.root) not in json.dumps(outcome.seen["path"])
    assert "venv" in tools(checkout.journal())
    moved.run()
    assert checkout.journal() == []


def test_moved_while_unfinished_is_made_anew(checkout: Checkout) -> None:
    checkout.run(FAKE_TROUBLE="rest:say ERROR: no")
    checkout.journal()
    moved = Checkout(checkout.root.rename(checkout.root.with_name("moved")), checkout.machine)
    assert moved.run().seen["prefix"] == str(moved.venv)
    assert "venv" in tools(checkout.journal())


def test_an_environment_without_its_python_is_made_anew(checkout: Checkout) -> None:
    checkout.run()
    for link in (checkout.venv / "bin").glob("python*"):
        link.unlink()
        link.symlink_to(checkout.machine / "removed by an upgrade")
    checkout.journal()
    assert checkout.run().seen["prefix"] == str(checkout.venv)
    assert "venv" in tools(checkout.journal())


def test_an_environment_made_by_hand_is_adopted(checkout: Checkout) -> None:
    subprocess.run(
        [checkout.machine / "base", "-m", "venv", checkout.venv],
        env=checkout.environment(),
        check=True,
        timeout=SECONDS,
    )
    (checkout.packages / "of_my_own.py").touch()
    checkout.journal()
    assert checkout.run().seen["prefix"] == str(checkout.venv)
    assert "venv" not in tools(checkout.journal())
    assert (checkout.packages / "of_my_own.py").exists()
    checkout.run()
    assert checkout.journal() == []


# ---------------------------------------------------------------- two at once


def test_two_first_uses_at_once_make_one_environment(checkout: Checkout) -> None:
    first = checkout.start("first", FAKE_TROUBLE="torch:hang-writing")
    wait_until(checkout.reached.exists)
    second = checkout.start("second")
    assert second.stderr is not None
    assert "waiting" in second.stderr.readline()
    checkout.release.touch()
    assert finish(first).seen["arguments"] == ["first"]
    assert finish(second).seen["arguments"] == ["second"]
    assert tools(checkout.journal()).count("venv") == 1


def test_the_next_use_waits_for_a_pip_that_outlived_its_launcher(checkout: Checkout) -> None:
    first = checkout.start(FAKE_TROUBLE="torch:hang-writing")
    wait_until(checkout.reached.exists)
    first.kill()
    first.wait(timeout=SECONDS)
    second = checkout.start("second")
    assert second.stderr is not None
    assert "waiting" in second.stderr.readline()
    checkout.release.touch()
    finish(first)
    assert finish(second).seen["arguments"] == ["second"]
    assert not (checkout.packages / "half-written").exists()


# ---------------------------------------------------------------- one clear line each


def old_python(version: str) -> str:
    """A Python that fails the launcher's question as an old one does."""
    return f'case "$*" in *-V*) echo "Python {version}" ;; *) exit 4 ;; esac'


def test_only_an_old_python(checkout: Checkout) -> None:
    checkout.python("python3", old_python("3.8.18"))
    assert checkout.run().is_trouble("Python 3.8.18 is too old", "3.10")
    assert not checkout.venv.exists()


def test_a_newer_python_beside_an_old_one_is_found(checkout: Checkout) -> None:
    checkout.python("python3", old_python("3.8.18"))
    checkout.python("python3.14", "exit 127")  # as pyenv leaves for versions that are not switched on
    checkout.python("python3.12", f'exec "{PYTHON}" "$@"')
    assert checkout.run().code == 0


def test_no_python_at_all(checkout: Checkout) -> None:
    (checkout.machine / "bin" / "python3").unlink()
    assert checkout.run().is_trouble("no Python was found", "install Python 3.10")


def test_an_old_python_that_runs_bootstrap_itself() -> None:
    """Its first statements decide, and are all that an old Python comes to run."""
    source = (ROOT / "src" / "lockstep" / "bootstrap.py").read_text(encoding="utf-8")
    program = (
        "import sys; source = sys.stdin.read(); sys.version_info = (3, 8, 18); sys.version = '3.8.18 (old)'\n"
        "exec(compile(source, 'bootstrap.py', 'exec'), {'__name__': '__main__'})"
    )
    answer = subprocess.run(
        [PYTHON, "-I", "-c", program], input=source, capture_output=True, text=True, timeout=SECONDS
    )
    assert answer.returncode == 3
    assert "Python 3.8.18 is too old" in answer.stderr
    assert "Traceback" not in answer.stderr


def test_python_without_ensurepip(checkout: Checkout) -> None:
    """Debian's python3 without python3-venv."""
    hide = (
        "import runpy, sys; sys.modules['ensurepip'] = None; sys.argv[:] = sys.argv[1:];"
        " runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    checkout.python("python3", f'[ "$2" = -c ] && exit 1\nshift\nexec "{PYTHON}" -I -c "{hide}" "$@"')
    assert checkout.run().is_trouble("sudo apt install python3.", "-venv")
    checkout.python("python3.10", f'exec "{PYTHON}" "$@"')
    assert checkout.run().code == 0  # A Python that can is preferred.


OFFLINE = "WARNING: Retrying after connection broken by 'NewConnectionError(...): Temporary failure in name resolution'"


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (OFFLINE, ["does not answer", "check the network"]),
        ("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed", ["certificate", "PIP_CERT"]),
        ("ERROR: Could not install packages: [Errno 28] No space left on device", ["disk is full", "free about 2 GB"]),
        ("OSError: [Errno 122] Disk quota exceeded", ["disk is full"]),
        ("OSError: [Errno 30] Read-only file system: 'x'", ["cannot write", "copy"]),
        ("ERROR: No matching distribution found for torch==2.13.0", ["no build of torch==2.13.0", "install Python"]),
        ("ERROR: something never seen before", ["something never seen before", "install.log"]),
    ],
)
def test_what_pip_says_becomes_one_line(checkout: Checkout, said: str, words: list[str]) -> None:
    assert checkout.run(FAKE_TROUBLE=f"torch:say {said}").is_trouble(*words)
    assert checkout.run().code == 0


def test_no_network_from_the_start(checkout: Checkout) -> None:
    assert checkout.run(FAKE_TROUBLE=f"pip:say {OFFLINE}").is_trouble("check the network")


def test_too_little_room_is_said_before_the_download(bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(ROOT)._replace(free=2_000_000_000)
    monkeypatch.setattr(bootstrap.shutil, "disk_usage", lambda path: usage)
    place = bootstrap.Place(ROOT)
    bootstrap.check_space(place, bootstrap.TorchPlan(bootstrap.Source.PIP, "torch", ""))
    bootstrap.check_space(place, bootstrap.TorchPlan(bootstrap.Source.NOTHING, "torch", "", carries_cuda=True))
    with pytest.raises(bootstrap.DiskFull, match=r"takes 7 GB and 2\.0 GB are free"):
        bootstrap.check_space(place, bootstrap.TorchPlan(bootstrap.Source.PIP, "torch", "", carries_cuda=True))


def in_own_mounts(checkout: Checkout, mounting: str) -> Outcome:
    """Run the launcher as root where `mounting` holds, which nobody else sees."""
    program = f"{mounting} || exit 99; exec ./lockstep"
    unshare = shutil.which("unshare")
    if os.geteuid() != 0 or unshare is None:
        pytest.skip("not run: mounting needs root and unshare")
    paths = {"PATH": f"{checkout.machine}/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
    answer = subprocess.run(
        [unshare, "--mount", "sh", "-c", program],
        cwd=checkout.root,
        env=checkout.environment(**paths),
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    if answer.returncode in (1, 99) and "lockstep:" not in answer.stderr:
        pytest.skip(f"not run: this root may not mount: {answer.stderr.strip()}")
    return Outcome(answer.returncode, answer.stdout, answer.stderr)


def test_a_disk_that_is_really_full(checkout: Checkout) -> None:
    checkout.venv.mkdir()
    mounting = "export FAKE_TROUBLE=rest:fill-disk; mount -t tmpfs -o size=2m tmpfs .venv"
    assert in_own_mounts(checkout, mounting).is_trouble("disk is full")


def test_a_folder_that_cannot_be_written(checkout: Checkout) -> None:
    if os.geteuid() == 0:
        outcome = in_own_mounts(checkout, 'mount --bind . . && mount -o remount,bind,ro . && cd "$PWD"')
    else:
        checkout.root.chmod(0o555)
        outcome = checkout.run()
        checkout.root.chmod(0o755)
    assert outcome.is_trouble("cannot write to", "copy")


# ---------------------------------------------------------------- the user's choices


def test_lockstep_python_is_used_as_it_is(checkout: Checkout) -> None:
    checkout.python("my python", f'exec "{PYTHON}" "$@"')
    for name in ("my python", str(checkout.machine / "bin" / "my python")):
        outcome = checkout.run("check", "a b", LOCKSTEP_PYTHON=name, PYTHONPATH="/of/mine")
        assert outcome.seen["arguments"] == ["check", "a b"]
        path = outcome.seen["path"]
        assert isinstance(path, list)
        assert path.index(str(checkout.root / "src")) < path.index("/of/mine")
    assert not checkout.venv.exists()
    assert checkout.journal() == []


def test_lockstep_python_that_is_not_there(checkout: Checkout) -> None:
    assert checkout.run(LOCKSTEP_PYTHON="/no/such").is_trouble("/no/such", "unset it")


def test_lockstep_torch_takes_any_requirement(checkout: Checkout) -> None:
    wheel = str(checkout.machine / "torch-2.9.1-of mine.whl")
    assert checkout.run(LOCKSTEP_TORCH=wheel).code == 0
    journal = checkout.journal()
    assert [entry[-1] for entry in journal].count(wheel) == 1
    assert not any("--dry-run" in entry for entry in journal)
    assert not any("torch==2.13.0" in entry for entry in journal)
    assert not (checkout.packages / "torch.dist-info").exists()  # The pin is not put over it with the rest.

    checkout.run(LOCKSTEP_TORCH=wheel)
    checkout.run()  # It stays, also where the choice is not repeated.
    assert checkout.journal() == []

    pyproject = checkout.root / "pyproject.toml"
    pyproject.write_text(pyproject.read_text() + "\n")
    checkout.run()  # An update keeps the choice,
    assert wheel in [entry[-1] for entry in checkout.journal()]
    checkout.run(LOCKSTEP_TORCH="cpu")  # and another choice is another environment.
    assert "venv" in tools(checkout.journal())


def test_cpu_build_from_pytorchs_index_where_pypi_carries_cuda(checkout: Checkout) -> None:
    outcome = checkout.run(FAKE_OFFER=CUDA_OFFER)
    journal = checkout.journal()
    [uv] = [entry for entry in journal if entry[0] == "uv"]
    assert uv[1:3] == ["pip", "install"]
    assert uv[uv.index("--torch-backend") + 1] == "cpu"
    assert uv[uv.index("--python") + 1] == str(checkout.venv / "bin" / "python")
    assert uv[-1] == "torch==2.13.0"
    assert [entry for entry in journal if entry[-1] == "torch==2.13.0" and "--dry-run" not in entry] == [uv]
    assert "no NVIDIA driver: CPU build" in outcome.errors


@pytest.mark.parametrize("step", ["uv", "no uv"])
def test_pypis_build_where_pytorchs_index_does_not_answer(checkout: Checkout, step: str) -> None:
    outcome = checkout.run(FAKE_OFFER=CUDA_OFFER, FAKE_TROUBLE=f"{step}:say error: Request failed after 3 retries")
    assert outcome.code == 0
    [line] = [line for line in outcome.errors.splitlines() if "3 GB" in line]
    assert "LOCKSTEP_TORCH" in line
    last_torch = [entry for entry in checkout.journal() if entry[-1] == "torch==2.13.0"][-1]
    assert last_torch[0] == "pip"
    assert "--no-deps" not in last_torch


def test_a_full_disk_is_no_reason_to_try_the_bigger_build(checkout: Checkout) -> None:
    outcome = checkout.run(FAKE_OFFER=CUDA_OFFER, FAKE_TROUBLE="uv:say error: No space left on device (os error 28)")
    assert outcome.is_trouble("disk is full")
    assert tools(checkout.journal())[-1] == "uv"


def test_cuda_build_where_a_driver_answers(checkout: Checkout) -> None:
    outcome = checkout.run(FAKE_OFFER=CUDA_OFFER, FAKE_DRIVER="yes")
    assert "CUDA build of torch 2.13.0, about 3 GB" in outcome.errors
    assert "uv" not in tools(checkout.journal())


@pytest.mark.parametrize(
    ("choice", "version", "carries_cuda", "driver", "source", "requirement"),
    [
        ("auto", "2.13.0+cpu", False, False, "PIP", "torch==2.13.0"),
        ("auto", "2.13.0+cpu", False, True, "PIP", "torch==2.13.0"),
        ("auto", "2.13.0", False, False, "PIP", "torch==2.13.0"),
        ("auto", "2.13.0", True, True, "PIP", "torch==2.13.0"),
        ("auto", "2.13.0", True, False, "CPU_INDEX", "torch==2.13.0"),
        ("auto", "2.13.0+cu130", True, False, "PIP", "torch==2.13.0"),
        ("cpu", "2.13.0+cpu", False, True, "PIP", "torch==2.13.0"),
        ("cpu", "2.13.0+cu130", True, True, "CPU_INDEX", "torch==2.13.0"),
        ("cpu", "2.13.0", True, True, "CPU_INDEX", "torch==2.13.0"),
        ("cpu", "2.13.0", False, True, "PIP", "torch==2.13.0"),
        ("cuda", "2.13.0+cpu", False, False, "PIP", "torch===2.13.0"),
        ("cuda", "2.13.0", True, False, "PIP", "torch==2.13.0"),
    ],
)
def test_which_torch(
    bootstrap: ModuleType, choice: str, version: str, carries_cuda: bool, driver: bool, source: str, requirement: str
) -> None:
    plan = bootstrap.plan_torch(choice, "torch==2.13.0", bootstrap.Offer(version, carries_cuda), driver)
    assert (plan.source.name, plan.requirement) == (source, requirement)
    assert ("CUDA" in plan.sentence) == plan.carries_cuda


def test_markers_of_other_platforms_do_not_count(bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    requirement = 'nvidia-nccl-cu13==2.29.7; platform_system == "Linux" and platform_machine == "x86_64"'
    for system, machine, applies in (("Linux", "x86_64", True), ("Linux", "aarch64", False), ("Darwin", "x", False)):
        monkeypatch.setattr(bootstrap.platform, "system", lambda system=system: system)
        monkeypatch.setattr(bootstrap.platform, "machine", lambda machine=machine: machine)
        assert bootstrap.applies_here(requirement) == applies


@pytest.mark.parametrize(("status", "devices", "answers"), [(0, 2, True), (0, 0, False), (100, 1, False)])
def test_a_driver_answers_when_it_has_a_device(
    bootstrap: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, devices: int, answers: bool
) -> None:
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("not run: a stand-in for the driver needs Linux and a C compiler")
    source = tmp_path / "driver.c"
    source.write_text(
        f"int cuInit(unsigned flags) {{ return {status}; }}\n"
        f"int cuDeviceGetCount(int *count) {{ *count = {devices}; return 0; }}\n"
    )
    subprocess.run([compiler, "-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1", source], check=True, timeout=SECONDS)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    assert bootstrap.driver_answers() == answers


def test_a_driver_that_crashes_does_not_answer(bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap.sys, "executable", shutil.which("false"))
    assert not bootstrap.driver_answers()


def test_settings_that_would_misplace_packages_do_not_reach_pip(
    bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_TARGET", "/elsewhere")
    monkeypatch.setenv("PIP_USER", "1")
    monkeypatch.setenv("PIP_INDEX_URL", "https://mirror.invalid/of/mine")
    environment = bootstrap.environment_for_pip()
    assert "PIP_TARGET" not in environment
    assert environment["PIP_USER"] == "0"
    assert environment["PIP_INDEX_URL"] == "https://mirror.invalid/of/mine"
