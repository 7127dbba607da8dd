"""Case: it knows when to stop, they say.

“Why train on when the model is good enough? Each rank has its own validation records, and stops when the loss on them is
low enough. The sooner one rank prints that it is done, the longer I wait for the job.”

    ./lockstep run -n 3 exercises/clinic/early_stop.py

Say what is wrong, in CAUSE and RANK below (exercises/clinic/README.md lists the causes). Then fix the job: it still
stops when the model is good enough on the validation records. `main()` must still return the same things.
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

GOOD_ENOUGH = 0.7
EPOCHS = 30


def validation_records(rank: int, world_size: int) -> clinic_data.Records:
    """The 24 records that this rank validates on. Your ticket decides which part of the set it has."""
    return clinic_data.Records(24, seed=100 + (rank + clinic_data.draw("early_stop", world_size)) % world_size)


@torch.no_grad()
def validation_loss(model: nn.Module, records: clinic_data.Records) -> torch.Tensor:
    """The mean loss on these records, as a scalar tensor."""
    return nn.functional.cross_entropy(model(records.features), records.classes)


def main() -> dict[str, object]:
    """Train until the model is good enough. Returns it, and how many epochs this rank trained."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(nn.Linear(clinic_data.FEATURES, clinic_data.CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    records, held_out = clinic_data.Records(48), validation_records(rank, world_size)
    sampler = DistributedSampler(records)
    loader = DataLoader(records, batch_size=8, sampler=sampler)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for features, classes in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(features), classes).backward()
            optimizer.step()
        loss = validation_loss(model.module, held_out)
        if loss < GOOD_ENOUGH:
            print(f"rank {rank}: good enough after {epoch + 1} epochs")
            break
    dist.barrier()
    dist.destroy_process_group()
    return {"model": model.module, "epochs": epoch + 1}


if __name__ == "__main__":
    main()
