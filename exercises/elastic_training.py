"""Exercise elastic_training: a job that is killed, or asked to go, comes back and goes on.

Chapter 5, "Elastic restarts". torchrun starts all ranks anew when one of them dies. To see it, start this, and kill one
of the ranks it names (`kill -9 PID`) while it runs:

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --nproc-per-node=2 --max-restarts=3 exercises/elastic_training.py /tmp/elastic

The variable gives each restart a store of its own. Without it the new ranks may find the addresses of the dead ones in
the launcher's store and lose a restart, or all, on "Connection refused" (PyTorch issue 135712; seen with torch 2.13).

`kill -TERM PID` asks one rank to stop: all save and leave. Start it again, perhaps with `--nproc-per-node=4`, and it
goes on from there.

torch.distributed.checkpoint is not needed for that: under DDP every rank holds the whole state, so that a file which one
rank writes fits any number of them. It is for a state that is itself dealt out to the ranks (FSDP), and that another
number of them has to cut up anew.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.optim import Optimizer
from torch.utils.data import (
    Dataset,
    TensorDataset,
)


def train(
    folder: str | os.PathLike[str],
    make: Callable[[], tuple[nn.Module, Optimizer]],
    dataset: Dataset[tuple[torch.Tensor, torch.Tensor]],
    *,
    steps: int,
    batch_size: int,
    save_every: int,
    seed: int,
) -> int:
    """Train with DDP up to step `steps`, from the newest checkpoint in `folder` on. Called on every rank, in a group.

    Whatever has ended the job before, what counts is what lies in `folder`: a job that torchrun has restarted, one that
    was put back into SLURM's queue and one that somebody has started by hand all go on behind the last step saved. A
    folder that is empty or not there is a job that begins.

    The steps:

    - A step trains on `batch_size` samples of all ranks together, each rank on an equal part of them; the loss is
      `F.cross_entropy`, the gradient that of the mean over all `batch_size` samples.
    - Which samples step s has follows from `seed`, s and the dataset's length alone. It is the same after a restart, and
      on another number of ranks.
    - Within an epoch no sample comes twice; an epoch has `len(dataset) // batch_size` steps, and what is left over then
      is not seen in it. Each epoch has an order of its own.

    The checkpoints, by `save_checkpoint` and `load_latest` of the exercise `checkpoint`:

    - One is saved when `save_every` steps, or a multiple of it, have been done in all, and one after the last step.
    - SIGTERM and SIGUSR1 ask the job to stop; each rank may get one, or one rank alone. In the step that is under way,
      or at the latest in the one after it, all ranks agree to stop: behind the same step. It is saved, and all return.

    A run on as many ranks as before ends with the same bits as one that was never interrupted, however often it was. On
    another number of ranks the sums are added in another order, so the weights differ in their last bits.

    Args:
        folder: where the checkpoints are.
        make: called without arguments, makes the model, with equal weights on all ranks, and its optimizer. There is no
            randomness in the model.
        dataset: gives pairs of an input and a class, without randomness.
        steps: how many steps the whole training has.
        batch_size: samples per step, of all ranks together; a multiple of the number of ranks.
        save_every: steps from one checkpoint to the next.
        seed: what the order of the samples comes from.

    Returns:
        How many steps have been done in all: `steps`, or fewer when the job was asked to stop.

    Raises:
        ValueError: `batch_size` is no multiple of the number of ranks.
    """
    raise NotImplementedError("elastic_training: train, save, stop when asked to, and go on from what the folder holds")


class Slow(TensorDataset):
    """Takes its time, so that there is somebody to kill."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        time.sleep(float(os.environ.get("SECONDS_A_SAMPLE", "0.05")))
        return super().__getitem__(index)


def example() -> tuple[Callable[[], tuple[nn.Module, Optimizer]], Dataset[tuple[torch.Tensor, torch.Tensor]]]:
    """A small model, and 96 points of which one half lies above a line."""
    inputs = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))

    def make() -> tuple[nn.Module, Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    return make, Slow(inputs, (inputs.sum(1) > 0).long())


if __name__ == "__main__":
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)
    place = Path(sys.argv[1] if len(sys.argv) > 1 else "elastic")
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    print(f"rank {dist.get_rank()}, process {os.getpid()}, restart {attempt}", flush=True)
    make, dataset = example()
    done = train(place, make, dataset, steps=60, batch_size=12, save_every=5, seed=1)
    print(f"rank {dist.get_rank()}: {done} of 60 steps are done", flush=True)
    # gloo's threads now and then abort a finished process while the interpreter shuts down: leave without that.
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)
