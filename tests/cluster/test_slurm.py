"""SLURM on nodes of one machine: the jobs that a course's reader submits do what they do on a real cluster."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.leftovers import marked_processes, wait_until_gone
from support.machine import needs, networks

from lockstep import cluster
from lockstep.cluster import tools
from lockstep.ranks.processes import descendants

pytestmark = [pytest.mark.slow, needs("slurm")]
SECONDS = 120  # for what takes a few on a machine that has nothing else to do


@pytest.fixture(scope="module")
def shared() -> Iterator[cluster.Slurm]:
    with cluster.Slurm(2, grace=5) as two:
        yield two


@pytest.fixture
def slurm(shared: cluster.Slurm) -> Iterator[cluster.Slurm]:
    """One cluster for all tests. The jobs that a failed test leaves are cancelled: the next test finds it idle."""
    yield shared
    for job in shared.run("squeue", "--noheader", "--format=%A").split():
        shared.scancel(job)
        shared.wait(job, SECONDS)


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def batch(*lines: str) -> str:
    return "\n".join(["#!/bin/bash", *lines])


def test_srun_numbers_the_tasks_in_the_order_of_nodes(slurm: cluster.Slurm) -> None:
    said = slurm.run("srun", "--nodes=2", "--ntasks-per-node=2", "--label", "sh", "-c",
                     "echo $SLURM_PROCID $SLURM_LOCALID $SLURM_NODEID $SLURM_NTASKS $(hostname)")  # fmt: skip
    assert sorted(said.splitlines()) == [
        "0: 0 0 0 4 node0", "1: 1 1 0 4 node0", "2: 2 0 1 4 node1", "3: 3 1 1 4 node1",
    ]  # fmt: skip


def test_a_batch_script_runs_here_as_this_user(slurm: cluster.Slurm, tmp_path: Path) -> None:
    (tmp_path / "job.sbatch").write_text(batch("#SBATCH --job-name=first --nodes=2", "id -u; hostname",
                                               "scontrol show hostnames $SLURM_JOB_NODELIST", "touch made"))  # fmt: skip
    job = slurm.wait(slurm.sbatch("job.sbatch"), SECONDS)
    assert (job.name, job.state, job.exit_code, job.restarts, job.nodes) == ("first", "COMPLETED", 0, 0, "node[0-1]")
    assert job.ended and Path(job.file) == tmp_path / f"slurm-{job.id}.out"
    assert job.output.split() == [str(os.getuid()), "node0", "node0", "node1"]
    assert (tmp_path / "made").stat().st_uid == os.getuid()


def test_how_jobs_end_otherwise(slurm: cluster.Slurm) -> None:
    failed = slurm.wait(slurm.sbatch(batch("exit 3")), SECONDS)
    assert (failed.state, failed.exit_code) == ("FAILED", 3)
    waiting = slurm.sbatch(batch("sleep 300"), "--begin=now+1hour")
    assert slurm.job(waiting).state == "PENDING" and not slurm.job(waiting).ended
    with pytest.raises(TimeoutError, match=f"job {waiting} is still PENDING"):
        slurm.wait(waiting, 0.2)
    slurm.scancel(waiting)
    assert slurm.wait(waiting, SECONDS).state == "CANCELLED"
    running = slurm.sbatch(batch("sleep 300"))
    assert slurm.wait(running, SECONDS, until=["RUNNING"]).nodes == "node0"
    slurm.scancel(running)
    assert slurm.wait(running, SECONDS).state == "CANCELLED"
    with pytest.raises(TimeoutError, match="will not be RUNNING"):
        slurm.wait(running, SECONDS, until=["RUNNING"])
    with pytest.raises(cluster.ClusterError, match=r"sbatch ended with status 1: .*[Nn]ode"):
        slurm.sbatch(batch("true"), "--nodes=3")


def test_an_array_is_many_jobs(slurm: cluster.Slurm) -> None:
    script = batch("echo $SLURM_ARRAY_TASK_ID > task-$SLURM_ARRAY_TASK_ID", "exit $((SLURM_ARRAY_TASK_ID == 2))")
    number = slurm.sbatch(script, "--array=0-3")
    slurm.wait(number, SECONDS)
    jobs = slurm.jobs(number)
    assert [job.id for job in jobs] == [f"{number}_{task}" for task in range(4)]
    assert [job.state for job in jobs] == ["COMPLETED", "COMPLETED", "FAILED", "COMPLETED"]
    assert [Path(f"task-{task}").read_text() for task in range(4)] == ["0\n", "1\n", "2\n", "3\n"]


def test_a_job_puts_itself_back_into_the_queue(slurm: cluster.Slurm) -> None:
    job = slurm.sbatch(batch("#SBATCH --requeue --open-mode=append", "echo try ${SLURM_RESTART_COUNT:-0}",
                             '[ "$SLURM_RESTART_COUNT" ] || { scontrol requeue $SLURM_JOB_ID; sleep 300; }'))  # fmt: skip
    slurm.wait(job, SECONDS, until=["COMPLETED"])
    assert slurm.job(job).restarts == 1
    assert [line for line in slurm.job(job).output.splitlines() if line.startswith("try")] == ["try 0", "try 1"]


def test_a_requeued_job_need_not_wait_for_its_time(slurm: cluster.Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    job = slurm.sbatch(batch("#SBATCH --requeue", "sleep 300"))
    slurm.wait(job, SECONDS, until=["RUNNING"])
    slurm.run("scontrol", "requeuehold", job)  # held until its time is so far away that it can't come during the test
    while slurm.job(job).state != "PENDING":
        time.sleep(0.05)
    slurm.run("scontrol", "update", f"jobid={job}", "starttime=now+600")
    slurm.run("scontrol", "release", job)
    while (waiting := slurm.job(job)).reason != "BeginTime":
        time.sleep(0.05)
    commands: list[tuple[object, ...]] = []
    run = slurm.run
    monkeypatch.setattr(slurm, "run", lambda *command, **options: commands.append(command) or run(*command, **options))

    left = slurm.nodes.run(None, ["sleep", "300"], env={**slurm.environment, "SLURM_JOB_ID": job})  # as a late srun is
    try:
        while not slurm.anything_left(job):  # a process that was forked has its environment from the next exec on
            time.sleep(0.05)
        slurm.hurry([waiting])
        assert commands == [], "something of its former start is left"
    finally:
        left.kill()
        left.wait(SECONDS)
    while slurm.anything_left(job):
        time.sleep(0.05)
    slurm.hurry([waiting])
    slurm.hurry([waiting])
    assert len(commands) == 1, "once for each time that it is requeued"
    assert slurm.wait(job, SECONDS, until=["RUNNING"]).restarts == 1
    slurm.scancel(job)


def test_an_urgent_job_takes_the_place_of_another(slurm: cluster.Slurm) -> None:
    """The one in `debug` gets its signal before it has to go, and begins again when the urgent one is done."""
    first = slurm.sbatch(batch("#SBATCH --nodes=2 --exclusive --requeue --open-mode=append --signal=B:USR1@1",
                               "trap 'echo saved >> order' USR1", "echo begin ${SLURM_RESTART_COUNT:-0} >> order",
                               '[ "$SLURM_RESTART_COUNT" ] && exit 0', "while true; do sleep 0.1; done"))  # fmt: skip
    slurm.wait(first, SECONDS, until=["RUNNING"])
    while not Path("order").exists():
        pass
    urgent = slurm.sbatch(batch("echo urgent >> order"), "--partition=urgent", "--nodes=2", "--exclusive")
    assert slurm.wait(urgent, SECONDS).state == "COMPLETED"
    done = slurm.wait(first, SECONDS, until=["COMPLETED"])
    assert done.restarts == 1
    assert Path("order").read_text().splitlines() == ["begin 0", "saved", "urgent", "begin 1"]


def commands(slurm: cluster.Slurm, job: str) -> Iterator[tuple[str, str]]:
    """The processes of a job, each with its node, without the folders that their programs are in."""
    for one in slurm.processes(job):
        yield one.node, " ".join([Path(one.command[0]).name, *one.command[1:]])


def test_what_runs_in_a_job(slurm: cluster.Slurm) -> None:
    """Its script and its steps, each with its node, without SLURM's own; of an array, one task's."""
    script = batch("#SBATCH --nodes=2 --array=3-4", "srun sleep 30$SLURM_ARRAY_TASK_ID &", "sleep 300")
    number = slurm.sbatch(script)
    for task in (3, 4):
        expected = {("node0", "sleep 300"), ("node0", f"sleep 30{task}"), ("node1", f"sleep 30{task}")}
        give_up = time.monotonic() + SECONDS
        while expected - (seen := set(commands(slurm, f"{number}_{task}"))):
            assert time.monotonic() < give_up, seen
        assert {command.split()[0] for _, command in seen} == {"sleep", "bash"}, seen
    slurm.scancel(number)
    assert slurm.wait(number, SECONDS).state == "CANCELLED" and slurm.processes(f"{number}_3") == []


def test_a_job_that_has_not_said_so_does_not_come_back() -> None:
    """Where the cluster does not requeue by itself (`requeue=False`)."""
    with cluster.Slurm(1, requeue=False) as slurm:
        jobs = [slurm.sbatch(batch("sleep 300"), *option) for option in ((), ("--requeue",))]
        for job in jobs:
            slurm.wait(job, SECONDS, until=["RUNNING"])
        with pytest.raises(cluster.ClusterError, match="disabled"):
            slurm.run("scontrol", "requeue", jobs[0])
        slurm.run("scontrol", "requeue", jobs[1])
        assert [slurm.job(job).restarts for job in jobs] == [0, 1]


def test_torchrun_under_srun(slurm: cluster.Slurm, tmp_path: Path) -> None:
    """The usual script: one torchrun a node, which meet at the first node of the list."""
    (tmp_path / "train.py").write_text(
        "import os, socket, sys, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\ntensor = torch.tensor([10.0 ** dist.get_rank()])\ndist.all_reduce(tensor)\n"
        "sys.stdout.write(f'{socket.gethostname()} {tensor.item():.0f}\\n')\n"
        "dist.destroy_process_group()\nsys.stdout.flush()\nos._exit(0)\n"
    )
    job = slurm.sbatch(batch(
        "#SBATCH --nodes=2 --ntasks-per-node=1 --cpus-per-task=2", "export OMP_NUM_THREADS=1",
        "head_node=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)",
        "srun torchrun --nnodes=$SLURM_NNODES --nproc-per-node=2 "
        "--rdzv-id=$SLURM_JOB_ID --rdzv-backend=c10d --rdzv-endpoint=$head_node:29500 train.py",
    ))  # fmt: skip
    done = slurm.wait(job, 2 * SECONDS)
    assert done.state == "COMPLETED", done.output
    assert sorted(line for line in done.output.splitlines() if line.startswith("node")) == (
        ["node0 1111"] * 2 + ["node1 1111"] * 2
    )


def test_lockstep_run_under_srun(slurm: cluster.Slurm, tmp_path: Path) -> None:
    """Nothing is said of the nodes: they train together, and node 0 explains their hang."""
    (tmp_path / "train.py").write_text(
        "import os, socket, torch, torch.distributed as dist\ndist.init_process_group('gloo')\n"
        "rank, tensor = dist.get_rank(), torch.tensor([10.0 ** dist.get_rank()])\ndist.all_reduce(tensor)\n"
        "print('ready', socket.gethostname(), os.environ['GROUP_RANK'], rank, os.environ['TORCHELASTIC_RUN_ID'], tensor.item())\n"
        "if rank == 3:\n    dist.broadcast(tensor, 0)\ndist.all_reduce(tensor)\n"
    )
    job = slurm.sbatch(batch(
        "#SBATCH --nodes=2 --ntasks-per-node=1 --cpus-per-task=2", f"export OMP_NUM_THREADS=1 PYTHONPATH={':'.join(sys.path)}",
        f"srun {sys.executable} -m lockstep run -n 2 train.py",
    ))  # fmt: skip
    done = slurm.wait(job, 2 * SECONDS)
    assert (done.state, done.exit_code) == ("FAILED", 1), done.output
    seen = sorted(line.partition("ready ")[2] for line in done.output.splitlines() if "] ready " in line)
    assert seen == [f"node{rank // 2} {rank // 2} {rank} {job} 1111.0" for rank in range(4)], done.output
    assert " ".join(done.output.split()).count("rank 3 called broadcast #1; ranks 0, 1 and 2 did not, and") == 2, (
        done.output
    )
    assert re.search(r"rank 3 ← +waits in broadcast #1\n.*node 1 \(node1\)\n.*train\.py:7", done.output), done.output


def test_a_node_that_dies_is_found_out_and_its_job_begins_again() -> None:
    """A second cluster where the first one's new start failed, seen once on a loaded machine: the warning has its cause."""
    try:
        with cluster.Slurm(1) as slurm:
            _a_node_dies(slurm)
    except TimeoutError as problem:
        warnings.warn(f"a second try: {problem}", stacklevel=1)
        with cluster.Slurm(1) as slurm:
            _a_node_dies(slurm)


