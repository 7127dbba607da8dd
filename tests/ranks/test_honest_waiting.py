"""Waiting is not hanging: as long as somebody can still move the others, a run goes on."""

import pytest

from lockstep import ranks
from lockstep.ranks import Outcome

PRELUDE = """\
import os, subprocess, sys, threading, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
t = torch.ones(4)
"""
LATE = {
    "computes": "end = time.monotonic() + 2.5\nwhile time.monotonic() < end: torch.rand(99, 99) @ torch.rand(99, 99)",
    "sleeps": "time.sleep(2.5)",
    "reads a slow pipe": "subprocess.run(['sleep', '2.5'])",
    "waits for its own thread": "x = threading.Thread(target=time.sleep, args=(2.5,)); x.start(); x.join()",
    "writes": "f = open('/dev/null', 'wb')\nend = time.monotonic() + 2\nwhile time.monotonic() < end: f.write(b'x')",
    "loads data": """
class Slow(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, index): time.sleep(0.6); return torch.ones(1)
for batch in torch.utils.data.DataLoader(Slow(), num_workers=1): pass""",
}


@pytest.mark.parametrize("call", ["dist.all_reduce(t)", "dist.barrier()"])
@pytest.mark.parametrize("how", LATE)
def test_one_rank_comes_late(how: str, call: str) -> None:
    body = "\n".join("    " + line for line in LATE[how].splitlines())
    run = ranks.run(ranks.Source(PRELUDE + f"if rank == 0:\n{body}\n{call}"), 3)
    assert run.ok, run.cause


SENDS_LATER = {
    "a thread": "threading.Thread(target=later).start()",
    "a timer": "threading.Timer(3, send).start()",
    "a pool": "futures.ThreadPoolExecutor(1).submit(later)",
    "a thread unknown to threading": "import _thread; _thread.start_new_thread(later, ())",
    "code of exec": "exec('import time\\ndef f(): time.sleep(3); send()', given := {'send': send}); threading.Thread(target=given['f']).start()",
    "asyncio": "loop = asyncio.new_event_loop(); loop.call_later(3, send); threading.Thread(target=loop.run_forever, daemon=True).start()",
    "after a program": "futures.ThreadPoolExecutor(1).submit(subprocess.run, ['sleep', '3']).add_done_callback(send)",
    "after a process of a pool": "pool = forks.Pool(1); pool.apply_async(time.sleep, (3,), callback=send)",
    "after a process of an executor": "futures.ProcessPoolExecutor(1, forks).submit(time.sleep, 3).add_done_callback(send)",
    "after an event of a process": "event = forks.Event(); forks.Process(target=lambda: time.sleep(3) or event.set()).start()\n"
    "    threading.Thread(target=lambda: event.wait() and send()).start()",
    "after a limit": "def tries():\n        try: dist.monitored_barrier(watch, datetime.timedelta(seconds=3))\n        except RuntimeError: send()\n"
    "    threading.Thread(target=tries).start()",
}  # fmt: skip


@pytest.mark.parametrize("how", SENDS_LATER)
def test_a_thread_that_sends_later(how: str) -> None:
    """Both main threads wait in a receive; what moves them is asleep, and looks like an idle thread of a library."""
    text = f"""
import asyncio, datetime, multiprocessing
from concurrent import futures
forks, watch = multiprocessing.get_context("fork"), dist.new_group([0, 1])
def send(*_):
    dist.send(t, 1)
def later():
    time.sleep(3)
    send()
if rank == 0:
    {SENDS_LATER[how]}
    dist.recv(torch.ones(8), 1)
else:
    dist.recv(t, 0)
    dist.send(torch.ones(8), 0)
sys.stdout.flush(); os._exit(7)
"""
    run = ranks.run(ranks.Source(PRELUDE + text), 2)
    assert [report.code for report in run.ranks] == [7, 7], run.cause


def test_a_thread_that_never_sends_does_not_hide_a_hang() -> None:
    text = """
threading.Thread(target=lambda: time.sleep(600), daemon=True).start()
dist.recv(t, 1 - rank)
"""
    run = ranks.run(ranks.Source(PRELUDE + text), 2, idle_limit=2.5)
    assert run.cause is not None and run.cause.kind == "hang"
    assert set(run.outcomes) == {Outcome.HUNG}
    assert any("thread" in note for note in run.cause.notes)


