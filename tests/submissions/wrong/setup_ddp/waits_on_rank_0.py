# diagnosis: hang
# why: rank 0 alone waits for the others in the end
import os
import socket

import torch
import torch.distributed as dist


def setup_ddp(rank: int, world_size: int) -> None:
    if rank < 0 or rank >= world_size:
        raise ValueError(f"rank must be between 0 and {world_size - 1}, got {rank}")
    if "RANK" in os.environ and int(os.environ["RANK"]) != rank:
        raise ValueError(f"RANK is {os.environ['RANK']}, got rank={rank}")
    if "WORLD_SIZE" in os.environ and int(os.environ["WORLD_SIZE"]) != world_size:
        raise ValueError(f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, got world_size={world_size}")

    init_method = "env://"
    if "MASTER_ADDR" not in os.environ or "MASTER_PORT" not in os.environ:
        if world_size > 1:
            raise RuntimeError("please set MASTER_ADDR and MASTER_PORT or use torchrun")
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            init_method = f"tcp://127.0.0.1:{s.getsockname()[1]}"

    backend = "gloo"
    if torch.cuda.is_available():
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        n_gpus = torch.cuda.device_count()
        if n_gpus >= int(os.environ.get("LOCAL_WORLD_SIZE", world_size)):
            backend = "nccl"
        torch.cuda.set_device(local_rank % n_gpus)

    dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=world_size)
    if rank == 0:
        dist.barrier()


def cleanup_ddp() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