def _a_node_dies(slurm: cluster.Slurm) -> None:
    script = batch("#SBATCH --requeue --open-mode=append", "hostname", '[ "$SLURM_RESTART_COUNT" ] || sleep 300')
    job = slurm.sbatch(script)
    slurm.wait(job, SECONDS, until=["RUNNING"])
    assert slurm.nodes.kill(0) >= 1
    assert slurm.wait(job, SECONDS, until=["PENDING"]).restarts == 1
    assert slurm.run("sinfo", "--noheader", "--partition=debug", "--format=%t").strip() in ("down", "down*")
    slurm.boot(0)
    assert slurm.wait(job, SECONDS, until=["COMPLETED"]).nodes == "node0"


# As whom, and how it ends -----------------------------------------------------------------------------------------


def test_an_ordinary_user_can_do_it_and_so_can_root(python: Callable[..., str]) -> None:
    said = python("""
from lockstep import cluster
print(cluster.available("slurm"))
with cluster.Slurm(2, cpus=2) as slurm:
    job = slurm.wait(slurm.sbatch("#!/bin/sh\\nsrun --nodes=2 --ntasks=2 hostname", "--nodes=2"), 60)
    print(job.state, *sorted(job.output.split()))
""")
    assert said.splitlines() == ["None", "COMPLETED node0 node1"]


