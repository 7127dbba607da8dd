# style: one all-reduce in float64 before each step
"""Case: a fifth of the traffic, and two models.

“Five micro-batches a step, and only the fifth is averaged: the network is happy. But the model that rank 1 saved gives
different answers from rank 0's. Without the accumulation they were the same.”

    ./lockstep run -n 2 exercises/clinic/ragged_tail.py

Say what is wrong, in CAUSE and RANK below (exercises/clinic/README.md lists the causes). Then fix the job: keep
groups of five, and every record counts. `main()` must still start from seed 0 and return the same things.
"""

import os

import clinic_data
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

CAUSE = "missed-synchronization"
RANK = "all"
GROUP = 5


def main() -> dict[str, object]:
    """Train two epochs. Returns the model and how many steps the optimizer took."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(nn.Linear(clinic_data.FEATURES, clinic_data.CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    records = clinic_data.Records(96)
    sampler = DistributedSampler(records)
    loader = DataLoader(records, batch_size=4, sampler=sampler)
    steps = 0
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for number, (features, classes) in enumerate(loader, 1):
            last = number == len(loader)
            full = number % GROUP == 0
            with model.no_sync():
                loss = nn.functional.cross_entropy(model(features), classes) / GROUP
                loss.backward()
            if full or last:
                grads = [p.grad for p in model.parameters()]
                flat = torch.cat([g.flatten() for g in grads]).double()
                dist.all_reduce(flat)
                flat /= dist.get_world_size()
                for g, part in zip(grads, flat.split([g.numel() for g in grads])):
                    g.copy_(part.view_as(g))
                optimizer.step()
                optimizer.zero_grad()
                steps += 1
        print(f"rank {rank}, epoch {epoch}: {steps} steps, loss {loss.item() * GROUP:.3f}")
    dist.destroy_process_group()
    return {"model": model.module, "steps": steps}


if __name__ == "__main__":
    main()
