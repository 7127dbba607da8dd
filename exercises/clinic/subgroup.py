"""Case: two teams, no result.

“An ensemble: two teams of neighboring ranks, and each team trains a model. Half of the ranks finish. The others don't.”

    ./lockstep run -n 4 exercises/clinic/subgroup.py

Say what is wrong, in CAUSE and RANK below (exercises/clinic/README.md lists the causes). Then fix the job: the first
half of the ranks trains one model together, the second half another. `main()` must still return the same things.
"""

import os

import clinic_data
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

CAUSE = "?"
RANK = "?"  # its number, or "all"

TEAMS = 2


def main() -> dict[str, object]:
    """Train one epoch. Returns this rank's team (0 or 1) and the team's model."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    size = world_size // TEAMS
    groups = [dist.new_group(range(first, first + size)) for first in range(0, world_size, size)]
    team = rank % TEAMS
    torch.manual_seed(team)
    model = nn.Linear(clinic_data.FEATURES, clinic_data.CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for features, classes in DataLoader(clinic_data.Records(24, seed=rank), batch_size=8):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(features), classes)
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=groups[team])
            parameter.grad /= size
        optimizer.step()
    print(f"rank {rank}, team {team}: loss {loss.item():.3f}")
    dist.barrier()
    dist.destroy_process_group()
    return {"model": model, "team": team}


if __name__ == "__main__":
    main()
