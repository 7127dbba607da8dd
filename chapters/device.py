"""Which device and which backend this rank uses."""

import os

import torch


def local_device() -> tuple[torch.device, str]:
    """If this node has a GPU for every rank: this rank's own GPU and nccl. Otherwise: the CPU and gloo."""
    local_rank = int(os.environ["LOCAL_RANK"])
    if torch.cuda.device_count() < int(os.environ["LOCAL_WORLD_SIZE"]):
        return torch.device("cpu"), "gloo"
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank), "nccl"
