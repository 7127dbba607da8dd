"""Jobs that are silent for a while and healthy: nobody may call them a hang, end them or accuse a rank.

Each stands still for `PAUSE` seconds, several times as long as a hang needs to be proven, in a way that real jobs do. The
bank can also be played again and again, four at a time: `python tests/foreign/test_healthy.py ROUNDS`.
"""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lockstep import ranks

PAUSE = 2.5
PRELUDE = """\
import os, signal, socket, subprocess, sys, threading, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
PAUSE, OUT = float(os.environ["PAUSE"]), os.environ["OUT"]
rank = int(os.environ["RANK"])
"""
INIT = 'dist.init_process_group("gloo")\n'
JOBS = {
    "evaluation on rank 0 under a barrier": """
if rank == 0:
    end = time.monotonic() + PAUSE
    while time.monotonic() < end: torch.randn(64, 64) @ torch.randn(64, 64)
dist.barrier()
""",
    "a download on rank 0": """
if rank == 0:
    near, far = socket.socketpair()
    if not os.fork():
        time.sleep(PAUSE); far.send(b"x"); os._exit(0)
    near.recv(1)
dist.barrier()
""",
    "a slow disk below a distributed checkpoint": """
import torch.distributed.checkpoint as dcp
real = os.fsync
os.fsync = lambda number: (time.sleep(PAUSE / 2), real(number))
dcp.save({"w": torch.ones(4)}, checkpoint_id=OUT + "/checkpoint")
""",
    "an asynchronous checkpoint on a slow disk": """
import torch.distributed.checkpoint as dcp
real = os.fsync
os.fsync = lambda number: (time.sleep(PAUSE / 2), real(number))
cpu = dist.new_group(backend="gloo")
saved = dcp.async_save({"w": torch.ones(4)}, checkpoint_id=OUT + "/checkpoint", process_group=cpu)
dist.barrier()
saved.result()
""",
    "a long backward": """
class Slow(torch.autograd.Function):
    @staticmethod
    def forward(context, x): return x * 1
    @staticmethod
    def backward(context, g):
        time.sleep(PAUSE * (rank == 1))
        return g
model = DDP(torch.nn.Linear(4, 4))
Slow.apply(model(torch.ones(2, 4))).sum().backward()
""",
    "a compilation that takes longer on one rank": """
def compiled(graph, inputs):
    if rank == 1: subprocess.run(["sleep", str(PAUSE)], check=True)
    return graph.forward
model = torch.compile(DDP(torch.nn.Linear(4, 4)), backend=compiled)
model(torch.ones(2, 4)).sum().backward()
dist.barrier()
""",
    "a debugger": """
if rank == 1:
    ours, theirs = os.pipe()
    threading.Timer(PAUSE, os.write, (theirs, b"c")).start()
    sys.stdin = open(ours)
    import pdb
    sys.stdin.read(1)
dist.barrier()
""",
    "a program that rank 0 starts": """
if rank == 0:
    subprocess.run(["sleep", str(PAUSE)], check=True)
dist.barrier()
""",
    "a pool of processes on rank 0": """
if rank == 0:
    import multiprocessing
    with multiprocessing.get_context("fork").Pool(2) as pool:
        pool.map(time.sleep, [PAUSE / 2] * 4)
dist.barrier()
""",
    "a thread that does what the others wait for": """
def client(): return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
if rank == 1:
    threading.Thread(target=lambda: (time.sleep(PAUSE), client().set("ready", "1"))).start()
client().wait(["ready"])
dist.barrier()
""",
    "a key that rank 1 sets late": """
store = dist.distributed_c10d._get_default_store()
if rank == 1:
    time.sleep(PAUSE)
    store.set("ready", "1")
store.wait(["ready"])
""",
    "a monitored barrier with a late rank": """
time.sleep(PAUSE * (rank == 1))
dist.monitored_barrier()
""",
    "a late rank at a new group": """
time.sleep(PAUSE * (rank == 1))
pair = dist.new_group([0, 1])
dist.all_reduce(torch.ones(1), group=pair if rank < 2 else None) if rank < 2 else None
dist.barrier()
""",
    "a library that keeps the interpreter's lock": """
if rank == 1:
    import ctypes
    ctypes.PyDLL(None).usleep(int(PAUSE * 1e6))
dist.barrier()
""",
    "a rank held by SIGSTOP": """
if rank == 1:
    me = os.getpid()
    if not os.fork():
        time.sleep(PAUSE); os.kill(me, signal.SIGCONT); os._exit(0)
    os.kill(me, signal.SIGSTOP)
dist.barrier()
""",
    "polling an asynchronous collective": """
time.sleep(PAUSE * (rank == 1))
work = dist.all_reduce(torch.ones(4), async_op=True)
while not work.is_completed(): time.sleep(0.05)
work.wait()
""",
    "collectives in a thread": """
def talk():
    time.sleep(PAUSE * (rank == 1))
    dist.all_reduce(torch.ones(4))
thread = threading.Thread(target=talk)
thread.start(); thread.join()
""",
    "a loader's slow worker": """
class Slow(torch.utils.data.Dataset):
    def __len__(self): return 2
    def __getitem__(self, index):
        time.sleep(PAUSE / 2 * (rank == 1))
        return torch.ones(4)
model = DDP(torch.nn.Linear(4, 1))
for batch in torch.utils.data.DataLoader(Slow(), num_workers=1):
    model(batch).sum().backward()
""",
    "a handshake of messages": """
if rank == 0:
    time.sleep(PAUSE)
    for other in (1, 2): dist.send(torch.ones(1), dst=other)
else:
    dist.recv(torch.ones(1), src=0)
dist.barrier()
""",
    "objects that take long to unpickle": """
class Late:
    def __reduce__(self): return time.sleep, (PAUSE,)
dist.broadcast_object_list([Late()] if rank == 0 else [None], src=0)
""",
    "a long finish": """
import atexit
dist.barrier()
if rank == 1: atexit.register(time.sleep, PAUSE)
""",
}
ALONE = {
    "a late rank at the first group": "time.sleep(PAUSE * (rank == 1))\n" + INIT + "dist.barrier()\n",
    "remote procedure calls": """
import torch.distributed.rpc as rpc
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
if rank == 0:
    rpc.rpc_sync("worker1", time.sleep, args=(PAUSE,))
rpc.shutdown()
""",
}
"""These set up their own group, or none."""
SCRIPTS = {name: PRELUDE + INIT + text for name, text in JOBS.items()} | {
    n: PRELUDE + text for n, text in ALONE.items()
}
QUICK = (
    "an asynchronous checkpoint on a slow disk", "a thread that does what the others wait for", "remote procedure calls",
    "a late rank at the first group",
)  # fmt: skip
"""What other tests of the ranks don't play."""


