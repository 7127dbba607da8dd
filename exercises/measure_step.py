"""Exercise measure_step: what communication really costs, how well it scales, and what the next run will take.

Chapter 4, "Scaling". Three functions that go together: measure a step with and without its communication, compare runs
on different numbers of ranks, and predict a run that nobody has made yet. To see the first at work on two ranks:

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

WARM_UP = 2  # steps of each kind: DDP's first has everything in one bucket, in the second it builds its buckets anew
BYTES = 4  # of a float32
BACKWARD = 2 / 3  # of the computing: twice forward's multiplications, for gradients by inputs and by weights


@dataclass(frozen=True)
class Measurement:
    """Seconds of a step: `step` with the synchronisation of gradients, `alone` without."""

    step: float
    alone: float

    @property
    def exposed(self) -> float:
        """Seconds of communication that nothing hides: what a step would be shorter without it."""
        return self.step - self.alone


def exposed_communication(
    step: Callable[[], object],
    ddp_model: DistributedDataParallel,
    repeats: int = 9,
    clock: Callable[[], float] = time.perf_counter,
) -> Measurement:
    """Measure a step with the synchronisation of its gradients, and the same step in `no_sync()`. Called on every rank.

    - At least two steps of each kind come first and are not counted.
    - Then steps of the two kinds alternate, `repeats` of each, so that a machine that gets slower does so for both.
    - Ranks begin every step together, after a barrier. Only `step()` stands between the two readings of `clock`: no
      barrier, and no zeroing of gradients. Each step begins without gradients, or with zeros.
    - What the rest of the machine does only ever adds time. So the minimum counts, for each kind by itself.
    - A step is over when it is over on the slowest rank: all ranks return the same numbers, the largest.
    - Afterwards the model is as it was: gradients (also those that were None), buffers, and it synchronises.

    Args:
        step: runs forward and backward of one batch through `ddp_model`. It neither clears gradients nor updates.
        ddp_model: the wrapped model.
        repeats: how many steps of each kind count.
        clock: returns seconds.

    Returns:
        The seconds of a step of either kind.
    """
    raise NotImplementedError("measure_step: measure a step with synchronisation and without")


def scaling_efficiency(seconds: Mapping[int, float], mode: str) -> dict[int, float]:
    """How much of each rank's speed is left, compared with the run on the fewest ranks. 1 is perfect.

    Efficiency is samples per second per rank, divided by the same of the run on the fewest ranks; that run need not be
    one on a single rank.

    Args:
        seconds: by the number of ranks, the seconds of one step.
        mode: "strong" when all these runs had the same global batch, so that each of n ranks did one n-th of it; "weak"
            when each rank had the same batch of its own, so that n ranks did n times as much.

    Returns:
        The efficiency by the number of ranks, as a fraction.

    Raises:
        ValueError: for another mode, for no run at all, and for a time that is not positive.
    """
    raise NotImplementedError("measure_step: compare samples per second per rank")


def predict_step(
    parameters: int, ranks: int, bandwidth: float, latency: float, compute: float, buckets: int = 1
) -> float:
    """Seconds of a step of data-parallel training, by a model that one can do on paper.

    - A parameter's gradient is a float32. They travel in `buckets` equal buckets, one after the other.
    - A ring all-reduce of S bytes takes 2(N-1) rounds. In each of them every rank sends S/N bytes over its own link, and
      waits for one latency.
    - Two thirds of the computing is backward, after the forward. The i-th of B buckets is complete when i/B of backward
      is done, and travels from then on, as soon as the one before it has arrived.
    - The step is over when the last bucket has arrived. With one bucket, nothing is hidden.

    Where all ranks share one link of R bytes/s, as on a throttled loopback, each has R / ranks of it.

    Args:
        parameters: how many numbers the gradients have in all.
        ranks: N. With one rank nothing is sent.
        bandwidth: bytes per second that a rank can send over its link, while it receives as many.
        latency: seconds that each round costs whatever its size.
        compute: seconds of forward and backward on one rank, without any communication.
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
    # gloo's threads now and then abort a finished process while the interpreter shuts down: leave without that.
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)
