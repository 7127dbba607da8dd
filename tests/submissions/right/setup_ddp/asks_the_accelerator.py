# style: torch.accelerator and is_nccl_available decide, and the device is named by a string
import os

import torch
import torch.distributed as dist


def setup_ddp(rank, world_size):
    if world_size < 1 or rank < 0 or rank >= world_size:
        raise ValueError("rank {} of {}".format(rank, world_size))
    for key, value in (("RANK", rank), ("WORLD_SIZE", world_size)):
        if os.environ.get(key) not in (None, str(value)):
            raise ValueError(f"{key} is {os.environ[key]}, not {value}")
    if dist.is_initialized():
        raise RuntimeError("already in a group")
    if world_size > 1 and not {"MASTER_ADDR", "MASTER_PORT"} <= set(os.environ):
        raise ValueError("MASTER_ADDR and MASTER_PORT must be set")

    backend = "gloo"
    if torch.accelerator.is_available() and torch.accelerator.current_accelerator().type == "cuda":
        gpus = torch.accelerator.device_count()
        local_rank = int(os.environ.get("LOCAL_RANK") or rank)
        torch.cuda.set_device(f"cuda:{local_rank % gpus}")
        if torch.cuda.current_device() != local_rank % gpus:
            raise RuntimeError("this GPU cannot be selected")
        if dist.is_nccl_available() and gpus >= int(os.environ.get("LOCAL_WORLD_SIZE") or world_size):
            backend = "nccl"
    if world_size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group(backend, rank=rank, world_size=world_size)


def cleanup_ddp():
    if dist.is_initialized():
        dist.destroy_process_group()
