# style: the records are cut as tensors, not read by a DataLoader
"""Case: it trains, and then never ends.

“One shard per rank, as it came from the labeler. The loss goes down nicely. Then nothing, until you kill it.”

    ./lockstep run -n 3 exercises/clinic/short_shard.py

Say what is wrong, in CAUSE and RANK below (exercises/clinic/README.md lists the causes). Then fix the job, so that
every record that was labeled is still trained on. `main()` must still return the same things.
"""

import os

import clinic_data
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

CAUSE = "uneven-data"
RANK = 0


def shard(rank: int, world_size: int) -> clinic_data.Records:
    """The records that were labeled for this rank: 32 each, but one labeler went home early."""
    missing = 8 if rank == clinic_data.draw("short_shard", world_size) else 0
    return clinic_data.Records(32 - missing, seed=rank)


def main() -> dict[str, object]:
    """Train one epoch. Returns the model and how many steps this rank took."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(nn.Linear(clinic_data.FEATURES, clinic_data.CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mine = shard(rank, world_size)
    order = torch.randperm(len(mine))
    loader = list(zip(mine.features[order].split(4), mine.classes[order].split(4)))
    steps = 0
    with Join([model]):
        for features, classes in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(features), classes)
            loss.backward()
            optimizer.step()
            steps += 1
    if rank == 0:
        print(f"{steps} steps, loss {loss.item():.3f}")
    dist.barrier()
    dist.destroy_process_group()
    return {"model": model.module, "steps": steps}


if __name__ == "__main__":
    main()
