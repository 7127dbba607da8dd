# diagnosis: averages-tied-twice
# why: remove_duplicate=False names the shared weight once for each module, so it is sent twice
import torch
import torch.distributed as dist
import torch.nn as nn


def average_gradients(model: nn.Module) -> None:
    world = dist.get_world_size()
    params = [p for _, p in model.named_parameters(remove_duplicate=False) if p.requires_grad]
    have = torch.tensor([float(p.grad is not None) for p in params])
    dist.all_reduce(have)
    for p, count in zip(params, have.tolist()):
        if count == 0:
            continue
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        dist.all_reduce(p.grad)
        p.grad.div_(world)
