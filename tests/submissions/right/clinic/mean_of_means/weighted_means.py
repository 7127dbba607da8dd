# style: each rank's mean is weighted by its share of the labels
"""Case: the site with two labels.

“One site a rank, batches of 8. One site had labels for 2 records of each batch only. Its few records pull at the model
as hard as all those of another site. One process that takes the same batches together gets a different model.”

    ./lockstep run -n 2 exercises/clinic/mean_of_means.py

Say what is wrong, in CAUSE and RANK below (exercises/clinic/README.md lists the causes). Then mend the job: every
labeled record weighs the same, as on one process. `main()` goes on starting from seed 0 and returning the same things.
"""

import os

import torch
import torch.distributed as dist
import clinic_data
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

CAUSE = "mean-of-means"
RANK = "all"
UNLABELLED = -100


def main() -> dict[str, object]:
    """Train one epoch. Returns the model and how many labeled records this rank trained on."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    labeled = 2 if rank == clinic_data.draw("mean_of_means", world_size) else 8  # of each batch
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(nn.Linear(clinic_data.FEATURES, clinic_data.CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    seen = 0
    for features, classes in DataLoader(clinic_data.Records(32, seed=rank), batch_size=8):
        classes[labeled:] = UNLABELLED
        optimizer.zero_grad()
        total = (classes != UNLABELLED).sum()
        dist.all_reduce(total)
        loss = nn.functional.cross_entropy(model(features), classes, ignore_index=UNLABELLED)
        loss = loss * (classes != UNLABELLED).sum() / total * world_size
        loss.backward()
        optimizer.step()
        seen += int((classes != UNLABELLED).sum())
    print(f"rank {rank}: {seen} labeled records, loss {loss.item():.3f}")
    dist.destroy_process_group()
    return {"model": model.module, "seen": seen}


if __name__ == "__main__":
    main()
