"""Chapter 2's job in one process: the data, the model, one epoch. This file knows nothing about ranks."""

import numpy
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset


def load(file: str = "digits.npz") -> tuple[TensorDataset, TensorDataset]:
    """1500 images of 8×8 pixels to train on and 297 to test on, each with its digit."""
    stored = numpy.load(file)
    x = torch.tensor(stored["images"], dtype=torch.float32) / 16
    y = torch.tensor(stored["labels"])
    return TensorDataset(x[:1500], y[:1500]), TensorDataset(x[1500:], y[1500:])


def net() -> nn.Module:
    """64 pixels in, 10 scores out; 2410 parameters."""
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def train_epoch(model: nn.Module, loader: DataLoader, optimizer: Optimizer) -> Tensor:
    """One pass over the loader. Returns the sum of the samples' losses, and how many samples it saw."""
    device = next(model.parameters()).device
    total = torch.zeros(2, device=device)
    for x, y in loader:
        loss = cross_entropy(model(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += torch.stack([loss.detach() * len(y), torch.tensor(float(len(y)), device=device)])
    return total
