"""Case: the tracker and the auditor disagree.

“The tracker shows one accuracy for the test set. An auditor takes the saved model and the same 50 records and gets
another. Neither of them rounds.”

    ./lockstep run -n 3 exercises/clinic/rank_metric.py

Say what is wrong, in CAUSE and RANK below (exercises/clinic/README.md lists the causes). Then fix the job: what the
tracker shows is what the auditor counts. `main()` must still return the same things.
"""

import os

import clinic_data
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset

# --- mended: the diagnosis, for ticket 1 ---
CAUSE = "metric-of-one-rank"
RANK = 0
# --- was ---
# CAUSE = "?"
# RANK = "?"  # its number, or "all"
# --- end ---


@torch.no_grad()
def evaluate(model: nn.Module, rank: int, world_size: int) -> torch.Tensor:
    """This rank's part of the test set: how many records the model gets right, and how many there are."""
    test = clinic_data.Records(50, seed=11)
    part = Subset(test, range(rank, len(test), world_size))
    right = sum((model(features).argmax(1) == classes).sum() for features, classes in DataLoader(part, batch_size=8))
    return torch.tensor([right, len(part)], dtype=torch.float64)


def main() -> dict[str, object]:
    """Train two epochs and evaluate. Returns the model and the accuracy that every rank has been told."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    tracker = clinic_data.draw("rank_metric", world_size)  # the rank on the host that may talk to the tracking server
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(nn.Linear(clinic_data.FEATURES, clinic_data.CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    records = clinic_data.Records(96)
    sampler = DistributedSampler(records)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for features, classes in DataLoader(records, batch_size=8, sampler=sampler):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(features), classes).backward()
            optimizer.step()
    counts = evaluate(model.module, rank, world_size)
    # --- mended: counts are added, and divided once ---
    dist.all_reduce(counts)
    accuracy = counts[0] / counts[1]
    # --- was ---
    # accuracy = counts[0] / counts[1]
    # dist.broadcast(accuracy, src=tracker)  # all ranks decide on the same number
    # --- end ---
    if rank == tracker:
        print(f"to the tracker: accuracy {accuracy.item():.4f}")
    dist.destroy_process_group()
    return {"model": model.module, "accuracy": accuracy.item()}


if __name__ == "__main__":
    main()

# lockstep-canary: 42f254b6bb526873
