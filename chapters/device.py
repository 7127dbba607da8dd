"""Choose this rank's device and backend."""

import os
import warnings

import torch


def local_device() -> tuple[torch.device, str]:
    """If this node has a GPU for every rank: this rank's own GPU and nccl. Otherwise: the CPU and gloo."""
    local_rank, ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    gpus = torch.cuda.device_count()
    if gpus < ranks:
        if gpus:
            warnings.warn(f"{gpus} GPUs for {ranks} ranks: using the CPU", stacklevel=2)
        return torch.device("cpu"), "gloo"
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank), "nccl"
