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
    """Train a classifier with DDP and return it. Called on every rank, with the same arguments but `rank`.

    It joins the process group with `setup_ddp` and leaves it with `cleanup_ddp`, also when training fails. (Where the
    caller is in a group already, setup_ddp refuses and that group stays as it is.)

    The model is `model_class()`, moved to this rank's device and then wrapped in DDP, or trained as DDP would. It is trained with plain SGD on
    the mean cross-entropy of each batch. Every epoch the samples are shuffled anew and dealt out, each to one rank.
    Where they do not divide by the number of ranks a few come twice, so that all ranks make equally many steps. The
    order must not depend on the global random state.

    After each epoch rank 0 prints one line, and nothing else is printed on any rank:

        epoch 0: loss 2.3021

    That loss is the mean over all samples that all ranks were dealt in the epoch, to four decimals.

    Args:
        rank: the global rank, 0 to world_size - 1.
        world_size: how many ranks train together.
        model_class: called without arguments, makes a module that turns inputs into logits of shape (batch, classes).
        data: pairs of an input, of any shape, and a class as a number of type int64.
        epochs: how often each sample is seen.
        batch_size: samples per rank and step, so that a step learns from world_size * batch_size samples.
        lr: the learning rate.

    Returns:
        The trained module on this rank's device: the model itself, not the DDP wrapper. Its parameters are equal on all
        ranks.

    Raises:
        Whatever setup_ddp, the model or the data raise.
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
    # gloo's threads now and then abort a finished process while the interpreter shuts down: leave without that.
    sys.stdout.flush()
    os._exit(0)
