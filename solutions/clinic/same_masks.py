"""Case: more ranks do not make it smoother.

“With dropout, a larger global batch should average more masks and give a smoother curve. It does not, on two ranks or
on eight. The run has to stay repeatable, so please keep a seed.”

    ./lockstep run -n 2 exercises/clinic/same_masks.py

Say what is wrong, in CAUSE and RANK below (exercises/clinic/README.md lists the causes). Then fix the job: started
twice, it gives the same model twice. `main()` must still return the same things.
"""

import os

import clinic_data
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

# --- mended: the diagnosis, for ticket 1 ---
CAUSE = "same-randomness"
RANK = "all"
# --- was ---
# CAUSE = "?"
# RANK = "?"  # its number, or "all"
# --- end ---
SEED = 0


class Network(nn.Module):
    """Two layers with dropout between them. `kept` is what the last forward kept: bool, of shape (N, 16)."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(clinic_data.FEATURES, 16), nn.Linear(16, clinic_data.CLASSES)
        self.dropout = nn.Dropout(0.5)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """(N, 8) float32 to (N, 3)."""
        hidden = nn.functional.softplus(self.inner(features))  # never 0
        dropped = self.dropout(hidden)
        self.kept = dropped != 0
        return self.outer(dropped)


def main() -> dict[str, object]:
    """Train two epochs. Returns the model and what dropout kept in each step, bool of shape (steps, 8, 16)."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    torch.manual_seed(SEED)
    model = DDP(Network())
    torch.manual_seed(SEED + 1 + rank)  # solution-only
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    records = clinic_data.Records(48)
    sampler = DistributedSampler(records)
    loader = DataLoader(records, batch_size=8, sampler=sampler)
    kept = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for features, classes in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(features), classes)
            kept.append(model.module.kept)
            loss.backward()
            optimizer.step()
        share = kept[-1].float().mean().item()
        print(f"rank {rank}, epoch {epoch}: loss {loss.item():.3f}, kept {share:.4f} of the units")
    dist.destroy_process_group()
    return {"model": model.module, "kept": torch.stack(kept)}


if __name__ == "__main__":
    main()

# lockstep-canary: f92f5ca07a91844a
