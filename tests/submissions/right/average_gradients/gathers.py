# style: gathers every rank's gradient and takes the mean of the stack
import torch
import torch.distributed as dist
import torch.nn as nn


def average_gradients(model: nn.Module) -> None:
    n = dist.get_world_size()
    params = [p for p in model.parameters() if p.requires_grad]
    mine = [p.grad is not None for p in params]
    everyones: list = [None] * n
    dist.all_gather_object(everyones, mine)
    for i, p in enumerate(params):
        if not any(flags[i] for flags in everyones):
            continue
        grad = p.grad if p.grad is not None else torch.zeros_like(p)
        parts = [torch.empty_like(grad) for _ in range(n)]
        dist.all_gather(parts, grad.contiguous())
        p.grad = torch.stack(parts).mean(0)
