"""Case: the curve has a pattern.

“The loss wiggles, and that is fine. But it is the same wiggle in every epoch: down at the second step, up at the
fourth. Shuffling is on.”

    ./lockstep run -n 2 exercises/clinic/stale_shuffle.py

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


def main() -> dict[str, object]:
    """Train three epochs. Returns the model and the losses of each epoch."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(nn.Linear(clinic_data.FEATURES, clinic_data.CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    records = clinic_data.Records(48)
    sampler = DistributedSampler(records, shuffle=True, seed=7)
    loader = DataLoader(records, batch_size=4, sampler=sampler)
    curve = []
    for epoch in range(3):
        losses = []
        for features, classes in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(features), classes)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        print(f"rank {rank}, epoch {epoch}:", *(f"{one:.2f}" for one in losses))
        curve.append(losses)
    dist.destroy_process_group()
    return {"model": model.module, "curve": curve}


if __name__ == "__main__":
    main()
