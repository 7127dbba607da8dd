"""A rank that does something of its own while others wait for it: they are told where it is, and the run goes on."""

import os
import re
from pathlib import Path

import pytest

from lockstep import ranks

PRELUDE = """\
import os, sys, threading, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
gate = os.environ["GATE"]
def leave():
    while not os.path.exists(gate): time.sleep(0.1)
    os._exit(3)
class Slow(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, index):
        open(gate + "-stuck", "w").close()
        time.sleep(600)  # LATE
"""
STUCK = {
    "sleep": "time.sleep(600)  # LATE",
    "lock": "lock = threading.Lock(); lock.acquire()\n    lock.acquire()  # LATE",
    "queue": "import queue; q = queue.Queue()\n    q.get()  # LATE",
    "event": "threading.Event().wait()  # LATE",
    "limited": "threading.Event().wait(600)  # LATE",
    "socket": "import socket; a, b = socket.socketpair()\n    a.recv(1)  # LATE",
    "busy loop": "while True: pass  # LATE",
    "without letting others run": "import re\n    re.match('(a+)+b', 'a' * 60)  # LATE",
    "its loader's worker": "for batch in torch.utils.data.DataLoader(Slow(), num_workers=1): pass",
}


def line_of(text: str, what: str) -> int:
    return next(number for number, line in enumerate(text.splitlines(), 1) if what in line)


def run(text: str, gate: Path, size: int = 3, **options: object) -> tuple[ranks.Run, list[str]]:
    said: list[str] = []

    def take(notice: str) -> None:
        said.append(notice)
        gate.touch()

    environment = {**os.environ, "GATE": str(gate)}
    result = ranks.run(
        ranks.Source(text), size, late_after=1.0, on_notice=take, idle_limit=None, deadline=60, environment=environment, **options,  # type: ignore[arg-type]
    )  # fmt: skip
    return result, said


@pytest.mark.parametrize("how", STUCK)
def test_who_is_late_is_told_with_its_line(how: str, tmp_path: Path) -> None:
    body = f"if rank == 1:\n    threading.Thread(target=leave, daemon=True).start()\n    {STUCK[how]}\ndist.barrier()  # WAIT"
    if "without" in how:  # No thread of its own can end it, so rank 2 does.
        body = body.replace("rank == 1:", "rank == 2: threading.Thread(target=leave, daemon=True).start()\nif rank == 1:").replace(
            "    threading.Thread(target=leave, daemon=True).start()\n    import", "    import")  # fmt: skip
    if "loader" in how:  # Its worker takes a while to get there.
        body = body.replace(
            "dist.barrier()", "while not os.path.exists(gate + '-stuck'): time.sleep(0.01)\ndist.barrier()"
        )
    text = PRELUDE + body
    if "loader" not in how:
        text = text.replace("time.sleep(600)  # LATE\n", "pass\n", 1)
    result, said = run(text, tmp_path / "gate")
    assert result.cause is not None and result.cause.kind is not ranks.Kind.TIMED_OUT, said
    first, place = said[0].splitlines()
    held = {"queue": "Queue.get", "event": "Event.wait"}.get(how, "")
    assert f": it waits in {held}" in place if held else "it waits" not in place
    wait = line_of(text, "# WAIT")
    who = "(Ranks 0 and 2 have|Rank [02] has)"  # One of them may be slow to get there on a machine that is busy.
    assert re.fullmatch(rf"{who} waited \d+ s in barrier #1 at cell line {wait} for rank 1\. The run goes on\.", first)
    assert f"is at cell line {line_of(text, '# LATE')}" in place
    assert place.startswith("  rank 1 is at cell line")
    assert ("its process" in place) == ("loader" in how)


JOINED = {
    "join": "thread = threading.Thread(target=work); thread.start(); thread.join()  # MAIN",
    "a future": "from concurrent.futures import ThreadPoolExecutor\n    ThreadPoolExecutor(1).submit(work).result()  # MAIN",
}


