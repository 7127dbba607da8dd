# diagnosis: missing-stays-missing
# why: zeros take part in the all-reduce, and the result is dropped where the gradient was missing
import torch
import torch.distributed as dist
import torch.nn as nn


def average_gradients(model: nn.Module) -> None:
    world = dist.get_world_size()
    params = [p for p in model.parameters() if p.requires_grad]
    have = torch.tensor([float(p.grad is not None) for p in params])
    dist.all_reduce(have)
    for p, count in zip(params, have.tolist()):
        if count == 0:
            continue
        if p.grad is None:
            dist.all_reduce(torch.zeros_like(p, requires_grad=False))
        else:
            dist.all_reduce(p.grad)
            p.grad.div_(world)