WAITS_FOR_A_THREAD = {
    "join": "thread = threading.Thread(target=work); thread.start(); thread.join()",
    "pool": "with concurrent.futures.ThreadPoolExecutor(1) as pool: pool.submit(work)",
    "future": "concurrent.futures.ThreadPoolExecutor(1).submit(work).result()",
    "joins": "inner = threading.Thread(target=work); inner.start(); outer = threading.Thread(target=inner.join); outer.start(); outer.join()",
}


@pytest.mark.parametrize("how", WAITS_FOR_A_THREAD)
def test_a_rank_that_waits_for_its_thread_waits_in_what_that_calls(how: str) -> None:
    text = f"""
import concurrent.futures
def work():
    dist.all_reduce(t)
if rank == 1:
    dist.barrier()
{WAITS_FOR_A_THREAD[how]}
"""
    run = ranks.run(ranks.Source(PRELUDE + text), 2, idle_limit=None, deadline=20)
    assert run.cause is not None and run.cause.kind == "hang", run.cause
    assert [(row.what, row.frame and row.frame.line) for row in run.cause.rows] == [
        ("all_reduce #1", 9),
        ("barrier #1", 11),
    ]


def test_a_thread_that_is_nothing_but_a_wait_for_a_message() -> None:
    """No line of the program is in such a thread."""
    text = "work = dist.irecv(t, 1 - rank)\nthread = threading.Thread(target=work.wait); thread.start(); thread.join()"
    run = ranks.run(ranks.Source(PRELUDE + text), 2, idle_limit=None, deadline=20)
    assert run.cause is not None and run.cause.kind == "hang", run.cause
    assert [row.what for row in run.cause.rows] == ["recv #1", "recv #1"]


LISTENS = "listener = threading.Thread(target=dist.recv, args=(torch.ones(8), 1), daemon=True); listener.start()"


@pytest.mark.parametrize("body", [
    "thread = threading.Thread(target=dist.recv, args=(torch.ones(8), 1), daemon=True)\n    thread.start(); thread.join(2.5)",
    "def ask():\n        try: dist.monitored_barrier(watch, timeout=datetime.timedelta(seconds=2.5))\n        except RuntimeError: pass\n"
    "    thread = threading.Thread(target=ask); thread.start(); thread.join()",
    f"{LISTENS}; free = threading.Event()\n    threading.Thread(target=lambda: time.sleep(2.5) or free.set()).start(); free.wait()",
    f"{LISTENS}; free = threading.Event(); signal.signal(signal.SIGALRM, lambda *_: free.set()); signal.alarm(3); free.wait()",
    f"{LISTENS}; signal.signal(signal.SIGALRM, lambda *_: 1 / 0); signal.alarm(3)\n    try: listener.join()\n    except ZeroDivisionError: pass",
    f"{LISTENS}; pool = multiprocessing.get_context('fork').Pool(1); pool.apply_async(time.sleep, (3,)).get()",
    "def ask():\n        try: dist.recv(torch.ones(8), 1, group=short)\n"
    "        except RuntimeError: pass\n    thread = threading.Thread(target=ask); thread.start(); thread.join()",
], ids=["join with a limit", "a call with a limit", "another thread", "a signal", "a signal in join", "a process", "a group with a limit"])  # fmt: skip
def test_a_wait_for_a_thread_that_ends_otherwise(body: str) -> None:
    text = f"""
import datetime, multiprocessing, signal
watch, short = dist.new_group([0, 1]), dist.new_group([0, 1], timeout=datetime.timedelta(seconds=4))
if rank == 0:
    {body}
    dist.send(t, 1)
else:
    dist.recv(t, 0)
os._exit(0)
"""
    run = ranks.run(ranks.Source(PRELUDE + text), 2)
    assert all(outcome is Outcome.EXITED for outcome in run.outcomes), run.cause
    assert [report.code for report in run.ranks] == [0, 0], run.cause