@pytest.mark.parametrize("how", JOINED)
def test_who_waits_for_a_thread_is_told_where_that_is(how: str, tmp_path: Path) -> None:
    text = (
        PRELUDE + "def work():\n    while not os.path.exists(gate): time.sleep(0.1)  # THERE\n"
        f"if rank == 1:\n    {JOINED[how]}\ndist.barrier()"
    )
    result, said = run(text, tmp_path / "gate")
    assert result.ok, result.cause
    held = "Thread.join" if how == "join" else "Future.result"
    there = f": it waits in {held} for a thread at cell line {line_of(text, '# THERE')}"
    assert f"rank 1 is at cell line {line_of(text, '# MAIN')}" in said[0] and said[0].endswith(there), said


def test_who_waits_in_calls_beside_a_thread_that_lives_is_told_of_it(tmp_path: Path) -> None:
    """It is no proof of a hang, as the thread might end it; nobody is late, and silence would explain nothing."""
    text = (
        PRELUDE + "threading.Thread(target=leave, daemon=True).start()\n"
        "dist.all_reduce(torch.ones(1)) if rank == 0 else dist.broadcast(torch.ones(1), 0)  # APART"
    )
    _, said = run(text, tmp_path / "gate", 2)
    first, *where = said[0].splitlines()
    assert re.fullmatch(
        r"No rank has made a call for \d+ s\. Threads of ranks 0 and 1 still run and might end this, so the run goes on; "
        r"Ctrl-C ends it\.", first
    )  # fmt: skip
    line = line_of(text, "# APART")
    assert where == [
        f"  rank {rank} waits in {call} #1 at cell line {line}" for rank, call in enumerate(("all_reduce", "broadcast"))
    ]
    assert len(said) == 1, said


def test_nothing_is_said_of_ranks_that_compute_beside_a_thread(tmp_path: Path) -> None:
    text = PRELUDE + (
        "threading.Thread(target=leave, daemon=True).start()\ndist.barrier()\n"
        "began = time.monotonic()\nwhile time.monotonic() - began < 4: pass\ndist.barrier()"
    )
    result, said = run(text, tmp_path / "gate", 2)
    assert result.ok and said == [], said


def test_when_it_moves_on_that_is_said_and_the_run_ends_well(tmp_path: Path) -> None:
    text = PRELUDE + "if rank == 1:\n    while not os.path.exists(gate): time.sleep(0.1)\ndist.barrier()"
    result, said = run(text, tmp_path / "gate")
    assert result.ok, result.cause
    assert len(said) == 2
    assert re.fullmatch(r"Rank 1 called barrier #1 after \d+ s: the wait is over\.", said[1])


def test_a_rank_that_never_receives(tmp_path: Path) -> None:
    text = PRELUDE + "t = torch.ones(1 << 20)\nif rank == 0: dist.send(t, 1)\n"
    text += "else:\n    while not os.path.exists(gate): time.sleep(0.1)\n    dist.recv(t, 0)"
    result, said = run(text, tmp_path / "gate", 2)
    assert result.ok, result.cause
    assert said[0].startswith("Rank 0 has waited ") and " in send #1 at cell line " in said[0]


def test_nothing_is_said_of_ranks_that_all_compute(tmp_path: Path) -> None:
    text = (
        PRELUDE + "dist.barrier()\ntime.sleep(2.5)\nwork = dist.all_reduce(torch.ones(1), async_op=True)\nwork.wait()"
    )
    result, said = run(text, tmp_path / "gate", 2)
    assert result.ok and not said


def test_the_same_wait_is_told_once(tmp_path: Path) -> None:
    text = PRELUDE + "for step in range(2):\n    if rank == 1: time.sleep(2.2)\n    dist.barrier()"
    result, said = run(text, tmp_path / "gate", 2)
    assert result.ok and len(said) == 2, said


def test_who_is_late_for_the_first_group_is_told(tmp_path: Path) -> None:
    text = """import os, time
import torch.distributed as dist
while os.environ["RANK"] == "1" and not os.path.exists(os.environ["GATE"]):
    time.sleep(0.1)
dist.init_process_group("gloo")  # WAIT
dist.barrier()
"""
    result, said = run(text, tmp_path / "gate")
    assert result.ok, result.cause
    assert re.search(
        rf"Ranks 0 and 2 have waited \d+ s in init_process_group at .*{line_of(text, 'WAIT')} for rank 1\. The run",
        said[0],
    )
    assert re.search(r"  rank 1 is at .*[34]\b", said[0])
    assert re.fullmatch(r"Rank 1 called init_process_group after \d+ s: the wait is over\.", said[1])
