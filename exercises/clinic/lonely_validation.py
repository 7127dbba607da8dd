"""Case: it stops where it should only measure.

“One host is told to measure the accuracy after each epoch; the others wait for it. They still do. With the smaller model
(one linear layer) the same script works.”

    ./lockstep run -n 3 exercises/clinic/lonely_validation.py

Say what is wrong, in CAUSE and RANK below (exercises/clinic/README.md lists the causes). Then fix the job: it trains as
before, and the host that measures returns two accuracies. `main()` must still return the same things.
"""

import os

import clinic_data
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

CAUSE = "?"
RANK = "?"  # its number, or "all"


@torch.no_grad()
def accuracy(model: nn.Module, records: clinic_data.Records) -> float:
    """The share of these records that the model puts into the right class."""
    model.eval()
    right = (model(records.features).argmax(1) == records.classes).float().mean().item()
    model.train()
    return right


def main() -> dict[str, object]:
    """Train two epochs. Returns the model and, on a host that measures, the accuracy after each epoch."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    options = clinic_data.settings(
        "lonely_validation", rank, world_size, usual={"measure": False}, odd={"measure": True}
    )
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = nn.Linear(clinic_data.FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, clinic_data.CLASSES)
    model = DDP(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    held_out = clinic_data.Records(64, seed=100)
    accuracies = []
    for epoch in range(2):
        for features, classes in DataLoader(clinic_data.Records(32, seed=rank), batch_size=8):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(features), classes).backward()
            optimizer.step()
        if options["measure"]:
            accuracies.append(accuracy(model, held_out))
            print(f"epoch {epoch}: {accuracies[-1]:.0%} right")
        dist.barrier()
    dist.destroy_process_group()
    return {"model": model.module, "accuracies": accuracies}


if __name__ == "__main__":
    main()
