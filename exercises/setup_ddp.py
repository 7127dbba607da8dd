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
    raise NotImplementedError("setup_ddp: choose the device, then join the process group")


def cleanup_ddp() -> None:
    """Leave the process group, if this process is in one.

    Without a group it does nothing, so that it can be called after an error, and again.
    """
    raise NotImplementedError("setup_ddp: leave the process group")


if __name__ == "__main__":
    setup_ddp(int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)))
    device = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
    print(f"rank {dist.get_rank()} of {dist.get_world_size()} on {device} through {dist.get_backend()}")
    cleanup_ddp()
    # gloo's threads now and then abort a finished process while the interpreter shuts down: leave without that.
    sys.stdout.flush()
    os._exit(0)