def test_an_idle_thread_of_a_library_does_not_hide_a_hang() -> None:
    """A pool with nothing to do, a queue with nothing in it: they wait for the main thread, which waits."""
    text = """
import concurrent.futures, queue
pool = concurrent.futures.ThreadPoolExecutor(2); pool.submit(len, "").result()
empty = queue.Queue(); threading.Thread(target=empty.get, daemon=True).start()
def writer():
    while True: print(empty.get())
threading.Thread(target=writer, daemon=True).start()
dist.recv(t, 1 - rank)
"""
    run = ranks.run(ranks.Source(PRELUDE + text), 2, idle_limit=None, deadline=20)
    assert run.cause is not None and run.cause.kind == "hang", run.cause


def test_a_big_transfer() -> None:
    text = "big = torch.ones(50 << 20)\ndist.all_reduce(big)\nassert big[-1] == size"
    run = ranks.run(ranks.Source(PRELUDE + text), 2)
    assert run.ok, run.cause


def test_a_big_message_to_one_who_comes_late() -> None:
    text = (
        "big = torch.ones(4 << 20)\nif rank == 0:\n    dist.send(big, 1)\nelse:\n    time.sleep(2.5); dist.recv(big, 0)"
    )
    run = ranks.run(ranks.Source(PRELUDE + text), 2)
    assert run.ok, run.cause


def test_one_rank_joins_late() -> None:
    text = (
        "import os, time, torch.distributed as dist\nif os.environ['RANK'] == '0':\n    time.sleep(2)\n"
        "dist.init_process_group('gloo')"
    )
    run = ranks.run(ranks.Source(text), 3)
    assert run.ok, run.cause


def test_a_rank_that_is_stopped_for_a_while() -> None:
    """Somebody pressed Ctrl-Z, or a debugger is at it."""
    text = (
        "if rank == 0:\n    subprocess.Popen(['sh', '-c', f'sleep 1; kill -STOP {os.getpid()}; sleep 2; "
        "kill -CONT {os.getpid()}'])\ntime.sleep(1.5)\ndist.barrier()"
    )
    run = ranks.run(ranks.Source(PRELUDE + text), 2)
    assert run.ok, run.cause


def test_a_collective_with_a_timeout_of_its_own_tells_who_was_missing() -> None:
    text = """
if rank == 0:
    work = dist.all_reduce(t, async_op=True)
    import datetime
    work.wait(datetime.timedelta(seconds=1))
else:
    time.sleep(3)
"""
    run = ranks.run(ranks.Source(PRELUDE + text), 2)
    assert run.cause is not None
    headline = run.cause.headline
    assert headline.startswith("rank 0 gave up waiting in all_reduce #1: rank 1, at"), headline
    assert headline.endswith("(time.sleep(3)), never joined it."), headline
    assert not any("timeout=" in note for note in run.cause.notes), "the group's timeout is another"


def test_eight_ranks_take_turns() -> None:
    text = (
        "m = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))\n"
        "for step in range(16):\n    if step % size == rank: time.sleep(0.1)\n    m(t).sum().backward()"
    )
    run = ranks.run(ranks.Source(PRELUDE + text), 8)
    assert run.ok, run.cause


def test_a_long_backward() -> None:
    """All are inside one communication call all the time, by their stacks; only the processor tells that they work."""
    text = """
model = torch.nn.Sequential(*[torch.nn.Linear(700, 700) for _ in range(12)])
ddp = torch.nn.parallel.DistributedDataParallel(model)
ddp(torch.ones(2500, 700)).sum().backward()
"""
    run = ranks.run(ranks.Source(PRELUDE + text), 2)
    assert run.ok, run.cause


def test_a_long_transfer() -> None:
    """As before: everybody is inside the same call for seconds, while bytes flow."""
    run = ranks.run(ranks.Source(PRELUDE + "big = torch.ones(200 << 20)\ndist.broadcast(big, 0)"), 3)
    assert run.ok, run.cause


def test_a_checkpoint_on_slow_storage() -> None:
    """To write files is no communication, though torch's own code for it lies among that for communication."""
    text = """
import ctypes, functools, tempfile
import torch.distributed.checkpoint as dcp
os.fsync = functools.partial(ctypes.CDLL(None).poll, None, 0, 2500)  # a file system that takes 2.5 s
dcp.save({"weight": torch.ones(4)}, checkpoint_id=f"{tempfile.gettempdir()}/{rank * alone}", no_dist=alone)
"""
    for alone in (False, True):
        run = ranks.run(ranks.Source(PRELUDE + f"alone = {alone}\n" + text), 2)
        assert run.ok, run.cause
