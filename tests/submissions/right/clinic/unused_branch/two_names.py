# style: two attributes, no list
"""Case: the second step fails.

“We gave the classifier a second hidden layer. It still trains on one GPU. On three, the first step works and the second
does not.”

    ./lockstep run -n 3 exercises/clinic/unused_branch.py

Say what is wrong, in CAUSE and RANK below (exercises/clinic/README.md lists the causes). Then mend the job: both hidden
layers are meant to be trained. `main()` goes on returning the same things.
"""

import os

import torch
import torch.distributed as dist
import clinic_data
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

CAUSE = "unused-parameters"
RANK = "all"

WIDTH = 6


class Classifier(nn.Module):
    """Hidden layers with ReLU, and a linear layer that tells the classes apart."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(clinic_data.FEATURES, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, clinic_data.CLASSES)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """(N, 8) float32 to (N, 3)."""
        return self.head(torch.relu(self.second(torch.relu(self.first(features)))))


def main() -> dict[str, object]:
    """Train one epoch. Returns the model and the last loss."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(Classifier())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    records = clinic_data.Records(48)
    loader = DataLoader(records, batch_size=4, sampler=DistributedSampler(records))
    for features, classes in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(features), classes)
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"loss {loss.item():.3f}")
    dist.destroy_process_group()
    return {"model": model.module, "loss": loss.item()}


if __name__ == "__main__":
    main()
