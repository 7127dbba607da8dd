"""What `--watch-replicas` costs: the time of a training step with it against without, interleaved runs, same model.

    python benchmarks/watch_replicas.py [--ranks 2] [--repeats 5]

Prints the ratio of the fastest steps for a model of few and one of many parameters. The cost is one pass over the bytes
of parameters, gradients and buffers, so it weighs most where there is little to compute for each parameter.
"""

from __future__ import annotations

import argparse

from lockstep import ranks

BODY = """
import sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from lockstep.ranks import observe
width, batch = int(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo")
model = DDP(nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU())]))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x = torch.randn(batch, width)
times = []
for _ in range(12):
    began = time.perf_counter()
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    times.append(time.perf_counter() - began)
observe("step", min(times[2:]))
"""


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--ranks", type=int, default=2)
    options.add_argument("--repeats", type=int, default=5)
    given = options.parse_args()
    for width, batch in ((128, 256), (1024, 64)):
        best = {False: 1e9, True: 1e9}
        for _ in range(given.repeats):
            for watched in best:
                body = ranks.Source(BODY, arguments=(str(width), str(batch)))
                run = ranks.run(body, given.ranks, watch_replicas=watched)
                assert run.ok, run.cause
                best[watched] = min(best[watched], max(run.observed("step")))
        parameters = 4 * (width * width + width)
        print(
            f"{parameters:>9} parameters, batch {batch}: {best[False] * 1e3:.1f} ms a step, watched {best[True] * 1e3:.1f} ms: "
            f"{best[True] / best[False]:.2f}x"
        )


if __name__ == "__main__":
    main()
