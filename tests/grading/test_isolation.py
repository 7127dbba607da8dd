"""What a submission finds when it looks around, and what it can reach: nothing of the judge's, in a sandbox.

The code below runs on a rank, as any submission does. Each tier that this machine has is looked at; one that it lacks is
skipped with what it would need.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep import ranks
from lockstep.course import CourseError, find
from lockstep.grading import isolation
from lockstep.grading.grade import grade
from lockstep.grading.request import GradeRequest
from lockstep.ranks import processes

ROOT = Path(__file__).resolve().parents[2]
SECRET = "a-token-of-the-teacher"
TIERS = {tier.name: tier for tier in isolation.TIERS}

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="isolation is Linux's")


def available(name: str) -> isolation.Tier:
    """The tier, or a skip that says what it needs."""
    tier = TIERS[name]
    if not isolation.works(tier):
        lacks = isolation.missing() if name == "sandbox" else ("this tier is root's", "")
        pytest.skip(f"needs {name}: {' – '.join(lacks or ())}")
    return tier


@pytest.fixture(scope="module", autouse=True)
def open_temporary_folder() -> Iterator[None]:
    """Other tests' temporary folders are closed to other users."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", "/tmp")
        patch.setattr(tempfile, "tempdir", None)
        yield


@pytest.fixture(scope="module", params=["sandbox", "user"])
def apart(request: pytest.FixtureRequest, open_temporary_folder: None) -> Iterator[isolation.Tier]:
    """A tier in which the runs of this module are served, with a scratch folder that holds a submission."""
    tier = available(request.param)
    scratch = Path(
        tempfile.mkdtemp(prefix="lockstep-apart-", dir="/tmp")
    )  # pytest's own folders are closed to other users
    (scratch / "submission.py").write_text("x = 1\n")
    os.environ["A_SECRET"] = SECRET
    try:
        with ranks.served_by(tier.server(scratch)):
            os.environ["LOOK_AT"] = str(scratch)
            yield tier
    finally:
        del os.environ["A_SECRET"]
        shutil.rmtree(scratch)


def look(code: str, world_size: int = 1, **more: object) -> ranks.Run:
    """Run this on ranks that know nothing but the tier's environment."""
    given = {"PATH": os.environ["PATH"], "HERE": os.environ["LOOK_AT"], "ROOT": str(ROOT), "OMP_NUM_THREADS": "1"}
    source = "import os\nfrom lockstep.ranks import observe\n" + textwrap.dedent(code)
    return ranks.run(ranks.Source(source), world_size, environment=given, own_directory=True, **more)  # type: ignore[arg-type]


def found(code: str) -> object:
    """What the code observed as `found`."""
    run = look(code)
    assert run.ok, ranks.text.describe(run)
    return run.observed("found")[0]


def test_no_answers(apart: isolation.Tier) -> None:
    """Neither solutions nor checks, history or home can be read in the sandbox."""
    if apart.name != "sandbox":
        pytest.skip("another user reads what the files' modes allow: the Gradescope archive closes them")
    seen = found(
        """
        places = [os.environ["ROOT"] + "/" + name for name in ("solutions", "autograder", ".git", "tests", "README.md")]
        observe("found", [place for place in [*places, os.path.expanduser("~root"), "/home", "/var"] if os.path.exists(place)])
        """
    )
    assert seen in ([], ["/root"]) and not _holds_answers(seen)


def _holds_answers(seen: object) -> bool:
    """A home may be there as an empty folder on the way to Python; nothing but Python is in it."""
    listed = found('observe("found", os.listdir("/root") if os.path.isdir("/root") else [])')
    assert isinstance(listed, list)
    return any(name not in (".pyenv", ".local", ".cache", "miniconda3", ".venv") for name in listed)


def test_reads_its_own(apart: isolation.Tier) -> None:
    """The submission is there, and cannot be written."""
    code = """
        path = os.environ["HERE"] + "/submission.py"
        text = open(path).read()
        try:
            open(path, "a").close()
            text += "written"
        except OSError:
            pass
        observe("found", text)
    """
    assert found(code) == "x = 1\n"


