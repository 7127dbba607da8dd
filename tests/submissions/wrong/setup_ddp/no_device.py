# diagnosis: no-device
# why: joins over nccl without ever selecting a device
import os
import torch
import torch.distributed as dist
from torch.distributed import init_process_group, destroy_process_group, is_initialized


def setup_ddp(rank, world_size):
    if rank not in range(world_size):
        raise ValueError(f"bad rank {rank} for world size {world_size}")
    for var, value in {"RANK": rank, "WORLD_SIZE": world_size}.items():
        set_by_launcher = os.getenv(var)
        if set_by_launcher is not None and int(set_by_launcher) != value:
            raise ValueError(f"{var}={set_by_launcher} contradicts {value}")

    host, port = os.getenv("MASTER_ADDR"), os.getenv("MASTER_PORT")
    if not (host and port):
        if world_size > 1:
            raise RuntimeError("no rendezvous: export MASTER_ADDR and MASTER_PORT")
        host, port = "127.0.0.1", 0

    # how many of us are on this machine?
    local_rank = int(os.getenv("LOCAL_RANK", rank))
    local_world = int(os.getenv("LOCAL_WORLD_SIZE", world_size))
    n = torch.cuda.device_count() if torch.cuda.is_available() else 0
    kwargs = {}
    if n >= local_world:
        kwargs = dict(backend="nccl")
    else:
        if n:
            torch.cuda.set_device(local_rank % n)
        kwargs = dict(backend="gloo")
    init_process_group(init_method=f"tcp://{host}:{port}", rank=rank, world_size=world_size, **kwargs)


def cleanup_ddp():
    if is_initialized():
        destroy_process_group()
