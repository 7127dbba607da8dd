"""A learner's own launcher under watch: `mp.spawn` and torchrun's launcher mean what they always mean, only faster."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from lockstep import ranks
from lockstep.ranks import Outcome, Run
from lockstep.ranks.limits import Limits

BODIES = Path(__file__).with_name("bodies.py")


def launch(name: str, deadline: float = 60.0, **kwargs: object) -> Run:
    limits = {key: kwargs.pop(key) for key in ("memory_limit", "idle_limit") if key in kwargs}
    return ranks.run(ranks.Function(BODIES, name, kwargs), 1, launcher=True, deadline=deadline, **limits)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [2, 4])
def test_workers_do_their_work_in_the_launchers_environment(size: int) -> None:
    run = launch("launch", size=size)
    assert run.ok, run.cause
    assert run.observed("returned") == ["launched"]
    lines = sorted(line for line in run.ranks[0].stdout.splitlines() if line.startswith("worker"))
    total = float(sum(range(size)))
    assert lines == [f"worker {rank} {[total] * 3} yes" for rank in range(size)]
    assert sorted(report.rank for report in run.workers) == list(range(size))
    assert [len(report.collectives) for report in run.workers] == [1] * size


def test_two_launches_one_after_the_other() -> None:
    run = launch("launch", times=2)
    assert run.ok, run.cause
    assert sorted(report.rank for report in run.workers) == [0, 0, 1, 1]


def test_a_worker_raises() -> None:
    run = launch("launch", mode="raise")
    assert run.outcomes == [Outcome.RAISED]
    assert run.ranks[0].error is not None and run.ranks[0].error.type == "ProcessRaisedException"
    assert run.cause is not None and run.cause.kind == "raised" and run.cause.ranks == (1,)
    assert run.cause.headline == "rank 1 raised ValueError: bad shard"
    assert re.search(r"Rank 0 .*(the launcher ended it|an echo)", " ".join(run.cause.notes)), run.cause
    assert run.cause.frame is not None and run.cause.frame.text == 'raise ValueError("bad shard")'


def test_a_worker_exits() -> None:
    run = launch("launch", mode="exit")
    assert run.cause is not None and run.cause.kind == "exited" and run.cause.ranks == (1,)
    assert run.cause.headline == "rank 1 left with status 7 (by sys.exit) before its work was done."


@pytest.mark.parametrize("size", [2, 4])
def test_a_worker_is_killed(size: int) -> None:
    """What `mp.spawn` reports may be a neighbor's "Connection closed by peer"; the cause is who was killed."""
    run = launch("launch", mode="kill", size=size)
    assert run.cause is not None and run.cause.kind == "crashed" and run.cause.ranks == (1,), run.cause
    assert run.cause.headline == "rank 1 was killed by SIGKILL."


@pytest.mark.parametrize("size", [2, 4])
def test_workers_hang(size: int) -> None:
    run = launch("launch", mode="hang", size=size)
    assert run.cause is not None and run.cause.kind == "hang", run.cause
    assert set(run.cause.ranks) == ({0, 1} if size == 2 else {1}), run.cause  # of two, nobody knows who is wrong
    assert "all_reduce #1" in run.cause.headline and "barrier #1" in run.cause.headline
    assert run.cause.frame is not None and run.cause.frame.text == "dist.barrier()"
    assert {report.outcome for report in run.workers} == {Outcome.HUNG}


def test_workers_hang_in_a_second_launch() -> None:
    """Those of the first launch have finished; they are not the ones that are missing."""
    text = "import bodies\nif __name__ == '__main__':\n    bodies.launch()\n    bodies.launch('hang')\n"
    run = ranks.run(ranks.Source(f"import sys\nsys.path.insert(0, {str(BODIES.parent)!r})\n{text}"), 1, launcher=True)
    assert run.cause is not None and run.cause.kind == "hang" and set(run.cause.ranks) == {0, 1}, run.cause
    assert "finished" not in run.cause.headline


def test_a_worker_takes_too_much_memory() -> None:
    run = launch("launch", mode="memory", memory_limit=400 << 20)
    assert run.cause is not None and run.cause.kind == "out of memory" and run.cause.ranks == (1,), run.cause


def test_processes_queues_and_exit_codes() -> None:
    run = launch("launch_with_a_queue")
    assert run.ok, run.cause
    assert run.observed("returned") == [[0, 10, 0, 7]]
    assert run.ranks[0].stderr == ""


def test_tensors_in_shared_memory() -> None:
    run = launch("launch_with_shared_memory")
    assert run.ok, run.cause
    assert run.observed("returned") == [[1.0, 2.0]]


