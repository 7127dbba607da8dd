"""Case: waiting for a machine that has gone.

“We gave a borrowed machine back and took it out of the settings on every host. Since then nothing starts.”

    ./lockstep run -n 4 exercises/clinic/wrong_world.py

Say what is wrong, in CAUSE and RANK below (exercises/clinic/README.md lists the causes). Then fix the job, so that the
next change of machines does not stop it. `main()` must still return the same things.
"""

import os
from typing import Any

import clinic_data
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

# --- mended: the diagnosis, for ticket 1 ---
CAUSE = "wrong-world-size"
RANK = 2
# --- was ---
# CAUSE = "?"
# RANK = "?"  # its number, or "all"
# --- end ---


def settings(rank: int) -> dict[str, Any]:
    """The settings file of this rank's host. It says how many machines there are; one rank runs on each."""
    machines = int(os.environ["WORLD_SIZE"])
    usual = {"machines": machines, "ranks_each": 1}
    return clinic_data.settings("wrong_world", rank, machines, usual, odd={"machines": machines + 1})


def main() -> dict[str, object]:
    """Train one epoch. Returns the model and how many steps this rank took."""
    # --- mended: how many ranks there are is the launcher's to say ---
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # --- was ---
    # rank = int(os.environ["RANK"])
    # options = settings(rank)
    # world_size = options["machines"] * options["ranks_each"]
    # --- end ---
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    model = DDP(nn.Linear(clinic_data.FEATURES, clinic_data.CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    records = clinic_data.Records(48)
    sampler = DistributedSampler(records, num_replicas=world_size, rank=rank)
    steps = 0
    for features, classes in DataLoader(records, batch_size=4, sampler=sampler):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(features), classes)
        loss.backward()
        optimizer.step()
        steps += 1
    if rank == 0:
        print(f"{steps} steps, loss {loss.item():.3f}")
    dist.destroy_process_group()
    return {"model": model.module, "steps": steps}


if __name__ == "__main__":
    main()

# lockstep-canary: b2b1f03448b90631
