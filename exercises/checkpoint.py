"""Exercise checkpoint: files that survive whatever happens to the job that writes them.

Chapter 5, "Atomic and durable". To see it at work on two ranks, twice, so that the second start finds what the first
has left:

    torchrun --nproc-per-node=2 exercises/checkpoint.py /tmp/checkpoints
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def save_checkpoint(path: str | os.PathLike[str], state: dict[str, Any], keep: int = 3) -> None:
    """Write `state` as the newest checkpoint in the folder `path`. Called on every rank; the process group exists.

    - Rank 0's `state` is written, by one rank alone. What the others pass is not looked at.
    - No rank returns before the checkpoint is there.
    - Atomic: from the moment a file has its final name it is whole. Killed at any instant, a save leaves the older
      checkpoints, or those and the new one; never less, and never a mixture. A reader sees the same.
    - Durable: what counts as saved survives a power failure, so it has reached the disk (`os.fsync`) before it gets its
      name, and the name itself (the folder's entry) has reached the disk before this function returns.
    - Afterwards the `keep` newest are there, and nothing older; nor anything that a save has left which was killed or
      failed. Files of other people are left alone.
    - When it fails (the disk is full), every rank raises, and the older checkpoints are still there.

    Args:
        path: the folder; it is made when it is not there.
        state: dictionaries with text keys, lists and tuples, nested as you like, of tensors, numbers, text and None:
            what `torch.load(weights_only=True)` reads.
        keep: how many checkpoints to keep, this one included; at least 1.

    Raises:
        OSError or RuntimeError: the checkpoint could not be written. On the writing rank it is the error itself.
    """
    raise NotImplementedError("checkpoint: write the checkpoint")


def load_latest(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Return the newest checkpoint in the folder `path` that is whole. Called on every rank; the process group exists.

    - Newest means saved last, whatever the files' times say: copying a folder changes those.
    - All ranks return the same checkpoint, also where one of them sees another state of the folder (a network file
      system shows a new file late) or cannot read a file that the others can.
    - A file that is cut short, or of which a single bit has changed, is not loaded. The next older one is taken
      instead, with a warning (`warnings.warn`) that names the file. torch.load by itself does not notice a bit that
      has changed in a tensor.
    - Loading runs no code from the file (`weights_only=True`), and tensors come back on the CPU.
    - A dictionary in which every key begins with `module.` is what a DDP wrapper's `state_dict()` gives. It comes back
      without that prefix, wherever in the state it stands. All other keys come back as they were.

    Returns:
        What was saved, or None where there is no checkpoint (nor, perhaps, a folder) to load.
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
    # gloo's threads now and then abort a finished process while the interpreter shuts down: leave without that.
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)
