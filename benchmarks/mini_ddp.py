"""The course's own MiniDDP against torch's DDP: how long a step takes, and what crosses between the ranks.

Both train the same 25 MB model on 2 ranks on the CPU, a few steps of one and a few of the other in turn within one run,
so that whatever else the machine does falls on both alike. Printed are medians, their ratio, and a step's bytes and
collectives as the recorder below both of them counted.

    python benchmarks/mini_ddp.py [--rounds N] [--cap MIB] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lockstep import ranks

ROOT = Path(__file__).resolve().parents[1]
WORLD, STEPS, BATCH, WIDTH, LAYERS = 2, 3, 64, 640, 16  # 16 * 640 * 641 * 4 bytes = 25.0 MiB


def measure(rounds: int, cap: float) -> None:
    """On a rank: time both, in turn."""
    sys.path.insert(0, str(ROOT))
    from solutions.mini_ddp import MiniDDP  # by its folder: this file has the same name

    dist.init_process_group("gloo")
    torch.manual_seed(0)

    def model() -> nn.Module:
        return nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))

    wrapped = {"MiniDDP": MiniDDP(model(), cap), "DDP": DistributedDataParallel(model(), bucket_cap_mb=cap)}
    optimizers = {name: torch.optim.SGD(one.parameters(), lr=0.001) for name, one in wrapped.items()}
    inputs = torch.randn(BATCH, WIDTH)
    seconds: dict[str, list[float]] = {name: [] for name in wrapped}
    for number in range(rounds + 2):  # two rounds to warm up: DDP builds its buckets anew after its first step
        for name in sorted(wrapped, reverse=bool(number % 2)):
            for _ in range(STEPS):
                dist.barrier()
                ranks.mark(name)
                began = time.perf_counter()
                optimizers[name].zero_grad()
                wrapped[name](inputs).square().mean().backward()
                if name == "MiniDDP":
                    wrapped[name].finish_gradient_synchronization()
                optimizers[name].step()
                if number >= 2:
                    seconds[name].append(time.perf_counter() - began)
                ranks.mark("end")
    ranks.observe("seconds", seconds)


def traffic(run: ranks.Run, name: str) -> tuple[int, int]:
    """The collectives and bytes of rank 0's last step with this one."""
    report = run.ranks[0]
    begin = max(mark.number for mark in report.marks if mark.name == name)
    end = min(mark.number for mark in report.marks if mark.name == "end" and mark.number > begin)
    calls = [call for call in report.collectives if begin < call.number < end]
    return len(calls), sum(call.nbytes for call in calls)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--cap", type=float, default=5.0, help="MiB in a bucket, for both")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    target = ranks.Function(__file__, "measure", {"rounds": arguments.rounds, "cap": arguments.cap})
    run = ranks.run(target, WORLD, deadline=300)
    if run.cause is not None:
        raise SystemExit(run.cause.headline)
    both = run.observed("seconds")
    # A step is over when it is over on the slower rank.
    medians = {
        name: statistics.median(max(pair) for pair in zip(both[0][name], both[1][name], strict=True))
        for name in ("MiniDDP", "DDP")
    }
    ratio = medians["MiniDDP"] / medians["DDP"]
    counted = {name: traffic(run, name) for name in medians}
    if arguments.json:
        print(json.dumps({"seconds": medians, "ratio": ratio, "collectives and bytes": counted}))
        return
    nbytes = LAYERS * WIDTH * (WIDTH + 1) * 4
    print(f"{nbytes / 2**20:.1f} MiB of gradients, {WORLD} ranks, buckets of {arguments.cap:g} MiB")
    for name, (collectives, moved) in counted.items():
        print(f"  {name:<8} {medians[name] * 1000:7.1f} ms a step   {collectives} collectives of {moved} bytes in all")
    print(f"  MiniDDP / DDP: {ratio:.2f} (target: at most 1.10)")


if __name__ == "__main__":
    main()
