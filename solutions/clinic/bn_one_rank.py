"""Case: an alarm at every site but the first.

“One site per rank, and the model's first layer keeps a running mean of what the sensors send. The service compares its
inputs with that mean. It raises the alarm at all sites but the first, although all of them trained.”

    ./lockstep run -n 3 exercises/clinic/bn_one_rank.py

Say what is wrong, in CAUSE and RANK below (exercises/clinic/README.md lists the causes). Then fix the job: the mean
that rank 0 saves must be that of all sites. `main()` must still return the same things.
"""

import os

import clinic_data
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

# --- mended: the diagnosis, for ticket 1 ---
CAUSE = "buffers-of-one-rank"
RANK = 0
# --- was ---
# CAUSE = "?"
# RANK = "?"  # its number, or "all"
# --- end ---


def measure(features: torch.Tensor, site: int) -> torch.Tensor:
    """What the sensors of this site show: the farther out, the warmer."""
    return features + site**2


# --- solution-only ---
def pool_statistics(model: nn.Module) -> None:
    """Make running means and variances those of all ranks' records together, on every rank."""
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm1d):
            moments = torch.stack([layer.running_mean, layer.running_var + layer.running_mean**2])
            dist.all_reduce(moments)
            mean, square = moments / dist.get_world_size()
            layer.running_mean.copy_(mean)
            layer.running_var.copy_(square - mean**2)


# --- end ---
def main() -> dict[str, object]:
    """Train three epochs. Returns the model, as this rank would save it."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.BatchNorm1d(clinic_data.FEATURES, momentum=0.3), nn.Linear(clinic_data.FEATURES, clinic_data.CLASSES)
    )
    model = DDP(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(clinic_data.Records(32, seed=rank), batch_size=8, shuffle=True)
    for _ in range(3):
        for features, classes in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(measure(features, rank)), classes)
            loss.backward()
            optimizer.step()
            pool_statistics(network)  # solution-only
    print(f"rank {rank}: saves a mean of {network[0].running_mean.mean().item():.2f}, loss {loss.item():.3f}")
    dist.destroy_process_group()
    return {"model": network}


if __name__ == "__main__":
    main()

# lockstep-canary: 8a8858c3ac09243f
