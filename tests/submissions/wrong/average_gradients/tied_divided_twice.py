# diagnosis: averages-tied-twice
# why: the walk through the modules divides the shared weight once for each
import torch
import torch.distributed as dist
import torch.nn as nn


def average_gradients(model: nn.Module) -> None:
    params = [p for p in model.parameters() if p.requires_grad]
    have = torch.tensor([p.grad is not None for p in params], dtype=torch.int32)
    dist.all_reduce(have)
    for p, count in zip(params, have):
        if count:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad)
    for module in model.modules():
        for p in module.parameters(recurse=False):
            if p.requires_grad and p.grad is not None:
                p.grad /= dist.get_world_size()
