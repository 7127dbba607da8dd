"""Exercise measure_step: what communication costs, how well training scales, and how long the next run will take.

Chapter 4, "Scaling". Three functions: measure a step with and without its communication, compare runs on different
numbers of ranks, and predict a run before you start it. To see the first at work on two ranks:

    torchrun --nproc-per-node=2 exercises/measure_step.py
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

WARM_UP = 2  # steps of each kind: DDP's first step has everything in one bucket, its second rebuilds the buckets
BYTES = 4  # of a float32
BACKWARD = 2 / 3  # backward's share of the computing: it multiplies twice where forward multiplies once


@dataclass(frozen=True)
class Measurement:
    """Seconds of a step: `step` with the synchronization of gradients, `alone` without."""

    step: float
    alone: float

    @property
    def exposed(self) -> float:
        """Seconds of communication that nothing hides: without it, a step would be that much shorter."""
        return self.step - self.alone


def exposed_communication(
    step: Callable[[], object],
    ddp_model: DistributedDataParallel,
    repeats: int = 9,
    clock: Callable[[], float] = time.perf_counter,
) -> Measurement:
    """Measure a step that synchronizes its gradients, and the same step in `no_sync()`. Every rank of the job calls it.

    - First run at least two warm-up steps of each kind, which don't count.
    - Then alternate between the two kinds, `repeats` steps of each, so that a machine that slows down slows both.
    - The ranks start every step together, after a barrier. Between the two readings of `clock` there is only `step()`:
      no barrier, and no zeroing of gradients. Each step starts with gradients of None or zero.
    - Other work on the machine can only add time. So take the minimum over the repeats, separately for each kind.
    - A step takes as long as its slowest rank. So take the largest over the ranks, before the minimum or after it; all
      ranks return the same numbers.
    - Afterwards the model is unchanged: all its gradients (including those that were None or belong to frozen
      parameters) and all its buffers are as before, and it synchronizes gradients again.

    Args:
        step: runs forward and backward for one batch through `ddp_model`. It neither clears gradients nor updates
            weights.
        ddp_model: the wrapped model.
        repeats: the number of measured steps of each kind.
        clock: returns seconds.

    Returns:
        The seconds that a step of each kind takes.
    """
    raise NotImplementedError("measure_step: measure a step with synchronization and without")


def scaling_efficiency(seconds: Mapping[int, float], mode: str) -> dict[int, float]:
    """The share of each rank's speed that is left, compared with the run on the fewest ranks. 1 is perfect.

    Efficiency is samples per second per rank, divided by the same number for the run on the fewest ranks; that run may
    have more than one rank.

    Args:
        seconds: maps a number of ranks to the seconds of one step.
        mode: "strong" if all runs had the same global batch, so that each of n ranks did 1/n of it; "weak" if every
            rank had a batch of the same size, so that n ranks did n times as much.

    Returns:
        Maps each number of ranks to its efficiency, as a fraction.

    Raises:
        ValueError: for any other mode, for no runs, and for a time of zero or less.
    """
    raise NotImplementedError("measure_step: compare samples per second per rank")


def predict_step(
    parameters: int, ranks: int, bandwidth: float, latency: float, compute: float, buckets: int = 1
) -> float:
    """Predict the seconds of a step of data-parallel training, with a formula simple enough to work out on paper.

    - A parameter's gradient is a float32. Gradients travel in `buckets` buckets of equal size, one after the other.
    - A ring all-reduce of S bytes takes 2(N-1) rounds. In each round every rank sends S/N bytes over its own link and
      waits one latency.
    - Forward takes one third of the computing time, then backward takes two thirds. The i-th of B buckets is complete
      when i/B of backward is done. It leaves then, or when the bucket before it has arrived, if that is later.
    - The step is over when the last bucket has arrived. With one bucket, nothing is hidden.

    If all ranks share one link of R bytes/s, such as a throttled loopback, each rank has R / ranks.

    Args:
        parameters: the number of gradient elements in total.
        ranks: N. A single rank sends nothing.
        bandwidth: the bytes per second that a rank can send, while it receives as many.
        latency: the seconds that each round costs, whatever its size.
        compute: the seconds of forward and backward on one rank, without communication.
        buckets: B.

    Returns:
        The seconds of a step.
    """
    raise NotImplementedError("measure_step: predict the seconds of a step")


if __name__ == "__main__":
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)
    torch.manual_seed(0)  # the same weights everywhere
    layers = [layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.ReLU())]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=1)
    batch = torch.randn(64, 512)
    measured = exposed_communication(lambda: model(batch).square().mean().backward(), model)
    if dist.get_rank() == 0:
        print(f"a step {measured.step * 1e3:.2f} ms, without communication {measured.alone * 1e3:.2f} ms")
        efficiency = scaling_efficiency({1: measured.alone, dist.get_world_size(): measured.step}, "weak")
        print(f"exposed {measured.exposed * 1e3:.2f} ms; weak scaling efficiency {min(efficiency.values()):.0%}")
        count = sum(parameter.numel() for parameter in model.parameters())
        seconds = predict_step(count, dist.get_world_size(), 1.25e8, 1e-4, measured.alone, buckets=4)
        print(f"over a link of 1 Gbit/s for each rank a step would take {seconds * 1e3:.1f} ms", flush=True)
    # gloo's threads sometimes abort a finished process while the interpreter shuts down; os._exit skips the shutdown.
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)
