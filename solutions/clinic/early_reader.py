"""Case: the vocabulary that cannot be read.

“Each rank writes down the words of its own texts, and then every rank reads what all have written. There is a barrier
in between! It works at home, where everything is on one disk. Here every rank dies while it reads.”

    ./lockstep run -n 4 exercises/clinic/early_reader.py

Say what is wrong, in CAUSE and RANK below (exercises/clinic/README.md lists the causes). Then fix the job: the
vocabulary holds the words of all ranks. `main()` must still return the same things.
"""

import json
import os
import tempfile
from pathlib import Path

import clinic_data
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

# --- mended: the diagnosis, for ticket 1 ---
CAUSE = "read-before-written"
RANK = 3
# --- was ---
# CAUSE = "?"
# RANK = "?"  # its number, or "all"
# --- end ---


def shared_folder() -> Path:
    """A new folder that all ranks see."""
    name = [tempfile.mkdtemp()]
    dist.broadcast_object_list(name)
    return Path(name[0])


def words(rank: int) -> list[str]:
    """The words of this rank's texts. Some of them are in the neighbor's texts too."""
    return [f"word{number}" for number in range(5 * rank, 5 * rank + 8)]


class Notes:
    """A rank's notes. Its host's settings say how many bytes may gather before they go to the disk."""

    def __init__(self, path: Path, gather: int) -> None:
        self.file = open(path, "wb", buffering=gather)  # noqa: SIM115

    def add(self, value: object) -> None:
        """Write a value, as JSON."""
        # --- mended: whoever comes out of the next barrier may read it ---
        self.file.write(json.dumps(value).encode())
        self.file.flush()
        # --- was ---
        # self.file.write(json.dumps(value).encode())
        # --- end ---


def read(path: Path) -> list[str]:
    """The words in a rank's notes. Raises ValueError if there are none."""
    text = path.read_text()
    if not text:
        raise ValueError(f"{path.name} is empty")
    return json.loads(text)


def main() -> dict[str, object]:
    """Agree on a vocabulary, then train a step with it. Returns the vocabulary and the model."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    folder = shared_folder()
    options = clinic_data.settings("early_reader", rank, world_size, {"gather": 0}, odd={"gather": 1 << 16})
    notes = Notes(folder / f"words-{rank}.json", options["gather"])
    notes.add(words(rank))
    dist.barrier()
    parts = [read(folder / f"words-{one}.json") for one in range(world_size)]
    vocabulary = sorted({word for part in parts for word in part})
    torch.manual_seed(0)
    model = DDP(nn.EmbeddingBag(len(vocabulary), 3, mode="mean"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    known = [word for word in words(rank) if word in vocabulary]
    text = torch.tensor([[vocabulary.index(word) for word in known]])
    model(text).square().sum().backward()
    optimizer.step()
    if rank == 0:
        print(f"{len(vocabulary)} words")
    dist.destroy_process_group()
    return {"vocabulary": vocabulary, "model": model.module}


if __name__ == "__main__":
    main()

# lockstep-canary: 5993413fa5bf8b0a