def test_torchruns_own_launcher() -> None:
    run = launch("launch_elastic")
    assert run.ok, run.cause
    assert run.observed("returned") == [{"0": "0 2", "1": "1 2"}]
    assert sorted(report.rank for report in run.workers) == [0, 1]


def test_torchruns_own_launcher_fails_in_its_workers_words() -> None:
    run = launch("launch_elastic", mode="raise")
    assert run.cause is not None and run.cause.kind == "raised" and run.cause.ranks == (1,), run.cause
    assert run.cause.headline == "rank 1 raised ValueError: bad shard"
    assert re.search(r"Rank 0 .*(the launcher ended it|an echo)", " ".join(run.cause.notes)), run.cause
    assert run.cause.frame is not None and run.cause.frame.text == 'raise ValueError("bad shard")'


def test_torchruns_own_launcher_with_workers_that_hang() -> None:
    run = launch("launch_elastic", mode="hang")
    assert run.cause is not None and run.cause.kind == "hang", run.cause
    assert "rank 1 called barrier #1; rank 0 did not, and went on to" in run.cause.headline


def test_a_launcher_that_raises_by_itself() -> None:
    run = launch("launch", size="two")
    assert run.cause is not None and run.cause.kind == "raised"
    assert run.cause.headline.startswith("the launcher raised")


def test_a_busy_launcher_is_not_idle() -> None:
    run = launch("compute_first_launch_later", seconds=2.5, idle_limit=1.0)
    assert run.ok, run.cause


def test_a_script_that_launches_itself(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys, torch.multiprocessing as mp\n"
        "def main(rank, value):\n    print('rank', rank, value, __name__, flush=True)\n"
        "if __name__ == '__main__':\n    mp.spawn(main, args=(sys.argv[1],), nprocs=2)\n"
    )
    run = ranks.run(ranks.Script(script, ("seven",)), 1, launcher=True)
    assert run.ok, (run.cause, run.ranks[0].stderr)
    assert sorted(run.ranks[0].stdout.splitlines()) == ["rank 0 seven __mp_main__", "rank 1 seven __mp_main__"]


def test_a_script_without_the_guard(tmp_path: Path) -> None:
    """Claim X20: the child imports the script, and would start children of its own."""
    script = tmp_path / "train.py"
    script.write_text("import torch.multiprocessing as mp\ndef main(rank):\n    pass\nmp.spawn(main, nprocs=2)\n")
    run = ranks.run(ranks.Script(script), 1, launcher=True)
    assert not run.ok
    assert "bootstrapping phase" in run.ranks[0].stderr


def test_a_launcher_that_uses_the_command_line(tmp_path: Path) -> None:
    """Ranks of another interpreter are not watched, but neither are they taken for an idle launcher."""
    script = tmp_path / "train.py"
    script.write_text("import time, sys\ntime.sleep(1.5)\nprint('done', flush=True)\n")
    text = f"import subprocess, sys\nsubprocess.run([sys.executable, {str(script)!r}], check=True)"
    run = ranks.run(ranks.Source(text), 1, launcher=True)
    assert run.ok, run.cause
    assert "done" in run.ranks[0].stdout


@pytest.mark.skipif(sys.platform != "linux", reason="not run: the fork server needs Linux")
def test_this_python_has_what_a_fork_server_needs() -> None:
    from lockstep.ranks import fork_server

    assert fork_server.available()


def test_a_launcher_does_not_pay_for_the_interpreters_it_waits_for() -> None:
    """Each rank may be an interpreter of its own, which takes seconds to import torch."""
    busy = "import time\nwhile time.process_time() < 2: pass"
    waits = f"import subprocess, sys, time\nsubprocess.run([sys.executable, '-c', {busy!r}], check=True)\ntime.sleep(1)"
    run = ranks.run(ranks.Source(waits), 1, launcher=True, cpu_limit=1.0)
    assert run.ok, run.cause
    run = ranks.run(ranks.Source("while True: pass"), 1, launcher=True, cpu_limit=1.0)
    assert run.cause is not None and run.cause.headline.startswith("the launcher was still computing after 1 s")


@pytest.mark.parametrize(
    ("elapsed", "started", "ends"), [(11.0, 0.0, True), (25.0, 8.0, False), (27.0, 8.0, True), (31.0, 90.0, True)]
)
def test_their_processor_time_is_added_to_the_deadline(elapsed: float, started: float, ends: bool) -> None:
    """Twice, and up to three times the deadline in all, so that endless loops in them come to an end as well."""
    job = SimpleNamespace(deadline=10.0, process_limit=None, idle_limit=None, launcher=True)
    limits = Limits(SimpleNamespace(job=job, members=[], failed_at=None, elapsed=lambda: elapsed))  # type: ignore[arg-type]
    limits.started = started
    assert bool(list(limits.look(still_for=0.0))) is ends
