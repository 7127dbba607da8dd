"""A script that starts its ranks itself, with mp.spawn."""

import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def worker(rank, size, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=size)
    for step in range(3):
        total = torch.ones(4)
        dist.all_reduce(total)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(worker, args=(3, port), nprocs=3)
