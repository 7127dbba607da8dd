# style: reduces to rank 0, which divides and broadcasts
import torch
import torch.distributed as dist
import torch.nn as nn


def average_gradients(model: nn.Module) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    for p in model.parameters():
        if not p.requires_grad:
            continue
        flag = torch.tensor(int(p.grad is not None))
        dist.all_reduce(flag)
        if flag.item() == 0:
            continue
        total = p.grad.clone() if p.grad is not None else torch.zeros_like(p, requires_grad=False)
        dist.reduce(total, 0)
        if rank == 0:
            total /= world
        dist.broadcast(total, 0)
        p.grad = total
