"""Case: it saves memory, and fails.

“The model did not fit any more, so we recompute its hidden layers in the backward pass. On one GPU it works. On three,
PyTorch tells us to look for unused parameters. There are none!”

    ./lockstep run -n 3 exercises/clinic/reentrant.py

Say what is wrong, in CAUSE and RANK below (exercises/clinic/README.md lists the causes). Then fix the job: it still
recomputes, and it trains all layers. `main()` must still return the same things.
"""

import os

import clinic_data
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler

# --- mended: the diagnosis, for ticket 1 ---
CAUSE = "reentrant-checkpoint"
RANK = "all"
# --- was ---
# CAUSE = "?"
# RANK = "?"  # its number, or "all"
# --- end ---

WIDTH = 6


class Classifier(nn.Module):
    """Two hidden layers, whose results are not kept for the backward pass, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(clinic_data.FEATURES, WIDTH), nn.Tanh())
        self.second = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.head = nn.Linear(WIDTH, clinic_data.CLASSES)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """(N, 8) float32 to (N, 3)."""
        for layer in (self.first, self.second):
            # --- mended: the form that needs no gradient at its input, and no backward of its own ---
            features = checkpoint(layer, features, use_reentrant=False)
            # --- was ---
            # features = checkpoint(layer, features, use_reentrant=True)
            # --- end ---
        return self.head(features)


def main() -> dict[str, object]:
    """Train one epoch. Returns the model and the last loss."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(Classifier())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    records = clinic_data.Records(48)
    loader = DataLoader(records, batch_size=4, sampler=DistributedSampler(records))
    for features, classes in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(features), classes)
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"loss {loss.item():.3f}")
    dist.destroy_process_group()
    return {"model": model.module, "loss": loss.item()}


if __name__ == "__main__":
    main()

# lockstep-canary: 2c445e658a367cb0
