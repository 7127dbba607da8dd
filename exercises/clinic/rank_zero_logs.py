"""Case: quiet since the log.

“It ran for weeks. Then we switched the log on, on one host, to see the losses of all ranks. Now it stops at step 4.”

    ./lockstep run -n 3 exercises/clinic/rank_zero_logs.py

Say what is wrong, in CAUSE and RANK below (exercises/clinic/README.md lists the causes). Then fix the job: the host
that logs still prints and returns the losses of all ranks, every fourth step. `main()` must still return the same
things.
"""

import os

import clinic_data
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

CAUSE = "?"
RANK = "?"  # its number, or "all"


def losses_of_all(loss: torch.Tensor) -> list[float]:
    """The loss of every rank, in rank order."""
    losses = [torch.zeros(()) for _ in range(dist.get_world_size())]
    dist.all_gather(losses, loss.detach())
    return [one.item() for one in losses]


def main() -> dict[str, object]:
    """Train eight steps. Returns the model and, on a host that logs, what it logged: a list of losses each time."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    options = clinic_data.settings("rank_zero_logs", rank, world_size, usual={"log": False}, odd={"log": True})
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(nn.Linear(clinic_data.FEATURES, clinic_data.CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    log = []
    for step, (features, classes) in enumerate(DataLoader(clinic_data.Records(32, seed=rank), batch_size=4), 1):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(features), classes)
        loss.backward()
        optimizer.step()
        if options["log"] and step % 4 == 0:
            log.append(losses_of_all(loss))
            print(f"step {step}: " + ", ".join(f"{one:.3f}" for one in log[-1]))
    dist.barrier()
    dist.destroy_process_group()
    return {"model": model.module, "log": log}


if __name__ == "__main__":
    main()
