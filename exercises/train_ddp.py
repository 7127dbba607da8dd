"""Exercise train_ddp: train one model on every rank's share of the data.

Chapter 2, "Sharding" to "Cleanup". To see it at work on two ranks:

    torchrun --nproc-per-node=2 exercises/train_ddp.py
"""

import os
import sys
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
    raise NotImplementedError("train_ddp: train with DDP")


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
