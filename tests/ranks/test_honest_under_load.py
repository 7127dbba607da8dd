"""Right code on a machine that is busy with other things: no false hang, no flake.

Twice as many busy loops as cores run beside it all the time. LOCKSTEP_HONEST_RUNS changes the number of runs.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep import ranks

pytestmark = pytest.mark.slow

BODIES = Path(__file__).with_name("bodies.py")
RUNS = int(os.environ.get("LOCKSTEP_HONEST_RUNS", "200"))
PRELUDE = """\
import random, time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
t = torch.ones(4)
"""
TEXTS = (
    "for _ in range(20): dist.all_reduce(t)",
    "m = DDP(torch.nn.Linear(16, 16))\nfor _ in range(5): m(torch.ones(2, 16)).sum().backward()",
    "for _ in range(3):\n    for _ in range(random.randrange(40)): torch.ones(100, 100) @ torch.ones(100, 100)\n"
    "    dist.all_reduce(t)",
    "for _ in range(10): dist.barrier()",
    "for _ in range(10):\n    work = dist.isend(t, (rank + 1) % size)\n"
    "    dist.recv(torch.ones(4), (rank - 1) % size)\n    work.wait()",
    "time.sleep(random.random() * 0.5)\ndist.all_reduce(torch.ones(1 << 20))\ndist.destroy_process_group()",
    "objects = [None] * size\nfor _ in range(3): dist.all_gather_object(objects, {'rank': rank})",
)


@pytest.fixture(scope="module")
def load() -> Iterator[None]:
    loops = [
        subprocess.Popen([sys.executable, "-c", "import os\nwhile os.getppid() != 1: pass"])
        for _ in range(2 * (os.cpu_count() or 1))
    ]
    yield
    for loop in loops:
        loop.kill()
        loop.wait()


@pytest.mark.usefixtures("load")
def test_honest_runs_under_load() -> None:
    failures = []
    for number in range(RUNS):
        if number % 10 == 9:
            run = ranks.run(ranks.Function(BODIES, "launch", {"size": 2}), 1, launcher=True, deadline=120)
        elif number % 10 == 8:
            run = ranks.run(ranks.Function(BODIES, "train_and_return_the_module"), 2, deadline=120)
        else:
            run = ranks.run(ranks.Source(PRELUDE + TEXTS[number % len(TEXTS)]), 2 + 2 * (number % 3 == 0), deadline=120)
        if not run.ok:
            failures.append((number, run.cause, [report.stderr for report in run.ranks]))
    assert not failures, f"{len(failures)} of {RUNS} honest runs were accused: {failures[:3]}"
