"""Case: it does not even start.

“At my desk I have started it with mp.spawn for years. On the cluster they want torchrun, and there it hangs before the
first line of output.”

    ./lockstep run -n 3 exercises/clinic/fixed_address.py

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


def setup(rank: int, world_size: int) -> None:
    """Join the process group."""
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "12355"
    dist.init_process_group("gloo", rank=rank, world_size=world_size)


def main() -> dict[str, object]:
    """Train one epoch. Returns the model and the last loss."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    setup(rank, world_size)
    torch.manual_seed(0)
    model = DDP(nn.Linear(clinic_data.FEATURES, clinic_data.CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    records = clinic_data.Records(48)
    loader = DataLoader(records, batch_size=4, sampler=DistributedSampler(records))
    for features, classes in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(features), classes)
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"loss {loss.item():.3f}")
    dist.destroy_process_group()
    return {"model": model.module, "loss": loss.item()}


if __name__ == "__main__":
    main()
