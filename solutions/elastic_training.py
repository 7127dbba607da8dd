"""Exercise elastic_training: a job that is killed, or asked to stop, restarts and continues.

Chapter 5, "Elastic restarts". torchrun restarts all ranks when one of them dies. To see that, start this, and kill one
of the ranks that it names (`kill -9 PID`) while it runs:

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --nproc-per-node=2 --max-restarts=3 exercises/elastic_training.py /tmp/elastic

The variable gives each restart its own store. Without it, the new ranks may read the dead ranks' addresses from
the launcher's store, and restarts fail with "Connection refused" (PyTorch issue 135712; seen with torch 2.13).

`kill -TERM PID` asks one rank to stop: all ranks stop, and the state is saved. Start it again, perhaps with
`--nproc-per-node=4`, and it continues from there.

You don't need torch.distributed.checkpoint for that. Under DDP every rank holds the whole state, so a file that one
rank writes fits any number of ranks. torch.distributed.checkpoint is for states that are sharded over the ranks (FSDP)
and have to be resharded for a different number.
"""

import os
import signal  # solution-only
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType  # solution-only

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from checkpoint import load_latest, save_checkpoint  # solution-only
from torch.nn.parallel import DistributedDataParallel as DDP  # solution-only
from torch.optim import Optimizer
from torch.utils.data import (
    Dataset,
    TensorDataset,
    default_collate,  # solution-only
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
    """Train with DDP from the newest checkpoint in `folder` to step `steps`. Every rank of a group calls it.

    Only the contents of `folder` matter, not what ended the job: a job that torchrun restarted, that SLURM requeued or
    that you started by hand continues after the last saved step. If the folder is empty or doesn't exist, the job
    starts at step 0.

    The steps:

    - A step uses `batch_size` samples over all ranks, an equal part on each; the loss is `F.cross_entropy`, and the
      gradient is that of the mean over all `batch_size` samples.
    - The samples of step s depend on `seed`, s and the dataset's length alone. They are the same after a restart and on
      a different number of ranks.
    - An epoch has `len(dataset) // batch_size` steps and uses no sample twice; samples left over are dropped. Each
      epoch has its own order.

    The checkpoints, by `save_checkpoint` and `load_latest` of the exercise `checkpoint`:

    - Save after every `save_every` steps, counted from the start of training, and after the last step.
    - SIGTERM and SIGUSR1 ask the job to stop, even while `make` runs; the signal may reach all ranks or only one. All
      ranks stop after the same step: the current one or, at the latest, the next. Then they save and return. A signal
      that comes again changes nothing.

    However often it is interrupted, a run on the same number of ranks ends bit for bit like an uninterrupted one. On a
    different number of ranks the sums are added in a different order, so the weights differ in their last bits.

    Args:
        folder: the folder of the checkpoints.
        make: called without arguments, returns the model, with equal weights on all ranks and in training mode, and
            its optimizer. The model has no randomness, no submodule called `module`, and no buffer that depends on the
            data.
        dataset: pairs of an input and a class, without randomness.
        steps: the number of steps of the whole training, the same at every start.
        batch_size: samples per step over all ranks; a multiple of the number of ranks.
        save_every: the number of steps from one checkpoint to the next.
        seed: determines the order of the samples.

    Returns:
        The number of steps done so far, earlier runs included: `steps`, or fewer if the job was asked to stop.

    Raises:
        ValueError: `batch_size` isn't a multiple of the number of ranks.
    """
    # --- solution: train, save, stop when asked to, and resume from the folder ---
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if batch_size % world_size:
        raise ValueError(f"{batch_size} samples cannot be dealt out evenly to {world_size} ranks")
    asked = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked  # This runs between any two instructions: no place to save, or to call a collective.
        asked = True

    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, ask)

    model, optimizer = make()
    device = next(model.parameters()).device
    step = 0
    saved = load_latest(folder)
    if saved is not None:
        step = saved["step"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    # With unused parameters to look for, DDP leaves its buckets alone: a restarted job adds in the same order.
    ddp = DDP(model, device_ids=[device.index] if device.type == "cuda" else None, find_unused_parameters=True)

    stopping = False
    while step < steps and not stopping:
        share = samples_of(step, len(dataset), batch_size, seed)[rank::world_size]  # type: ignore[arg-type]
        inputs, targets = default_collate([dataset[index] for index in share])
        optimizer.zero_grad()
        F.cross_entropy(ddp(inputs.to(device)), targets.to(device)).backward()
        optimizer.step()
        step += 1
        # One rank that was asked is enough. All learn of it here, behind the same step.
        anyone = torch.tensor(int(asked), device=device)
        dist.all_reduce(anyone, op=dist.ReduceOp.MAX)
        stopping = bool(anyone.item())
        if stopping or step % save_every == 0 or step == steps:
            save_checkpoint(folder, {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()})
    return step
    # --- end ---


# --- solution-only ---
def samples_of(step: int, length: int, batch_size: int, seed: int) -> list[int]:
    """The samples of a step, of all ranks: a part of its epoch's permutation. No rank's number goes into it."""
    epoch, done = divmod(step, length // batch_size)
    order = torch.randperm(length, generator=torch.Generator().manual_seed(seed + epoch))
    return order[done * batch_size : (done + 1) * batch_size].tolist()


# --- end ---
class Slow(TensorDataset):
    """A slow dataset, so that you have time to kill a rank."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        time.sleep(float(os.environ.get("SECONDS_A_SAMPLE", "0.05")))
        return super().__getitem__(index)


def example() -> tuple[Callable[[], tuple[nn.Module, Optimizer]], Dataset[tuple[torch.Tensor, torch.Tensor]]]:
    """A small model, and 96 points in two classes, divided by a plane."""
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
    # gloo's threads sometimes abort a finished process while the interpreter shuts down; os._exit skips the shutdown.
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)

# lockstep-canary: 188ae3fb3c277d41
