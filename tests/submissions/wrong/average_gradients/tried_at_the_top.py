# diagnosis: group-on-import
# why: the lines that tried it out under torchrun still stand at the top, not under a guard
import torch
import torch.distributed as dist
import torch.nn as nn

dist.init_process_group("gloo")
tensor = torch.ones(1)
dist.all_reduce(tensor)


@torch.no_grad()
def average_gradients(model: nn.Module) -> None:
    size = dist.get_world_size()
    for p in model.parameters():
        if not p.requires_grad:
            continue
        has = torch.tensor(0.0 if p.grad is None else 1.0)
        dist.all_reduce(has)
        if has == 0:
            continue
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        dist.all_reduce(p.grad)
        p.grad /= size
