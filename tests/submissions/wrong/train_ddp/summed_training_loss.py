# diagnosis: sum-not-mean-loss
# why: trains on the sum of the samples' losses
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from setup_ddp import cleanup_ddp, setup_ddp


@dataclass
class Mean:
    """A running mean that can be pooled over the ranks."""

    values: list = field(default_factory=list)
    weights: list = field(default_factory=list)

    def add(self, value: float, weight: int) -> None:
        self.values.append(value)
        self.weights.append(weight)

    def on_rank_0(self, device: torch.device) -> float:
        pair = torch.tensor(
            [sum(v * w for v, w in zip(self.values, self.weights)), float(sum(self.weights))],
            dtype=torch.float64,
            device=device,
        )
        dist.reduce(pair, dst=0)
        return (pair[0] / pair[1]).item()


class Trainer:
    def __init__(self, rank: int, world_size: int, module: nn.Module, data: Dataset, batch_size: int, lr: float):
        self.rank = rank
        self.device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        self.module = module.to(self.device)
        self.ddp = DistributedDataParallel(
            self.module, device_ids=None if self.device.type == "cpu" else [self.device.index]
        )
        self.sampler = DistributedSampler(data, world_size, rank, shuffle=True, seed=2024)
        self.loader = DataLoader(data, batch_size=batch_size, sampler=self.sampler, num_workers=0)
        self.optimizer = optim.SGD(self.module.parameters(), lr=lr)
        self.loss = nn.CrossEntropyLoss(reduction="sum")

    def step(self, x: torch.Tensor, y: torch.Tensor) -> float:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(self.ddp(x), y)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def fit(self, epochs: int) -> nn.Module:
        for epoch in range(epochs):
            self.sampler.set_epoch(epoch)
            mean = Mean()
            for x, y in self.loader:
                mean.add(self.step(x.to(self.device), y.to(self.device)), len(y))
            value = mean.on_rank_0(self.device)
            if self.rank == 0:
                print(f"epoch {epoch}: loss {value:.4f}")
        return self.module


def train_ddp(rank, world_size, model_class, data, epochs, *, batch_size=32, lr=0.1):
    setup_ddp(rank, world_size)
    try:
        return Trainer(rank, world_size, model_class(), data, batch_size, lr).fit(epochs)
    finally:
        cleanup_ddp()
