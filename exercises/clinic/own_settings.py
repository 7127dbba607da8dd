"""Case: two checkpoints of one training.

“Same script, same records, same seed on every host, and the losses look alike. Then we compared the checkpoints of two
hosts, and they were not the same model. We want to start this job on any hosts and get one model.”

    ./lockstep run -n 3 exercises/clinic/own_settings.py

Say what is wrong, in CAUSE and RANK below (exercises/clinic/README.md lists the causes). Then fix the job, so that it
trains to the end whichever hosts it is given. `main()` must still start from seed 0 and return the same things.
"""

import os

import clinic_data
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

CAUSE = "?"
RANK = "?"  # its number, or "all"


def read_settings(rank: int, world_size: int) -> dict[str, float]:
    """What /etc/training.toml of this rank's host says."""
    return clinic_data.settings(
        "own_settings", rank, world_size, {"lr": 0.1, "weight_decay": 0.01}, {"weight_decay": 0.1}
    )


def main() -> dict[str, object]:
    """Train two epochs. Returns the model and the settings that this rank trained with."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(nn.Linear(clinic_data.FEATURES, clinic_data.CLASSES))
    settings = read_settings(rank, world_size)
    optimizer = torch.optim.SGD(model.parameters(), **settings)
    records = clinic_data.Records(48)
    sampler = DistributedSampler(records)
    loader = DataLoader(records, batch_size=8, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for features, classes in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(features), classes)
            loss.backward()
            optimizer.step()
        print(f"rank {rank}, epoch {epoch}: loss {loss.item():.3f}")
    dist.destroy_process_group()
    return {"model": model.module, "settings": settings}


if __name__ == "__main__":
    main()
