"""Asking a rank where it stands must never stop it: so many runs in which it is asked at the worst moment.

    python benchmarks/sampling.py [RUNS] [--collect] [--compile]

Rank 0 starts threads and leaves garbage whose finalizers let go of the interpreter's lock, while another of its threads
looks where the main one stands, thousands of times, as a rank's listener does when it is asked. Before Python 3.12, a
collection inside `sys._current_frames` deadlocks it or crashes it then (gh-106883), so the listener allows none. `--collect`
allows them again; `--compile` has rank 0 compile a model instead, as real jobs do. Prints how many runs ended well.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from lockstep import ranks  # noqa: E402

DEADLINE = 60.0
COLLECT = "recorder.without_collections = contextlib.nullcontext\n"
BEGIN = """
import contextlib, gc, random, threading, time
import torch, torch.distributed as dist
from lockstep.ranks import observe, recorder
"""
LOOK = """
own, looks, end = recorder.current(), 0, threading.Event()

def look():
    global looks
    while not end.is_set():  # as the listener does when it is asked
        with recorder.without_collections():
            own.stack()
        looks += 1
        time.sleep(0.0001)

looking = threading.Thread(target=look)
dist.init_process_group("gloo")
if dist.get_rank() == 0:
    looking.start()
"""
BIRTHS = """
class Garbage:
    def __init__(self):
        self.me = self
    def __del__(self):
        time.sleep(0.0002)

until = time.monotonic() + 1
while dist.get_rank() == 0 and time.monotonic() < until:
    gc.set_threshold(random.randint(20, 60))
    for _ in range(8):
        Garbage()
    threads = [threading.Thread(target=time.sleep, args=(0,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""
END = """
dist.barrier()
end.set()
observe("looks", looks)
"""
COMPILE = """
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()))
step = torch.compile(model, backend="aot_eager") if dist.get_rank() == 0 else model
for size in range(4, 8):
    step(torch.randn(size, 8)).sum().backward()
"""


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("runs", nargs="?", type=int, default=200)
    options.add_argument("--collect", action="store_true")
    options.add_argument("--compile", action="store_true")
    given = options.parse_args()
    source = BEGIN + (COLLECT if given.collect else "") + LOOK + (COMPILE if given.compile else BIRTHS) + END
    ended = looks = 0
    began = time.monotonic()
    for number in range(1, given.runs + 1):
        run = ranks.run(ranks.Source(source), 3, deadline=DEADLINE, idle_limit=None)
        ended += run.ok
        looks += run.observed("looks")[0] or 0 if run.ok else 0
        if not run.ok:
            print(f"run {number}: {run.cause and run.cause.headline}", flush=True)
    took = time.monotonic() - began
    print(
        f"{given.runs} runs: {ended} ended, {given.runs - ended} did not; {looks} looks in those that ended; {took:.0f} s"
    )
    return int(ended < given.runs)


if __name__ == "__main__":
    sys.exit(main())
