"""Case: more ranks, and the epoch is no shorter.

“We doubled the ranks to halve the epoch. It takes as many steps as before, and the curve lies exactly on the old one.”

    ./lockstep run -n 2 exercises/clinic/same_data.py

Say what is wrong, in CAUSE and RANK below (exercises/clinic/README.md lists the causes). Then fix the job. `main()`
must still return the same things.
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


def place() -> tuple[int, int]:
    """This process's rank and how many there are; (0, 1) on a laptop without a process group."""
    if not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def make_loader(records: clinic_data.Records) -> DataLoader:
    """This rank's part of the records, shuffled, in batches of 8."""
    rank, world_size = place()
    sampler = DistributedSampler(records, num_replicas=world_size, rank=rank)
    return DataLoader(records, batch_size=8, sampler=sampler)


def main() -> dict[str, object]:
    """Train two epochs. Returns the model and how many steps this rank took."""
    loader = make_loader(clinic_data.Records(48))
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(nn.Linear(clinic_data.FEATURES, clinic_data.CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = 0
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for features, classes in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(features), classes)
            loss.backward()
            optimizer.step()
            steps += 1
        print(f"rank {os.environ['RANK']}, epoch {epoch}: {steps} steps, loss {loss.item():.3f}")
    dist.destroy_process_group()
    return {"model": model.module, "steps": steps}


if __name__ == "__main__":
    main()
