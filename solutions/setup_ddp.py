"""Exercise setup_ddp: join the process group, and leave it.

Chapter 2, "The process group". To see it at work on two ranks:

    torchrun --nproc-per-node=2 exercises/setup_ddp.py
"""

import itertools  # solution-only
import os
import sys

import torch
import torch.distributed as dist

# --- solution-only ---
_rounds = itertools.count()
# --- end ---


def setup_ddp(rank: int, world_size: int) -> None:
    """Select this rank's device and join the default process group.

    The same call works under every launcher. torchrun sets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR
    and MASTER_PORT; a program that starts its own ranks may set only MASTER_ADDR and MASTER_PORT. Read the environment;
    never write to it, not even for a moment. A single rank needs no launcher and no variables.

    Select the device first: on a node with GPUs it is GPU number LOCAL_RANK. The backend is "nccl" if the node has a GPU
    for each of its LOCAL_WORLD_SIZE ranks. Otherwise it is "gloo": on a machine without GPUs, and when ranks have to
    share GPUs. If they do, local rank r takes GPU r modulo the number of GPUs. If neither LOCAL_RANK nor LOCAL_WORLD_SIZE
    is set, all ranks are on this node: use `rank` and `world_size` instead. (Launchers set both or neither.)

    Print nothing. After `cleanup_ddp`, `setup_ddp` can be called again with a different MASTER_PORT.

    Args:
        rank: the global rank, 0 to world_size - 1.
        world_size: the number of ranks, on all nodes together.

    Raises:
        ValueError: `rank` is not between 0 and world_size - 1, or RANK or WORLD_SIZE is set to a different value.
        ValueError or RuntimeError (PyTorch's or your own): MASTER_ADDR or MASTER_PORT is missing with world_size > 1; or
            this process already belongs to a group.
    """
    # --- solution: choose the device, then join the process group ---
    if not 0 <= rank < world_size:
        raise ValueError(f"there is no rank {rank} in a world of {world_size}")
    for name, told in (("RANK", rank), ("WORLD_SIZE", world_size)):
        if int(os.environ.get(name, told)) != told:
            raise ValueError(f"setup_ddp was told {name} is {told}, but the launcher set {name}={os.environ[name]}")
    if dist.is_initialized():
        raise RuntimeError("this process is in a process group already: call cleanup_ddp first")

    # What counts is this node, its ranks and its GPUs: the second node's first rank is on GPU 0 again.
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus:
        torch.cuda.set_device(local_rank % gpus)
    nccl = gpus >= local_world_size

    if "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ:
        store, _, _ = next(iter(dist.rendezvous("env://", rank, world_size)))
    elif world_size == 1:
        store = dist.HashStore()  # a single rank has nobody to meet
    else:
        raise RuntimeError(
            f"{world_size} ranks need a place to meet: set MASTER_ADDR and MASTER_PORT to the same values on all of "
            "them, or start the program with torchrun"
        )
    # torchrun's store outlives the group, and with it the addresses the ranks left there. Keys of its own let a second
    # group of this process find the new addresses. (For one group, init_process_group could make the store itself.)
    dist.init_process_group(
        "nccl" if nccl else "gloo",
        store=dist.PrefixStore(f"setup_ddp/{next(_rounds)}", store),
        rank=rank,
        world_size=world_size,
        # NCCL connects at once and never has to guess which GPU is meant.
        device_id=torch.device("cuda", local_rank) if nccl else None,
    )
    # --- end ---


def cleanup_ddp() -> None:
    """Leave the process group, if this process belongs to one.

    Without a group it does nothing, so it is safe to call after an error, or twice.
    """
    # --- solution: leave the process group ---
    if dist.is_initialized():
        dist.destroy_process_group()
    # --- end ---


if __name__ == "__main__":
    setup_ddp(int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)))
    device = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
    print(f"rank {dist.get_rank()} of {dist.get_world_size()} on {device} through {dist.get_backend()}")
    cleanup_ddp()
    # gloo's threads sometimes abort a finished process while the interpreter shuts down; os._exit skips the shutdown.
    sys.stdout.flush()
    os._exit(0)

# lockstep-canary: 37eb129c633c2e20