def test_another_user_without_rights(apart: isolation.Tier) -> None:
    """It is not the judge's user, and has no capability to become more."""
    code = """
        status = dict(line.split(":", 1) for line in open("/proc/self/status"))
        observe("found", [os.getuid(), int(status["CapEff"], 16), int(status["CapBnd"], 16), int(status["NoNewPrivs"])])
    """
    user, effective, bounding, sealed = found(code)  # type: ignore[misc]
    assert user == isolation.NOBODY and effective == 0 and bounding == 0 and sealed == 1


def test_no_environment(apart: isolation.Tier) -> None:
    """A secret of the teacher's environment is in no process that it can look at."""
    code = """
        texts = [" ".join(f"{name}={value}" for name, value in os.environ.items())]
        for name in os.listdir("/proc"):
            if name.isdigit():
                try:
                    texts.append(open(f"/proc/{name}/environ", errors="replace").read())
                except OSError:
                    pass
        observe("found", " ".join(texts))
    """
    text = found(code)
    assert isinstance(text, str) and "OMP_NUM_THREADS=1" in text and SECRET not in text


def test_only_its_own_processes(apart: isolation.Tier) -> None:
    """In the sandbox the judge's processes do not exist; elsewhere they cannot be signalled."""
    code = f"""
        import signal
        reached = []
        for name in os.listdir("/proc"):
            if name == "{os.getpid()}":
                try:
                    os.kill(int(name), 0)
                    reached.append(name)
                except OSError:
                    pass
        observe("found", [len([n for n in os.listdir("/proc") if n.isdigit()]), reached])
    """
    count, reached = found(code)  # type: ignore[misc]
    assert reached == []
    if apart.name == "sandbox":
        assert count < 10


def test_only_loopback(apart: isolation.Tier) -> None:
    """The sandbox has one network interface, and it works."""
    if apart.name != "sandbox":
        pytest.skip("this tier has the machine's network, and says so")
    code = """
        import socket
        observe("found", [name for _, name in socket.if_nameindex()])
    """
    assert found(code) == ["lo"]


def test_its_own_name_is_an_address(apart: isolation.Tier) -> None:
    """What the machine calls itself resolves: torch's elastic launcher gives its peers that name, and waits forever."""
    code = """
        import socket
        at = {found[4][0] for found in socket.getaddrinfo(socket.getfqdn(), 0, proto=socket.IPPROTO_TCP)}
        observe("found", sorted(at - {"::1"}))
    """
    at = found(code)
    assert at == ["127.0.0.1"] if apart.name == "sandbox" else at


def test_supervisor_is_closed(apart: isolation.Tier) -> None:
    """A rank can neither read the memory nor open the files of the process that watches it."""
    code = """
        parent, opened = os.getppid(), []
        for name in ("mem", "environ", *(f"fd/{number}" for number in range(64))):
            try:
                open(f"/proc/{parent}/{name}", "rb").close()
                opened.append(name)
            except OSError:
                pass
        observe("found", opened)
    """
    assert found(code) == []


def test_ranks_meet(apart: isolation.Tier) -> None:
    """All ranks of a run share one loopback: DDP's collectives work as anywhere."""
    run = look(
        """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        t = torch.ones(3) * (dist.get_rank() + 1)
        dist.all_reduce(t)
        observe("found", t)
        """,
        world_size=3,
    )
    assert run.ok and [t.tolist() for t in run.observed("found")] == [[6.0] * 3] * 3


def test_too_many_processes(apart: isolation.Tier) -> None:
    """What starts processes without end is stopped, and told so; the next run finds the place as ever."""
    run = look(
        """
        import time
        for _ in range(120):
            if not os.fork():
                time.sleep(300)
        time.sleep(300)
        """,
        process_limit=60,
        deadline=60.0,
    )
    assert run.outcomes == [ranks.Outcome.TOO_MANY_PROCESSES] and run.cause is not None
    assert run.cause.kind == "too many processes" and "too many processes" in run.cause.headline
    assert found('observe("found", 1)') == 1


def test_memory_of_children(apart: isolation.Tier) -> None:
    """Memory that is held by what a rank has started counts as the run's."""
    run = look(
        """
        import time
        if not os.fork():
            held = bytearray(os.urandom(1 << 20) * 300)
            time.sleep(300)
        time.sleep(300)
        """,
        process_limit=60,
        memory_limit=200 << 20,
        deadline=60.0,
    )
    assert run.outcomes == [ranks.Outcome.OUT_OF_MEMORY]


