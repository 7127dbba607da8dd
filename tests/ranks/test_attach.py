"""`lockstep attach`: jobs that hang are explained from outside, and nothing is done to them."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from support.command_line import call

from lockstep.outside import attach, jobs, machines
from lockstep.outside.attach import Explained, Position, Verdict
from lockstep.outside.stacks import NoSampler, NotPermitted, Thread
from lockstep.outside.watch import Seen
from lockstep.ranks.processes import descendants
from lockstep.ranks.report import Frame

DEADLINE = 120
PRELUDE = """\
import ctypes, os, signal, sys, threading, time
import torch, torch.distributed as dist
def seen_by_all(*_):
    ctypes.CDLL(None).prctl(0x59616d61, ctypes.c_ulong(-1), 0, 0, 0)  # PR_SET_PTRACER: Yama lets only parents look otherwise
    signal.alarm(120)
class Slow(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, index):
        seen_by_all()
        time.sleep(600)  # WORKER
"""
FORKED = """
def main(rank):
    seen_by_all()
    dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=3)
    t = torch.ones(4)
BODY
if __name__ == "__main__":
    for rank in range(3):
        if not os.fork():
            main(rank)
    signal.pause()
"""
LATE = {
    "sleep": ("time.sleep(600)  # LATE", "sleeps"),
    "lock": ("lock = threading.Lock(); lock.acquire()\n    lock.acquire()  # LATE", "waits for a lock"),
    "socket": ("import socket; a, b = socket.socketpair()\n    a.recv(1)  # LATE", "reads from a socket"),
    "loader": ("next(iter(torch.utils.data.DataLoader(Slow(), num_workers=1)))  # LATE", "waits for its data loader"),
    "busy": ("while True: pass  # LATE", "works ("),
}
Start = Callable[..., int]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts a Python program, and ends it with everything that it has started."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    started: list[subprocess.Popen[bytes]] = []

    def popen(text: str, *before: str) -> int:
        file = tmp_path / "train.py"
        file.write_text(text)
        variables = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        environment = {name: value for name, value in os.environ.items() if name not in variables}
        environment["TMPDIR"] = str(tmp_path)
        command = [sys.executable, *before, str(file), str(tmp_path / "store")]
        with open(tmp_path / "log", "wb") as log:
            started.append(subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log))
        return started[-1].pid

    yield popen
    for process in started:
        for pid in (process.pid, *descendants(process.pid)):
            with suppress(ProcessLookupError):  # torchrun's ranks may end with it
                os.kill(pid, signal.SIGKILL)
        process.wait(30)


def forked(body: str) -> str:
    return PRELUDE + FORKED.replace("BODY", "\n".join("    " + line for line in body.splitlines()))


def line_of(text: str, what: str) -> int:
    return next(number for number, line in enumerate(text.splitlines(), 1) if what in line)


def until(pid: int, ready: Callable[[Explained], bool], log: Path) -> Explained:
    """What is said of the job when it has come to the state that the test is about."""
    give_up = time.monotonic() + DEADLINE
    said = ""
    while time.monotonic() < give_up:
        try:
            [job] = jobs.find([pid])
            found = attach.attach(job, 0.5)
        except NotPermitted as why:
            pytest.skip(f"not run: {why}")
        if ready(found):
            return found
        said = attach.describe(found)
    pytest.fail(f"{said}\n{log.read_text()}")


@pytest.mark.slow
@pytest.mark.parametrize("how", LATE)
def test_who_is_late_is_told_with_what_it_does_and_its_line(how: str, start: Start, tmp_path: Path) -> None:
    code, doing = LATE[how]
    indented = code.replace("\n", "\n    ").replace("        ", "    ")
    text = forked(f"if rank == 1:\n    {indented}\ndist.barrier()  # WAIT")
    pid = start(text)

    def ready(found: Explained) -> bool:
        here = [one.frame and one.frame.line for one in found.positions]
        there = [line_of(text, f"# {mark}") for mark in ("WAIT", "LATE", "WAIT")]
        children = [child for one in found.late for child in one.children]
        return here == there and bool(children) == (how == "loader") and found.still == (how != "busy")

    found = until(pid, ready, tmp_path / "log")
    assert found.verdict is Verdict.WAITING
    wait, late = line_of(text, "# WAIT"), line_of(text, "# LATE")
    assert found.headline.startswith(f"ranks 0 and 2 wait in barrier at train.py:{wait}. Rank 1 {doing}")
    assert found.headline.endswith(f" at train.py:{late}.")
    rows = attach.rows(found)
    assert [row.differs for row in rows] == [False, True, False]
    assert rows[1].what.startswith(f"its own code: {doing}") and rows[0].what == "barrier"
    details = "\n".join(attach.details(found))
    assert f"rank 1 is at train.py:{late}" in details and "called from train.py" in details
    if how == "loader":
        assert f"sleeps at train.py:{line_of(text, '# WORKER')}   time.sleep(600)" in details


@pytest.mark.slow
def test_different_calls_accuse_nobody(start: Start, tmp_path: Path) -> None:
    text = forked(
        "if rank == 1:\n    dist.recv(t, 0)\nelif rank == 2:\n    work = dist.all_reduce(t, async_op=True)\n"
        "    work.wait()\nelse:\n    dist.all_reduce(t)"
    )
    pid = start(text)
    found = until(pid, lambda found: found.verdict is Verdict.HANG, tmp_path / "log")
    lines = [line_of(text, code) for code in ("all_reduce(t)", "recv(t", "work.wait()")]
    assert found.still and not found.late
    assert found.headline == (
        "rank 0 in all_reduce at train.py:{}; rank 1 in recv at train.py:{}; rank 2 in wait() at train.py:{}: "
        "the ranks wait for each other."
    ).format(*lines)
    assert not any(row.differs for row in attach.rows(found))
    assert attach.UNNUMBERED in found.notes


@pytest.mark.slow
def test_a_torchrun_job_with_a_rank_that_has_ended(start: Start, tmp_path: Path) -> None:
    text = (
        PRELUDE + "seen_by_all()\nif os.environ['RANK'] == '1': os._exit(0)\ndist.init_process_group('gloo')  # WAIT\n"
    )
    pid = start(text, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3")

    def ready(found: Explained) -> bool:
        return found.still and found.job.missing == [1] and len(found.positions) == 2 and not found.late

    found = until(pid, ready, tmp_path / "log")
    wait = line_of(text, "# WAIT")
    assert (found.verdict, found.still) == (Verdict.HANG, True)
    assert found.job.world_size == 3 and not found.job.guessed and not found.job.remote
    assert found.headline == f"ranks 0 and 2 wait in init_process_group at train.py:{wait}; rank 1 has ended."
    assert [(row.rank, row.differs) for row in attach.rows(found)] == [(0, False), (1, True), (2, False)]

    ranks = list(found.job.processes.values())
    done = call("attach", *map(str, ranks))
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("HANG: ranks 0 and 2 wait in init_process_group") and "has ended" in done.stdout
    [one] = json.loads(call("attach", "--json", str(pid)).stdout)
    assert one["missing"] == [1] and [rank["pid"] for rank in one["ranks"]] == ranks

    told = over_ssh(tmp_path, "one,gone,two").stdout
    assert "ranks 0 and 2 wait in init_process_group" in told
    assert "gone was not looked at: ssh says: ssh: connect to host gone port 22: No route to host" in told
    assert set(ranks) <= set(descendants(pid)), "looking at them has ended one"


SSH = """#!/bin/sh
# Runs the command here, as ssh would on the machine that is named before it.
shift 2
if [ "$1" = gone ]; then echo "ssh: connect to host gone port 22: No route to host" >&2; exit 255; fi
exec sh -c "$2"
"""


def over_ssh(folder: Path, hosts: str) -> subprocess.CompletedProcess[str]:
    """`lockstep attach --hosts …` with an ssh of our own."""
    (folder / "bin").mkdir(exist_ok=True)
    ssh = folder / "bin" / "ssh"
    ssh.write_text(SSH)
    ssh.chmod(0o755)
    return call("attach", "--hosts", hosts, "--seconds", "0.5", PATH=f"{ssh.parent}:{os.environ['PATH']}")


def test_a_machine_that_cannot_be_reached_is_said_in_a_line(tmp_path: Path) -> None:
    done = over_ssh(tmp_path, "gone")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "lockstep attach: gone was not looked at: ssh says: ssh: connect to host gone port 22: No route to host\n"
    )


def answer(node: str, *ranks: int, key: tuple[str, ...] = ("node0", "29500", "4", "")) -> machines.Answer:
    """What a machine with these two ranks of a job of four says, all of them in one barrier."""
    job = jobs.Job(dict.fromkeys(ranks, 100), 4, frozenset(ranks), key=key)
    return machines.Answer(node, (machines.Look(job, tuple(position(rank, *in_("barrier", 9)) for rank in ranks)),))


def test_what_several_machines_have_seen_is_put_together_by_jobs() -> None:
    other = ("node0", "29501", "4", "")
    looks = machines.put_together(
        [answer("a", 2, 3), answer("b", 0, 1), answer("b", 0, 1, key=other), machines.Answer("c")]
    )
    whole, half = (attach.explain(look.job, look.positions) for look in looks)
    assert whole.headline == "all ranks wait in barrier at train.py:9, and nothing moves."
    assert [(row.rank, row.node) for row in attach.rows(whole)] == [(0, "b"), (1, "b"), (2, "a"), (3, "a")]
    assert not whole.job.remote and half.job.remote == [2, 3]
    with pytest.raises(jobs.NoJob):
        machines.put_together([machines.Answer("c")])


def position(rank: int, *frames: tuple[str, int, str], moves: bool = False, doing: str = "sleeps") -> Position:
    thread = Thread("MainThread", tuple(Frame(*frame) for frame in frames), is_main=True)
    return Position(rank, 100 + rank, Seen(100 + rank, (thread,), moves, doing))


C10D = "/env/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py"
LOGGER = (
    "/env/lib/python3.12/site-packages/torch/distributed/c10d_logger.py",
    83,
    "_exception_logger.<locals>.wrapper",
)


def in_(call_: str, line: int) -> tuple[tuple[str, int, str], ...]:
    return (C10D, 3000, call_), LOGGER, ("/home/me/train.py", line, "<module>")


OWN = (("/home/me/data.py", 3, "load"), ("/home/me/train.py", 7, "<module>"))
THREE = jobs.Job({0: 100, 1: 101, 2: 102}, 3, frozenset(range(3)))


def explained(*positions: Position, job: jobs.Job = THREE) -> Explained:
    return attach.explain(job, positions)


def test_all_in_one_call_hang() -> None:
    found = explained(*(position(rank, *in_("all_reduce", 9)) for rank in range(3)))
    assert (found.verdict, found.still) == (Verdict.HANG, True)
    assert found.headline == "all ranks wait in all_reduce at train.py:9, and nothing moves."
    assert attach.UNNUMBERED in found.notes and not any(row.differs for row in attach.rows(found))


def test_one_that_moves_may_still_come() -> None:
    found = explained(
        position(0, *in_("barrier", 9)), position(1, *OWN, moves=True, doing="works (97% of a core)"), position(2, *in_("barrier", 9))
    )  # fmt: skip
    assert (found.verdict, found.still) == (Verdict.WAITING, False)
    assert found.headline == "ranks 0 and 2 wait in barrier at train.py:9. Rank 1 works (97% of a core) at data.py:3."
    assert attach.details(found)[1].startswith("  called from train.py:7")


def test_ranks_that_move_in_calls_are_healthy() -> None:
    found = explained(*(position(rank, *in_("all_reduce", 9), moves=True) for rank in range(3)))
    assert (found.verdict, found.still) == (Verdict.MOVES, False)


def test_a_job_in_which_all_sleep_outside_of_calls_stands_still() -> None:
    found = explained(*(position(rank, *OWN) for rank in range(3)))
    assert (found.verdict, found.still) == (Verdict.WAITING, True)
    assert found.headline == "no rank moves, and none is in a communication call."


def test_ranks_on_other_machines_are_asked_for_there() -> None:
    job = jobs.Job({2: 102, 3: 103}, 4, frozenset({2, 3}))
    found = explained(*(position(rank, *in_("barrier", 9)) for rank in (2, 3)), job=job)
    assert found.notes[-1] == "Ranks 0 and 1 run on other machines: --slurm JOB or --hosts NAMES asks these too."
    assert not job.missing


@pytest.mark.parametrize(
    ("frames", "call_"),
    [
        (in_("_wait_for_all", 9), "_wait_for_all"),
        (((C10D, 1, "_create_c10d_store"), (C10D, 2, "init_process_group"), *OWN), "init_process_group"),
        ((("/env/lib/python3.11/site-packages/torch/autograd/graph.py", 1, "_engine_run_backward"), *OWN), "backward"),
        ((("/env/lib/python3.11/site-packages/torch/distributed/checkpoint/filesystem.py", 1, "write"), *OWN), ""),
        ((("/usr/lib/python3.11/threading.py", 1, "Event.wait"), *OWN), ""),
        ((("/env/lib/python3.11/site-packages/torch/nn/parallel/distributed.py", 1, "DistributedDataParallel.__init__"), *OWN), "DDP()"),
        (OWN, ""),
    ],
)  # fmt: skip
def test_the_call_is_named_as_its_caller_knows_it(frames: tuple[tuple[str, int, str], ...], call_: str) -> None:
    thread = Thread("", tuple(Frame(*frame) for frame in frames), is_main=True)
    assert thread.call == call_
    assert [frame.file for frame in thread.users] == [file for file, *_ in frames if file.startswith("/home")]


def test_a_process_that_is_not_there_or_no_rank_is_said_in_a_line() -> None:
    done = call("attach", "4194399")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "lockstep attach: there is no process 4194399\n"


def test_without_py_spy_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoSampler, match="pip install py-spy"):
        attach.attach(jobs.Job({0: os.getpid()}, 1, frozenset({0})), 0.1)


def test_where_processes_may_not_be_read_it_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "py-spy"
    fake.write_text("#!/bin/sh\necho 'Permission Denied: Try again' >&2; exit 1\n")
    fake.chmod(0o755)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(NotPermitted, match=r"process \d+.*ptrace_scope=0.*SYS_PTRACE"):
        attach.attach(jobs.Job({0: os.getpid()}, 1, frozenset({0})), 0.1)
