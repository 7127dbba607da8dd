"""What the ranks that `launch_distributed` starts are given, and the weights to which they train."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import nn

from judging.sampling import orders
from lockstep.grading import Grader

SAMPLES, BATCH, RATE = 97, 32, 0.1  # three ranks make two steps an epoch, two ranks two, one rank four
BUFFER = "batches"  # the model counts its steps in it, in int64


def dataset(grader: Grader) -> dict[str, torch.Tensor]:
    """A task that a linear net can learn; drawn anew for every seed."""
    generator = grader.generator("data")
    features = torch.randn(SAMPLES, 6, generator=generator)
    return {"x": features, "y": (features @ torch.randn(6, 3, generator=generator)).argmax(1)}


@lru_cache(64)
def right_weights(grader: Grader, world: int, epochs: int, rough: bool = False) -> dict[str, torch.Tensor]:
    """What training on `world` ranks must return: computed in one process on the joined batches."""
    x, y = dataset(grader).values()
    net = nn.Linear(6, 3, dtype=torch.float64)
    x = x.double()
    with torch.no_grad():
        net.weight.copy_(torch.linspace(-0.5, 0.5, 18).view(3, 6))
        net.bias.zero_()
    optimizer = torch.optim.SGD(net.parameters(), RATE)
    for dealt in orders(SAMPLES, world, epochs):
        for start in range(0, len(dealt[0]), BATCH):
            shares = [order[start : start + BATCH] for order in dealt]
            optimizer.zero_grad()
            (sum(nn.functional.cross_entropy(net(x[share]), y[share]) for share in shares) / world).backward()  # type: ignore[union-attr]
            optimizer.step()
    trained = net.state_dict().items()
    weights = {f"{layer}.{name}": value.detach() for layer in ("submodule", "tied") for name, value in trained}
    steps = torch.tensor(epochs * math.ceil(SAMPLES / (world * BATCH)))
    weights |= {BUFFER: steps, "table": torch.zeros(10_000, dtype=torch.float64)}
    return weights | ({"rough": torch.tensor(0.5, dtype=torch.bfloat16)} if rough else {})


def port_was_taken(error: str) -> bool:
    """Whether an error says that another program has the port."""
    return "EADDRINUSE" in error or "address already in use" in error.lower()
