"""A job that talks by itself: configuration from rank 0, metrics to rank 0, groups, a ring, objects."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
config = torch.arange(4.0) if rank == 0 else torch.zeros(4)
dist.broadcast(config, src=0)
halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
half = halves[rank // 2]
right, left = (rank + 1) % size, (rank - 1) % size
for step in range(3):
    value = torch.full((8,), float(rank + step))
    dist.all_reduce(value)
    share = torch.ones(2)
    dist.all_reduce(share, group=half)
    parts = [torch.zeros(8) for _ in range(size)]
    dist.all_gather(parts, value)
    total = torch.ones(3)
    dist.reduce(total, dst=0)
    received = torch.zeros(5)
    if rank % 2 == 0:
        dist.send(torch.ones(5), dst=right)
        dist.recv(received, src=left)
    else:
        dist.recv(received, src=left)
        dist.send(torch.ones(5), dst=right)
    facts = [None] * size
    dist.all_gather_object(facts, {"rank": rank, "step": step})
    mine = torch.zeros(2)
    dist.scatter(mine, [torch.ones(2)] * size if rank == 0 else None, src=0)
    swapped = torch.zeros(size)
    dist.all_to_all_single(swapped, torch.arange(float(size)))
dist.barrier()
dist.destroy_process_group()
