"""How long it takes to start N ranks, meet, run one all-reduce and leave; and to be told why a run hangs.

Three ways to start them, one after the other in each round, so that whatever else the machine does falls on all alike:
Lockstep's ranks (forked from a warm process), `mp.spawn`, and `torchrun`. Printed are medians, and how many times as
long as Lockstep the others take.

    python benchmarks/launch.py [--rounds N] [--ranks 2,4,8] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from lockstep import ranks

BODY = """\
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
tensor = torch.ones(4)
dist.all_reduce(tensor)
assert tensor[0].item() == dist.get_world_size()
dist.destroy_process_group()
"""
HANGS = {
    "if rank == 0: all_reduce": "if rank == 0:\n    dist.all_reduce(t)",
    "all_reduce against barrier": "dist.all_reduce(t) if rank else dist.barrier()",
    "one sys.exit(0)": "if rank == 1:\n    raise SystemExit\ndist.all_reduce(t)",
    "receive from each other": "dist.recv(t, rank ^ 1)",
    "uneven batches": "m = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))\n"
                      "for _ in range(3 - (rank == 1)): m(t).sum().backward()",
}  # fmt: skip
HANG_PRELUDE = """\
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
t = torch.ones(4)
"""


def with_lockstep(script: str, size: int) -> None:
    """Forked from the warm process."""
    run = ranks.run(ranks.Script(script), size)
    if not run.ok:
        raise SystemExit(f"lockstep: {run.cause}")


def _spawned(rank: int, size: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=size)
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    assert tensor[0].item() == size
    dist.destroy_process_group()
    os._exit(0)  # An orderly end of the interpreter aborts now and then after gloo (claim X02).


def with_spawn(script: str, size: int) -> None:
    """`mp.spawn` from this process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(_spawned, args=(size, port), nprocs=size)


def with_torchrun(script: str, size: int) -> None:
    """The command line, as a learner types it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(size), script]
    subprocess.run(command, check=True, timeout=300, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


WAYS: dict[str, Callable[[str, int], None]] = {
    "lockstep": with_lockstep, "mp.spawn": with_spawn, "torchrun": with_torchrun,
}  # fmt: skip


def measure_starts(sizes: list[int], rounds: int) -> dict[int, dict[str, list[float]]]:
    """Seconds for each size and way, interleaved."""
    found: dict[int, dict[str, list[float]]] = {size: {way: [] for way in WAYS} for size in sizes}
    with tempfile.TemporaryDirectory() as folder:
        script = str(Path(folder, "body.py"))
        Path(script).write_text(BODY)
        for _ in range(4):  # The warm process imports a few more things when it has nothing to do.
            with_lockstep(script, 2)
            time.sleep(1)
        for number in range(rounds):
            for size in sizes:
                for way, start in WAYS.items():
                    began = time.perf_counter()
                    try:
                        start(script, size)
                    except (mp.ProcessExitedException, subprocess.CalledProcessError) as error:
                        print(f"{way} on {size} ranks failed by itself, not counted: {error}", file=sys.stderr)
                        continue
                    found[size][way].append(time.perf_counter() - began)
            print(f"round {number + 1} of {rounds}", file=sys.stderr)
    return found


def measure_hangs(rounds: int) -> dict[str, list[float]]:
    """Seconds from the last thing that any rank did until the run had come back, explained."""
    found: dict[str, list[float]] = {name: [] for name in HANGS}
    for _ in range(rounds):
        for name, text in HANGS.items():
            run = ranks.run(ranks.Source(HANG_PRELUDE + text), 4)
            returned = time.monotonic()
            if run.cause is None or run.cause.kind != "hang" or run.began is None:
                raise SystemExit(f"{name} was not found to hang: {run.cause}")
            last = max(call.start for calls in run.collectives for call in calls)
            found[name].append(returned - run.began - last)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", default="2,4,8")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    sizes = [int(size) for size in arguments.ranks.split(",")]
    starts = measure_starts(sizes, arguments.rounds)
    hangs = measure_hangs(arguments.rounds)
    if arguments.json:
        print(json.dumps({"starts": starts, "hangs": hangs}))
        return
    print(f"{'ranks':>5}  {'lockstep':>10}  {'mp.spawn':>18}  {'torchrun':>18}    (medians of {arguments.rounds})")
    for size, ways in starts.items():
        ours = statistics.median(ways["lockstep"])
        others = [statistics.median(ways[way]) for way in ("mp.spawn", "torchrun")]
        cells = "  ".join(f"{other:8.2f} s {other / ours:6.0f}×" for other in others)
        print(f"{size:>5}  {ours * 1000:7.0f} ms  {cells}")
    print("\nA hang on 4 ranks is explained, after the last call of any rank:")
    for name, seconds in hangs.items():
        print(f"  {name:<28} {statistics.median(seconds):5.2f} s (at most {max(seconds):.2f} s)")


if __name__ == "__main__":
    main()
