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
    and MASTER_PORT; a program that starts its ranks itself may set only MASTER_ADDR and MASTER_PORT. What is set stays
    as it is: the environment is read, never written. A single rank needs no launcher and no variable at all.

    The device comes first: with GPUs, it is GPU LOCAL_RANK of this node (`rank`, where LOCAL_RANK is not set). The
    backend is "nccl" when every rank of this node has a GPU of its own. Otherwise it is "gloo": on CPUs, and when ranks
    share GPUs, where local rank r takes GPU r modulo their number.

    Args:
        rank: the global rank, 0 to world_size - 1.
        world_size: how many ranks join, on all nodes together.

    Prints nothing. After `cleanup_ddp` it may be called again, with another MASTER_PORT.

    Raises:
        ValueError: `rank` is not in 0 to world_size - 1, or RANK or WORLD_SIZE is set and says something else.
        ValueError or RuntimeError, torch's own or yours: world_size > 1 and MASTER_ADDR or MASTER_PORT is not set, or
            this process is in a group already.
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
    """Leave the process group, if this process is in one.

    Without a group it does nothing, so that it can be called after an error, and again.
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
    # gloo's threads now and then abort a finished process while the interpreter shuts down: leave without that.
    sys.stdout.flush()
    os._exit(0)

# lockstep-canary: 37eb129c633c2e20
