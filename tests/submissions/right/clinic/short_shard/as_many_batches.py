# style: as many batches on every rank, of as many records as it has for each
"""Case: it trains, and then never ends.

“One shard a rank, as they came from the labeler. The loss goes down nicely. Then nothing, until somebody kills it.”

    ./lockstep run -n 3 exercises/clinic/short_shard.py

Say what is wrong, in CAUSE and RANK below (exercises/clinic/README.md lists the causes). Then mend the job, so that every
record that was labeled is still trained on. `main()` goes on returning the same things.
"""

import os

import torch
import torch.distributed as dist
import clinic_data
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
    batches = torch.tensor(len(shard(rank, world_size)) // 4)
    dist.all_reduce(batches, dist.ReduceOp.MAX)
    mine = shard(rank, world_size)
    parts = [list(range(len(mine)))[part :: int(batches)] for part in range(int(batches))]
    loader = DataLoader(mine, batch_sampler=parts)
    steps = 0
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
