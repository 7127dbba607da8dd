"""Case: it starts from good weights, and gets worse.

“One of our disks holds weights that are already good, so training starts from them. One rank's loss starts low. The
model that comes out is worse than the one that we put in.”

    ./lockstep run -n 3 exercises/clinic/late_load.py

Say what is wrong, in CAUSE and RANK below (exercises/clinic/README.md lists the causes). Then fix the job: the training
starts from those weights. `main()` must still return the same things.
"""

import os

import clinic_data
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

# --- mended: the diagnosis, for ticket 1 ---
CAUSE = "loaded-after-wrapping"
RANK = 2
# --- was ---
# CAUSE = "?"
# RANK = "?"  # its number, or "all"
# --- end ---


def found_on_disk(rank: int, world_size: int) -> dict[str, torch.Tensor] | None:
    """The good weights, if they are on this rank's disk. Only one disk has them."""
    if rank != clinic_data.draw("late_load", world_size):
        return None
    rule = torch.randn(clinic_data.FEATURES, clinic_data.CLASSES, generator=torch.Generator().manual_seed(2))
    return {"weight": rule.T.contiguous(), "bias": torch.zeros(clinic_data.CLASSES)}


def main() -> dict[str, object]:
    """Train one epoch. Returns the model and the first loss of this rank."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    # --- mended: load, hand on to all ranks from the one that could, and only then wrap ---
    bare = nn.Linear(clinic_data.FEATURES, clinic_data.CLASSES)
    weights = found_on_disk(rank, world_size)
    if weights is not None:
        bare.load_state_dict(weights)
    source = torch.tensor(-1 if weights is None else rank)
    dist.all_reduce(source, dist.ReduceOp.MAX)
    for value in bare.state_dict().values():
        dist.broadcast(value, int(source))
    model = DDP(bare)
    # --- was ---
    # model = DDP(nn.Linear(clinic_data.FEATURES, clinic_data.CLASSES))
    # weights = found_on_disk(rank, world_size)
    # if weights is not None:
    #     model.module.load_state_dict(weights)
    # --- end ---
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    records = clinic_data.Records(48)
    losses = []
    for features, classes in DataLoader(records, batch_size=4, sampler=DistributedSampler(records)):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(features), classes)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"rank {rank}: loss {losses[0]:.3f} at first, {losses[-1]:.3f} at last")
    dist.destroy_process_group()
    return {"model": model.module, "loss": losses[0]}


if __name__ == "__main__":
    main()

# lockstep-canary: cde97b19ffc74221
