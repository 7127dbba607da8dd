# style: no wrapper, the gradients are averaged by hand in every step
"""Case: two ranks, twice the price, nothing gained.

“We moved to two GPUs. Each prints a loss, both go down, and the model we save is no better than with one.”

    ./lockstep run -n 2 exercises/clinic/bypassed.py

Say what is wrong, in CAUSE and RANK below (exercises/clinic/README.md lists the causes). Then fix the job. `main()`
must still return the same things.
"""

import os

import clinic_data
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

CAUSE = "wrapper-bypassed"
RANK = "all"


class Classifier(nn.Module):
    """A linear model that knows its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(clinic_data.FEATURES, clinic_data.CLASSES)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """(N, 8) float32 to (N, 3)."""
        return self.layer(features)

    def loss(self, features: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        """The mean cross-entropy of a batch."""
        return nn.functional.cross_entropy(self(features), classes)


def main() -> dict[str, object]:
    """Train two epochs. Returns the model and the last loss."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Classifier()
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    records = clinic_data.Records(48)
    sampler = DistributedSampler(records)
    loader = DataLoader(records, batch_size=8, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for features, classes in loader:
            optimizer.zero_grad()
            loss = model.loss(features, classes)
            loss.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
            optimizer.step()
        print(f"rank {rank}, epoch {epoch}: loss {loss.item():.3f}")
    dist.destroy_process_group()
    return {"model": model, "loss": loss.item()}


if __name__ == "__main__":
    main()
