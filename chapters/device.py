"""Which device and which backend this rank uses."""

import os

import torch


def local_device() -> tuple[torch.device, str]:
    """A GPU of its own and nccl when this node has one for every rank; the CPU and gloo otherwise."""
    local_rank = int(os.environ["LOCAL_RANK"])
    if torch.cuda.device_count() < int(os.environ["LOCAL_WORLD_SIZE"]):
        return torch.device("cpu"), "gloo"
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank), "nccl"
