"""Case: the accuracy depends on how many ranks measure it.

“One checkpoint, one test set, and a bigger machine gives another accuracy. On one rank it is what the paper says.”

    ./lockstep run -n 3 exercises/clinic/padded_eval.py

Say what is wrong, in CAUSE and RANK below (exercises/clinic/README.md lists the causes). Then fix the job; the ranks
still share the work. `main()` must still return the same things.
"""

import os

import clinic_data
import torch
import torch.distributed as dist
from torch import nn
from torch.utils import data

CAUSE = "?"
RANK = "?"  # its number, or "all"


def checkpoint() -> nn.Module:
    """The model from the paper: some steps on 64 records, the same on every rank."""
    torch.manual_seed(0)
    model = nn.Linear(clinic_data.FEATURES, clinic_data.CLASSES)
    train = clinic_data.Records(64, seed=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(20):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(train.features), train.classes).backward()
        optimizer.step()
    return model


def main() -> dict[str, object]:
    """Evaluate. Returns the model, its accuracy, and how many records were counted."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    model = checkpoint()
    test = clinic_data.Records(49, seed=20)
    sampler = data.DistributedSampler(test, num_replicas=world_size, rank=rank, shuffle=False)
    loader = data.DataLoader(test, batch_size=8, sampler=sampler)
    counts = torch.zeros(2, dtype=torch.float64)
    for features, classes in loader:
        counts += torch.tensor([(model(features).argmax(1) == classes).sum(), len(classes)])
    dist.all_reduce(counts)
    right, seen = counts.tolist()
    if rank == 0:
        print(f"accuracy {right / seen:.6f}")
    dist.destroy_process_group()
    return {"model": model, "accuracy": right / seen, "records": int(seen)}


if __name__ == "__main__":
    main()
