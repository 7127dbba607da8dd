"""Case: the reference run learns like one rank.

“The float32 runs were fine. The reference run in float64 is done now: no error, no warning, and the model is only as
good as if it had seen one rank's share of the records.”

    ./lockstep run -n 2 exercises/clinic/cast_late.py

Say what is wrong, in CAUSE and RANK below (exercises/clinic/README.md lists the causes). Then fix the job: it stays a
run in float64. `main()` must still return the same things.
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
PRECISION = torch.float64


def network() -> nn.Module:
    """(N, 8) to (N, 3), the same on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(clinic_data.FEATURES, 16), nn.ReLU(), nn.Linear(16, clinic_data.CLASSES))


def main() -> dict[str, object]:
    """Train two epochs. Returns the model and the last loss."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    model = DDP(network()).to(PRECISION)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    records = clinic_data.Records(48)
    sampler = DistributedSampler(records)
    loader = DataLoader(records, batch_size=8, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for features, classes in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(features.to(PRECISION)), classes)
            loss.backward()
            optimizer.step()
        print(f"rank {rank}, epoch {epoch}: loss {loss.item():.3f}")
    dist.destroy_process_group()
    return {"model": model.module, "loss": loss.item()}


if __name__ == "__main__":
    main()
