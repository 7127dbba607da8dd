"""Exercise checkpoint: files that survive whatever happens to the job that writes them.

Chapter 5, "Atomic and durable". To see it at work on two ranks (run it twice: the second start finds what the first
saved):

    torchrun --nproc-per-node=2 exercises/checkpoint.py /tmp/checkpoints
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def save_checkpoint(path: str | os.PathLike[str], state: dict[str, Any], keep: int = 3) -> None:
    """Save `state` as the newest checkpoint in the folder `path`. Called on every rank of an existing process group.

    - One rank writes, and it writes rank 0's `state`. What the other ranks pass doesn't matter.
    - No rank returns before the checkpoint is complete.
    - Atomic: a file is complete from the moment it has its final name. If a save is killed, at any instant, the folder
      holds the older checkpoints, the new one, or both, and each of them is whole. A process that loads during a save
      finds a whole one too.
    - Durable: the contents are on the disk (`os.fsync`) before the file gets its final name, and the name (the folder's
      entry) is on the disk before this function returns.
    - Afterwards the folder holds the `keep` newest checkpoints and no older ones, and nothing that a killed or failed
      save left behind. Leave all other files alone.
    - If the save fails (the disk is full, `fsync` fails, `state` can't be pickled), every rank raises an exception, and
      the older checkpoints are still there.

    Args:
        path: the folder. Create it, with its parents, if it doesn't exist.
        state: dictionaries (keys are text or integers), lists and tuples, nested as you like, of tensors, numbers,
            text and None: what `torch.load(weights_only=True)` reads.
        keep: how many checkpoints to keep, including this one; at least 1. A damaged one may count or not.
    """
    raise NotImplementedError("checkpoint: write the checkpoint")


def load_latest(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Return the newest intact checkpoint in the folder `path`. Called on every rank of an existing process group.

    - Newest means saved last, whichever process saved it and whatever the files' times say: copying a folder changes
      them.
    - All ranks return the same checkpoint, even if one of them sees an older state of the folder (a network file system
      shows a new file late) or can't read a file that the others can. You may take the newest that all ranks can
      read, or the newest that any can.
    - Skip a file that is cut short or in which a single bit of the state has changed. Load the next older one; at least
      one rank warns (`warnings.warn`) and names the file. `torch.load` doesn't notice a changed bit in a tensor.
    - A save with `keep=1` may remove the file that you are about to read. Then look into the folder again.
    - Loading runs no code from the file (`weights_only=True`). Tensors come back on the CPU.
    - A dictionary in which every key starts with `module.` comes from a DDP wrapper's `state_dict()`. Remove this prefix
      once, wherever in the state the dictionary is. All other keys come back unchanged.

    Returns:
        What was saved, or None if there is no checkpoint (or no folder).
    """
    raise NotImplementedError("checkpoint: load the newest checkpoint that is whole on all ranks")


if __name__ == "__main__":
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)
    rank = dist.get_rank()
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "checkpoints")
    found = load_latest(folder)
    start = found["step"] if found else 0
    print(f"rank {rank} starts at step {start}", flush=True)
    for step in range(start + 1, start + 6):
        save_checkpoint(folder, {"model": {"weight": torch.full((3,), float(step))}, "step": step})
    if rank == 0:
        print(*sorted(file.name for file in folder.iterdir()), sep="\n", flush=True)
    # gloo's threads sometimes abort a finished process while the interpreter shuts down; os._exit skips the shutdown.
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)
