# diagnosis: never-divides
# why: the division was forgotten
import torch
import torch.distributed as dist
import torch.nn as nn


def average_gradients(model: nn.Module) -> None:
    params = [p for p in model.parameters() if p.requires_grad]
    have = torch.tensor([float(p.grad is not None) for p in params])
    dist.all_reduce(have)
    for p, count in zip(params, have.tolist()):
        if count == 0:
            continue
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        dist.all_reduce(p.grad)
