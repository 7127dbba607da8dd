# diagnosis: skips-missing-gradients
# why: the long tensor holds only the gradients that this rank has, so it is longer on some ranks
import torch
import torch.distributed as dist
import torch.nn as nn


def average_gradients(model: nn.Module) -> None:
    grads = [p.grad for p in model.parameters() if p.requires_grad and p.grad is not None]
    flat = torch.cat([g.flatten() for g in grads])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for grad, piece in zip(grads, flat.split([g.numel() for g in grads])):
        grad.copy_(piece.view_as(grad))
