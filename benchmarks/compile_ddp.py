"""How much faster is a step under DDP that `torch.compile` has compiled?

    python benchmarks/compile_ddp.py

Chapter 4 ("Compiling") quotes the result. Two ranks train four layers, each with a bucket of its own. Eager and compiled
steps alternate, and the fastest of each counts. The first compiled step is timed alone: it writes C++ and compiles it,
which takes minutes when other programs use the cores. Needs a C++ compiler.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lockstep import ranks

WORLD, REPEATS, DEADLINE = 2, 30, 900.0


class Net(nn.Module):
    """Four layers, each with a weight of 1 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + nn.functional.gelu(layer(x))
        return x


def measure() -> None:
    """On a rank: seconds of the first compiled step, and of the fastest eager and compiled ones."""
    dist.init_process_group("gloo")
    batch = torch.randn(64, 512)
    eager = DistributedDataParallel(Net(), bucket_cap_mb=1)
    compiled = torch.compile(DistributedDataParallel(Net(), bucket_cap_mb=1))

    def step(model: Callable[[torch.Tensor], torch.Tensor]) -> float:
        dist.barrier()
        began = time.perf_counter()
        model(batch).square().mean().backward()  # type: ignore[no-untyped-call]
        took = torch.tensor(time.perf_counter() - began)
        dist.all_reduce(took, op=dist.ReduceOp.MAX)  # the slowest rank counts
        return took.item()

    first = step(compiled)
    seconds = [[step(eager), step(compiled)] for _ in range(REPEATS)]
    ranks.observe("seconds", [first, *map(min, zip(*seconds, strict=True))])


def main() -> None:
    run = ranks.run(ranks.Function(__file__, "measure"), WORLD, deadline=DEADLINE)
    if run.cause is not None:
        raise SystemExit(run.cause.headline)
    first, eager, compiled = run.observed("seconds")[0]
    print(f"eager {eager * 1e3:.1f} ms, compiled {compiled * 1e3:.1f} ms: {eager / compiled:.2f} times as fast")
    print(f"the first compiled step: {first:.0f} s")


if __name__ == "__main__":
    main()
