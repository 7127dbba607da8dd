"""Exercise train_ddp: train one model on every rank's share of the data.

Chapter 2, "Sharding" to "Cleanup". To see it at work on two ranks:

    torchrun --nproc-per-node=2 exercises/train_ddp.py
"""

import os
import sys
import traceback  # solution-only
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from setup_ddp import cleanup_ddp, setup_ddp
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def train_ddp(
    rank: int,
    world_size: int,
    model_class: Callable[[], nn.Module],
    data: TensorDataset,
    epochs: int,
    *,
    batch_size: int = 32,
    lr: float = 0.1,
) -> nn.Module:
    """Train a classifier with DDP and return it. Every rank calls it; only `rank` differs between them.

    Join the process group with `setup_ddp`, and leave it at the end, even when training fails or is interrupted. After
    an error, don't wait for other ranks. (If the caller already belongs to a group, setup_ddp raises. Then leave the
    caller's group open.)

    The model is `model_class()`, moved to this rank's device and then wrapped in DDP, or in your own class that
    synchronizes weights and gradients as DDP does. Use plain SGD on the mean cross-entropy of each batch. In every
    epoch the samples are shuffled again, and each goes to one rank. If they don't divide evenly, a few are repeated so
    that every rank takes the same number of steps. The order must not depend on the global random state.

    After each epoch rank 0 prints one line. Nothing else goes to stdout on any rank:

        epoch 0: loss 2.3021

    The loss is the mean over all samples that the ranks trained on in that epoch, repeated ones included, to four
    decimals.

    Args:
        rank: the global rank, 0 to world_size - 1.
        world_size: the number of ranks that train together.
        model_class: called without arguments, returns a module that turns inputs into logits of shape (batch, classes).
        data: at least world_size pairs of an input of any shape and a class (an int64 number).
        epochs: the number of passes over the data, at least 1.
        batch_size: samples per rank and step; a step uses world_size * batch_size samples.
        lr: the learning rate.

    Returns:
        The trained module on this rank's device: the model itself, not the DDP wrapper. Its parameters are equal on all
        ranks.

    Raises:
        Whatever setup_ddp, the model or the data raises.
    """
    # --- solution: train with DDP ---
    setup_ddp(rank, world_size)
    ddp = None
    try:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        # Moved before it is wrapped: DDP hangs its hooks on the parameters it finds, and a later move can lose them.
        model = model_class().to(device)
        ddp = DDP(model, device_ids=[device.index] if device.type == "cuda" else None)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=lr)
        sampler = DistributedSampler(data, num_replicas=world_size, rank=rank)
        loader = DataLoader(data, batch_size=batch_size, sampler=sampler)

        for epoch in range(epochs):
            sampler.set_epoch(epoch)  # it shuffles with seed + epoch, alike on all ranks
            total = torch.zeros(2, dtype=torch.float64, device=device)  # the sum of the losses, the number of samples
            for inputs, targets in loader:
                inputs, targets = inputs.to(device), targets.to(device)
                optimizer.zero_grad()
                loss = F.cross_entropy(ddp(inputs), targets)
                loss.backward()  # the gradients are averaged over the ranks in here
                optimizer.step()
                total[0] += loss.detach() * len(targets)
                total[1] += len(targets)
            dist.all_reduce(total)  # a collective: every rank takes part, also those that print nothing
            if rank == 0:
                print(f"epoch {epoch}: loss {total[0] / total[1]:.4f}", flush=True)
        return model
    except BaseException as error:
        # The frames of an error that came from inside the wrapper would keep the wrapper alive (see below).
        traceback.clear_frames(error.__traceback__)
        raise
    finally:
        # The wrapper goes before the group: its destructor would otherwise end the group's threads while it holds the
        # interpreter lock that these threads may be waiting for, and now and then the process would hang.
        del ddp
        cleanup_ddp()
    # --- end ---


class SmallNet(nn.Module):
    """64 pixels in, 10 classes out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.layers(pixels)


def digits() -> TensorDataset:
    """1797 handwritten digits: pixels (1797, 64) between 0 and 1, classes (1797,)."""
    from sklearn.datasets import load_digits

    pixels, classes = load_digits(return_X_y=True)
    return TensorDataset(torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(classes))


if __name__ == "__main__":
    train_ddp(int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)), SmallNet, digits(), epochs=5)
    # gloo's threads sometimes abort a finished process while the interpreter shuts down; os._exit skips the shutdown.
    sys.stdout.flush()
    os._exit(0)

# lockstep-canary: 6e9ffa4969f348b7
