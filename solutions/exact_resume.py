"""Exercise exact_resume: an interrupted run ends with the same bits as one that was never interrupted.

Chapter 5, "Resuming mid-epoch". To see it at work on two ranks, interrupted after 7 steps and then resumed:

    torchrun --nproc-per-node=2 exercises/exact_resume.py
"""

import math  # solution-only
import os
import random
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from checkpoint import load_latest, save_checkpoint
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

Parts = tuple[nn.Module, Optimizer, LRScheduler, GradScaler]


def train_step(
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: LRScheduler,
    scaler: GradScaler,
    inputs: torch.Tensor,
    targets: torch.Tensor,
) -> float:
    """One step of the training; given, so that you need not write it. Returns this rank's loss before the step."""
    optimizer.zero_grad()
    loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
    return loss.item()


def train(
    folder: str | os.PathLike[str],
    make: Callable[[], Parts],
    dataset: Dataset[Any],
    *,
    epochs: int,
    batch_size: int,
    save_every: int,
    seed: int,
    stop_after: int | None = None,
) -> nn.Module:
    """Train with DDP, starting from the newest checkpoint in `folder` if there is one. Called on every rank, in a group.

    However often and wherever a run is interrupted, it ends bit for bit like an uninterrupted one: the same weights
    and, on rank 0, the same persistent buffers, from the same samples in the same batches, with the same random numbers.
    That holds for a restart on the same number of ranks, even with more than two.

    The training:

    - First of all, seed Python's, NumPy's and torch's random generators from `seed` and the rank. `make` (the weights),
      the dataset (it may augment its samples) and the model (dropout) use them, and every rank draws its own
      numbers.
    - In epoch e (from 0) rank r's samples are those of `DistributedSampler(dataset, seed=seed)` for epoch e, in batches
      of `batch_size`; the last batch may be smaller. Load each batch in this process (no workers), after the
      step before it. After a restart, don't load the batches of earlier steps again.
    - Each batch goes through `train_step` once. Steps are counted from the start of training, across epochs and restarts.

    The checkpoints, by `save_checkpoint` and `load_latest` of the exercise `checkpoint`:

    - Save after every `save_every` steps, counted from the start of training, and after the last step.
    - With `stop_after`, also save when that many steps have been made, counted over all restarts, and then return.
    - Called again with the same folder, it continues after the last step that was saved. A complete run takes no
      further step; nor does one that has already taken `stop_after` steps or more.

    Args:
        folder: where the checkpoints are.
        make: called without arguments, makes the model, its optimizer, its scheduler (which steps after every step of
            the optimizer) and its gradient scaler, all on this rank's device and in training mode. The model has no
            submodule called `module`.
        dataset: gives pairs of an input and a class. Its length is a multiple of the number of ranks.
        epochs: how often each sample is seen.
        batch_size: samples per rank and step.
        save_every: steps from one checkpoint to the next.
        seed: determines the order of the samples and all random numbers.
        stop_after: stop after this many steps in all, as if the time were up; None: never.

    Returns:
        The model itself, not the DDP wrapper.
    """
    # --- solution: train, save the whole state, and resume where it stopped ---
    rank = dist.get_rank()
    random.seed(seed + rank)
    np.random.seed(seed + rank)
    torch.manual_seed(seed + rank)
    model, optimizer, scheduler, scaler = make()
    device = next(model.parameters()).device
    # After its first step DDP sorts the gradients into new buckets, in the order in which they came. With three ranks
    # or more that changes the order in which an element is summed, and so its last bit: the first step after a restart
    # would not be the step that it repeats. When DDP has to look for unused parameters it leaves the buckets alone.
    ddp = DDP(model, device_ids=[device.index] if device.type == "cuda" else None, find_unused_parameters=True)
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, seed=seed)
    steps_an_epoch = math.ceil(len(sampler) / batch_size)
    last = steps_an_epoch * epochs
    step = 0

    saved = load_latest(folder)
    if saved is not None:
        step = saved["step"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
        scaler.load_state_dict(saved["scaler"])
        set_random_state(saved["random"][rank])  # last: all that was built above has drawn numbers

    for epoch in range(step // steps_an_epoch, epochs):
        sampler.set_epoch(epoch)
        order = list(sampler)[step % steps_an_epoch * batch_size :]  # what this epoch has left
        # An iterator over a DataLoader begins by drawing a number, here from a generator that nobody else uses.
        loader = DataLoader(dataset, batch_size, sampler=order, generator=torch.Generator())
        for inputs, targets in loader:
            if stop_after is not None and step >= stop_after:
                return model
            train_step(ddp, optimizer, scheduler, scaler, inputs.to(device), targets.to(device))
            step += 1
            if step % save_every == 0 or step in (stop_after, last):
                states: list[Any] = [None] * dist.get_world_size()
                dist.all_gather_object(states, random_state())  # only the rank itself knows its own
                state = {
                    "step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict(),
                    "scheduler": scheduler.state_dict(), "scaler": scaler.state_dict(), "random": states,
                }  # fmt: skip
                save_checkpoint(folder, state)
    return model
    # --- end ---


# --- solution-only ---
def random_state() -> dict[str, Any]:
    """The state of all generators of this process, of types that load_latest reads."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    state = {
        "python": random.getstate(),
        "numpy": [kind, keys.tolist(), position, has_gauss, gauss],  # weights_only refuses arrays
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Put all generators of this process back to where `random_state` found them."""
    random.setstate(state["python"])
    np.random.set_state(tuple(state["numpy"]))
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


# --- end ---
def example() -> tuple[Callable[[], Parts], Dataset[Any]]:
    """A small example with everything that has state: dropout, batch norm, momentum, a schedule, a scaler."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(48, 8, generator=generator)
    dataset = TensorDataset(inputs, (inputs.sum(1) > 0).long())

    def make() -> Parts:
        model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.5)
        return model, optimizer, scheduler, GradScaler("cpu", init_scale=8.0, growth_interval=4)

    return make, dataset


if __name__ == "__main__":
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)
    make, dataset = example()
    place = [tempfile.mkdtemp()]
    dist.broadcast_object_list(place, src=0)
    through, interrupted = f"{place[0]}/through", f"{place[0]}/interrupted"
    options = {"epochs": 3, "batch_size": 4, "save_every": 5, "seed": 1}
    one = train(through, make, dataset, **options)
    train(interrupted, make, dataset, **options, stop_after=7)
    other = train(interrupted, make, dataset, **options)
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    drift = max((a - b).abs().max().item() for a, b in pairs)
    print(f"rank {dist.get_rank()}: max |Δw| against the training that ran through: {drift:g}", flush=True)
    # gloo's threads sometimes abort a finished process while the interpreter shuts down; os._exit skips the shutdown.
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)

# lockstep-canary: de9009327ce6aacf