def test_disk_is_bounded(apart: isolation.Tier) -> None:
    """In the sandbox a run writes to memory of limited size, and nothing of it stays."""
    if apart.name != "sandbox":
        pytest.skip("this tier writes to the machine's temporary folder, which is removed after the run")
    code = """
        sizes = {}
        for place in ("/tmp", "/dev/shm", "."):
            status = os.statvfs(place)
            sizes[place] = status.f_blocks * status.f_frsize
        try:
            open("/usr/written", "w")
            sizes["/usr"] = 1
        except OSError:
            pass
        observe("found", sizes)
    """
    assert found(code) == {
        "/tmp": isolation.MEMORY_BYTES,
        "/dev/shm": isolation.MEMORY_BYTES,
        ".": isolation.MEMORY_BYTES,
    }


def test_killed_supervisor_is_our_fault(apart: isolation.Tier) -> None:
    """A submission that ends the process which watches it gets no verdict at all, and the next run is served."""
    with pytest.raises(ranks.RanksError, match="without a word"):
        look("import signal\nos.kill(os.getppid(), signal.SIGKILL)\n")
    assert found('observe("found", 1)') == 1


@pytest.mark.parametrize("name", ["sandbox", "user"])
def test_grading(name: str) -> None:
    """A right submission gets all its points in isolation, and the report says how it was kept apart."""
    available(name)
    course = find(ROOT)
    report = grade(course, GradeRequest(("average_gradients",), course.solutions, isolation=name, seed=3))
    assert report.passed and not report.faults and report.isolation == name


def test_ends_with_the_judge() -> None:
    """When the judge is killed, nothing of the sandbox stays."""
    available("sandbox")
    code = """
        import sys, time
        from pathlib import Path
        from lockstep import ranks
        from lockstep.grading import isolation
        tier = isolation.TIERS[0]
        scratch = Path(sys.argv[1])
        with ranks.served_by(tier.server(scratch)):
            ranks.run(ranks.Source("print('here', flush=True)\\nimport time\\ntime.sleep(300)"), 2, own_directory=True,
                      idle_limit=None, deadline=None, on_output=lambda *_: print("up", flush=True))
    """
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    folder = Path(os.environ.get("TMPDIR", "/tmp")) / f"lockstep-ends-{mark}"
    folder.mkdir()
    try:
        judge = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code), str(folder)], stdout=subprocess.PIPE, text=True
        )
        assert judge.stdout is not None and judge.stdout.readline() == "up\n"
        everybody = processes.descendants(judge.pid)
        assert any(processes.command_line(pid).startswith("bwrap") for pid in everybody) and len(everybody) >= 5
        judge.kill()
        judge.wait()
        give_up = time.monotonic() + 20
        while (left := [pid for pid in everybody if _lives(pid)]) and time.monotonic() < give_up:
            time.sleep(0.05)
        assert left == []
    finally:
        judge.kill()
        judge.stdout and judge.stdout.close()
        folder.rmdir()


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_tier_of_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """LOCKSTEP_ISOLATION caps what is tried, and a wrong name is told."""
    isolation.tier.cache_clear()
    monkeypatch.setenv("LOCKSTEP_ISOLATION", "none")
    assert isolation.tier().name == "none" and not isolation.tier().keeps_apart
    isolation.tier.cache_clear()
    monkeypatch.setenv("LOCKSTEP_ISOLATION", "jail")
    with pytest.raises(CourseError, match="sandbox, user, none"):
        isolation.tier()
    isolation.tier.cache_clear()


def test_dev_of_the_sandbox_cannot_be_written_and_shared_memory_can() -> None:
    """Else it is memory that no limit counts."""
    tier = available("sandbox")
    code = "open('/dev/shm/x', 'w').write('x'); open('/dev/null', 'w').write('x')\ntry: open('/dev/x', 'w')\nexcept OSError as error: print(error.errno)"
    with tempfile.TemporaryDirectory(dir="/tmp") as scratch:
        done = subprocess.run(
            [*tier.command(Path(scratch)), sys.executable, "-c", code],
            env=tier.environment(),
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert (done.returncode, done.stdout.strip()) == (0, str(errno.EROFS)), done.stderr
