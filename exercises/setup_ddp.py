"""Exercise setup_ddp: join the process group, and leave it.

Chapter 2, "The process group". To see it at work on two ranks:

    torchrun --nproc-per-node=2 exercises/setup_ddp.py
"""

import os
import sys

import torch
import torch.distributed as dist


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
    raise NotImplementedError("setup_ddp: choose the device, then join the process group")


def cleanup_ddp() -> None:
    """Leave the process group, if this process belongs to one.

    Without a group it does nothing, so it is safe to call after an error, or twice.
    """
    raise NotImplementedError("setup_ddp: leave the process group")


if __name__ == "__main__":
    setup_ddp(int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)))
    device = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
    print(f"rank {dist.get_rank()} of {dist.get_world_size()} on {device} through {dist.get_backend()}")
    cleanup_ddp()
    # gloo's threads sometimes abort a finished process while the interpreter shuts down; os._exit skips the shutdown.
    sys.stdout.flush()
    os._exit(0)
