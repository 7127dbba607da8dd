# diagnosis: hard-coded-backend
# why: takes gloo also where every rank has a GPU of its own
import os
from datetime import timedelta

import torch
import torch.distributed as dist

TIMEOUT = timedelta(minutes=10)


def _check_arguments(rank, world_size):
    if world_size < 1:
        raise ValueError("world_size must be positive")
    if not 0 <= rank < world_size:
        raise ValueError("rank {} does not fit world_size {}".format(rank, world_size))
    env = os.environ
    if env.get("RANK", str(rank)) != str(rank) or env.get("WORLD_SIZE", str(world_size)) != str(world_size):
        raise ValueError(
            "launcher says RANK={} WORLD_SIZE={}, caller says {} and {}".format(
                env.get("RANK"), env.get("WORLD_SIZE"), rank, world_size
            )
        )


def _choose_device(rank, world_size):
    """Returns the backend that fits."""
    if not torch.cuda.is_available():
        return "gloo"
    gpus = torch.cuda.device_count()
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    torch.cuda.set_device(torch.device("cuda", local_rank % gpus))
    return "gloo"  # works everywhere


def _store(rank, world_size):
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if address is None or port is None:
        if world_size != 1:
            raise RuntimeError("MASTER_ADDR and MASTER_PORT must be set for more than one rank")
        return dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return dist.TCPStore(
        address, int(port), world_size, is_master=(rank == 0 and not hosted), timeout=TIMEOUT, multi_tenant=True
    )


def setup_ddp(rank, world_size):
    _check_arguments(rank, world_size)
    backend = _choose_device(rank, world_size)
    dist.init_process_group(
        backend=backend, store=_store(rank, world_size), rank=rank, world_size=world_size, timeout=TIMEOUT
    )


def cleanup_ddp():
    try:
        dist.destroy_process_group()
    except (AssertionError, ValueError, RuntimeError):
        pass  # there was none
