# diagnosis: trips-over-none
# why: parameters without a gradient were not thought of
import torch
import torch.distributed as dist
import torch.nn as nn


def average_gradients(model: nn.Module) -> None:
    for p in model.parameters():
        if p.requires_grad:
            dist.all_reduce(p.grad.data)
            p.grad.data /= dist.get_world_size()
