# diagnosis: order-differs
# why: sorted by this rank's own norms: another order on each rank
import torch
import torch.distributed as dist
import torch.nn as nn


def average_gradients(model: nn.Module) -> None:
    world = dist.get_world_size()
    params = [p for p in model.parameters() if p.requires_grad]
    have = torch.tensor([float(p.grad is not None) for p in params])
    dist.all_reduce(have)
    pairs = sorted(zip(params, have.tolist()), key=lambda pair: 0.0 if pair[0].grad is None else -pair[0].grad.norm().item())
    for p, count in pairs:
        if count == 0:
            continue
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        dist.all_reduce(p.grad)
        p.grad.div_(world)