def play(name: str, folder: Path) -> tuple[ranks.Run, list[str]]:
    said: list[str] = []
    script = folder / "job.py"
    script.write_text(SCRIPTS[name])
    environment = {**os.environ, "PAUSE": str(PAUSE), "OUT": str(folder), "OMP_NUM_THREADS": "1"}
    run = ranks.run(
        ranks.Script(str(script)), 3, environment=environment, deadline=120.0, idle_limit=None, late_after=PAUSE / 2,
        grace=5.0, own_temporary=False, on_notice=said.append,
    )  # fmt: skip
    return run, said


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in SCRIPTS]
)
def test_a_healthy_job_goes_on(name: str, tmp_path: Path) -> None:
    run, said = play(name, tmp_path)
    assert run.ok, (run.cause, said, [report.stderr[-500:] for report in run.ranks])
    assert all("The run goes on." in text or "the wait is over" in text for text in said), said


def main(rounds: int) -> int:
    """Play the whole bank so many times."""
    import tempfile

    alarms = played = 0

    def one(name: str) -> tuple[str, ranks.Run]:
        with tempfile.TemporaryDirectory() as folder:
            return name, play(name, Path(folder))[0]

    with ThreadPoolExecutor(4) as pool:
        for name, run in pool.map(one, list(SCRIPTS) * rounds):
            played += 1
            if not run.ok:
                alarms += 1
                print(f"{name}: {run.cause}\n{[report.stderr[-300:] for report in run.ranks]}", flush=True)
    print(f"{played} runs, {alarms} alarms")
    return alarms


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