CLIENT = """
import time
from lockstep import cluster
with cluster.Slurm(1) as slurm:
    slurm.wait(slurm.sbatch("#!/bin/sh\\nsetsid sleep 300 &\\nsleep 300"), 60, until=["RUNNING"])
    print(slurm.nodes._namespace_host.pid, flush=True)
    time.sleep(300)
"""


@pytest.mark.parametrize("victim", ["client", "namespace host", "Ctrl-C"])
def test_whatever_ends_it_nothing_stays(victim: str) -> None:
    client = subprocess.Popen([sys.executable, "-c", CLIENT], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                              text=True, start_new_session=True)  # fmt: skip
    assert client.stdout is not None
    host = int(client.stdout.readline())
    give_up = time.monotonic() + SECONDS
    while len(theirs := [pid for pid in marked_processes() if pid in descendants(client.pid)]) < 7:
        assert time.monotonic() < give_up, (
            theirs
        )  # the namespace host, its init, two daemons, the job and its two sleepers
        time.sleep(0.02)
    assert len(private := networks(theirs)) == 2
    os.kill(host if victim == "namespace host" else client.pid, signal.SIGINT if victim == "Ctrl-C" else signal.SIGKILL)
    left = wait_until_gone(theirs)
    client.kill()
    client.wait(20)
    client.stdout.close()
    assert left == []
    assert networks(marked_processes()) & private == set()


