"""Case: the site with two labels.

“One site per rank, batches of 8. One site had labels for only 2 records of each batch. Its few records pull at the model
as hard as all those of another site. One process that takes the same batches together gets a different model.”

    ./lockstep run -n 2 exercises/clinic/mean_of_means.py

Say what is wrong, in CAUSE and RANK below (exercises/clinic/README.md lists the causes). Then fix the job: every
labeled record weighs the same, as on one process. `main()` must still start from seed 0 and return the same things.
"""

import os

import clinic_data
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

# --- mended: the diagnosis, for ticket 1 ---
CAUSE = "mean-of-means"
RANK = "all"
# --- was ---
# CAUSE = "?"
# RANK = "?"  # its number, or "all"
# --- end ---
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
        # --- mended: a sum here, divided by what all ranks have together; DDP divides by the ranks ---
        total = (classes != UNLABELLED).sum()
        dist.all_reduce(total)
        loss = nn.functional.cross_entropy(model(features), classes, ignore_index=UNLABELLED, reduction="sum")
        loss = loss * world_size / total
        # --- was ---
        # loss = nn.functional.cross_entropy(model(features), classes, ignore_index=UNLABELLED)
        # --- end ---
        loss.backward()
        optimizer.step()
        seen += int((classes != UNLABELLED).sum())
    print(f"rank {rank}: {seen} labeled records, loss {loss.item():.3f}")
    dist.destroy_process_group()
    return {"model": model.module, "seen": seen}


if __name__ == "__main__":
    main()

# lockstep-canary: e56a4b4f0b8f4c61
