# style: no DDP: broadcast and averaged by name
"""Case: left ear, right ear.

“Two towers of one shape, one for each microphone. The order in which they are built comes from a list in the host's
settings, and doesn't matter. Since we moved to three hosts, one host's model hears left with the right ear.”

    ./lockstep run -n 3 exercises/clinic/register_order.py

Say what is wrong, in CAUSE and RANK below (exercises/clinic/README.md lists the causes). Then fix the job, whichever
hosts it is given. `main()` must still return the same things.
"""

import os

import clinic_data
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

CAUSE = "order-of-registration"
RANK = 0


class Ears(nn.Module):
    """One tower for each name; each hears the features in its own way."""

    def __init__(self, towers: list[str]) -> None:
        super().__init__()
        self.towers = nn.ModuleDict({name: nn.Linear(clinic_data.FEATURES, clinic_data.CLASSES) for name in towers})

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """(N, 8) float32 to (N, 3)."""
        return self.towers["left"](features) + self.towers["right"](features.abs())


def main() -> dict[str, object]:
    """Train two epochs. Returns the model."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    usual, other = {"towers": ["left", "right"]}, {"towers": ["right", "left"]}
    settings = clinic_data.settings("register_order", rank, world_size, usual, other)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Ears(settings["towers"])
    named = sorted(model.named_parameters())
    for _, p in named:
        dist.broadcast(p.data, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    records = clinic_data.Records(48)
    sampler = DistributedSampler(records)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for features, classes in DataLoader(records, batch_size=8, sampler=sampler):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(features), classes)
            loss.backward()
            for _, p in named:
                dist.all_reduce(p.grad)
                p.grad /= world_size
            optimizer.step()
        print(f"rank {rank}, epoch {epoch}: loss {loss.item():.3f}")
    dist.destroy_process_group()
    return {"model": model}


if __name__ == "__main__":
    main()