def test_where_it_is_missing_it_says_so(python: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.environ["PATH"] + os.pathsep + tools.SYSTEM_PATH)
    hidden = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c",
              "for one in $(which -a slurmctld); do mount --bind /dev/null $one; done; exec \"$@\"", "-")  # fmt: skip
    said = python(
        """
from lockstep import cluster, ranks
print(cluster.available("slurm"))
try:
    cluster.Slurm(2)
except ranks.NotRun as missing:
    print(missing)
""",
        *hidden,
    ).splitlines()
    assert said == ["SLURM: no slurmctld (sudo apt install slurm-wlm)"] * 2


LATE = """
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print("ready", flush=True)
if os.environ["RANK"] == "3":
    time.sleep(600)  # LATE
dist.all_reduce(total)
"""


def test_a_hang_over_two_nodes_is_explained_from_outside(slurm: cluster.Slurm, tmp_path: Path) -> None:
    """Each node tells of its own ranks, and of no other job's; of a job that is gone srun says so."""
    (tmp_path / "late.py").write_text(LATE)
    train = (
        "srun torchrun --nnodes=2 --nproc-per-node=2 --rdzv-id=$SLURM_JOB_ID --rdzv-backend=c10d "
        "--rdzv-endpoint=node0:29517 late.py"
    )
    job = slurm.sbatch(batch("#SBATCH --nodes=2 --ntasks-per-node=1 --cpus-per-task=2", train))
    attach = (sys.executable, "-m", "lockstep", "attach", "--slurm", job)
    give_up, said = time.monotonic() + SECONDS, ""
    while "ranks 0, 1 and 2 wait in all_reduce" not in said and time.monotonic() < give_up:
        try:
            said = slurm.run(*attach, timeout=SECONDS)
        except cluster.ClusterError as stuck:
            said = str(stuck)
    assert said.startswith(f"{sys.executable} ended with status 1: "), said
    assert "WAITING: ranks 0, 1 and 2 wait in all_reduce at late.py:9. Rank 3 sleeps at late.py:8." in " ".join(
        said.split()
    )
    assert re.search(r"2 +all_reduce +node1 +late\.py:9", said) and re.search(r"3 ← .*sleeps +node1 +late\.py:8", said)
    slurm.scancel(job)
    slurm.wait(job, SECONDS)
    with pytest.raises(cluster.ClusterError, match=f"status 2: lockstep attach: job {job} doesn't run"):
        slurm.run(*attach, timeout=SECONDS)
