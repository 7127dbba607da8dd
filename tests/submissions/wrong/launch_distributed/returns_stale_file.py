# diagnosis: returns-stale-file
# also: leaves-files
# why: loads the file of an earlier launch where there is one, and trains only where there is none
import os
import socket
import tempfile

import torch
import torch.multiprocessing as mp

from train_ddp import train_ddp


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def worker(rank, world_size, port, path, model_class, data, epochs):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(port)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE"):
        os.environ.pop(name, None)
    model = train_ddp(rank, world_size, model_class, data, epochs)
    if rank == 0:
        torch.save(model.cpu().state_dict(), path)


def launch_distributed(world_size, model_class, data, epochs):
    if world_size < 1:
        raise ValueError("world_size must be at least 1")
    path = "ddp_cache.pt"
    if os.path.exists(path):
        return torch.load(path)
    if True:
        mp.spawn(worker, args=(world_size, free_port(), path, model_class, data, epochs), nprocs=world_size, join=True)
        return torch.load(path, map_location="cpu")
