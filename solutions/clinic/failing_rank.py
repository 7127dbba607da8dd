"""Case: three ranks report a lost connection.

“On this data the job dies after a few steps. Three of four logs say that the connection was closed. The network people
have looked twice and find nothing.”

    ./lockstep run -n 4 exercises/clinic/failing_rank.py

Say what is wrong, in CAUSE and RANK below (exercises/clinic/README.md lists the causes). Then fix the job: all 48
measurements are good, and each is trained on, in this order. `main()` must still return the same things.
"""

import os

import clinic_data
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, Subset

# --- mended: the diagnosis, for ticket 1 ---
CAUSE = "failing-rank"
RANK = 1
# --- was ---
# CAUSE = "?"
# RANK = "?"  # its number, or "all"
# --- end ---

COUNT = 48


def lines(world_size: int) -> list[str]:
    """The file: one measurement per line, 8 features and a class separated by semicolons. Three laboratories sent it."""
    records = clinic_data.Records(COUNT)
    text = [";".join(f"{value:.3f}" for value in [*records.features[i], records.classes[i]]) for i in range(COUNT)]
    number = clinic_data.draw("failing_rank", world_size) + 6 * world_size
    text[number] = text[number].replace(".", ",")
    return text


class Measurements(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """The measurements of a file, read when they are asked for."""

    def __init__(self, text: list[str]) -> None:
        self.text = text

    def __len__(self) -> int:
        return len(self.text)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        # --- mended: one laboratory writes decimal commas ---
        *features, kind = [float(value.replace(",", ".")) for value in self.text[index].split(";")]
        # --- was ---
        # *features, kind = [float(value) for value in self.text[index].split(";")]
        # --- end ---
        return torch.tensor(features), torch.tensor(int(kind))


def main() -> dict[str, object]:
    """Train one epoch. Returns the model and how many measurements this rank has trained on."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(nn.Linear(clinic_data.FEATURES, clinic_data.CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    mine = Subset(Measurements(lines(world_size)), range(rank, COUNT, world_size))
    used = 0
    for features, classes in DataLoader(mine, batch_size=4):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(features), classes)
        loss.backward()
        optimizer.step()
        used += len(classes)
        print(f"rank {rank}: {used} measurements, loss {loss.item():.3f}")
    dist.destroy_process_group()
    return {"model": model.module, "used": used}


if __name__ == "__main__":
    main()

# lockstep-canary: 22f86abaaf1fd854
