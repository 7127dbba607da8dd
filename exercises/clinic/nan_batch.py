"""Case: three machines learn less than one.

“On one machine it trains and ends. On three the curve is worse, and at the end of the epoch all ranks wait.”

    ./lockstep run -n 3 exercises/clinic/nan_batch.py

Say what is wrong, in CAUSE and RANK below (exercises/clinic/README.md lists the causes). Then fix the job: it trains
a whole epoch, no record twice or made up, and no NaN gets into the weights. `main()` must still return the same things.
"""

import math
import os

import clinic_data
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

CAUSE = "?"
RANK = "?"  # its number, or "all"


def measurements(rank: int, world_size: int) -> clinic_data.Records:
    """What the sensor at this rank's machine measured: 32 records. One of the sensors failed for a moment."""
    records = clinic_data.Records(32, seed=rank)
    if rank == clinic_data.draw("nan_batch", world_size):
        records.features[4 + clinic_data.draw("nan_batch: when", 24)] = math.nan
    return records


def main() -> dict[str, object]:
    """Train one epoch. Returns the model and how many steps this rank took."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(nn.Linear(clinic_data.FEATURES, clinic_data.CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = 0
    for features, classes in DataLoader(measurements(rank, world_size), batch_size=4):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(features), classes)
        if not torch.isfinite(loss):
            continue
        loss.backward()
        optimizer.step()
        steps += 1
    print(f"rank {rank}: {steps} steps, loss {loss.item():.3f}")
    dist.barrier()
    dist.destroy_process_group()
    return {"model": model.module, "steps": steps}


if __name__ == "__main__":
    main()
