# exercise: average_gradients
# family: exhausting
# verdict: too-much-output
# without: wrong/average_gradients/trips_over_none
# protection: judge
# why: in every run each rank reports 250 MB, and the judge keeps what all runs have reported
import torch
import torch.distributed as dist

from lockstep.ranks import observe


def average_gradients(model):
    for number in range(4):
        observe(f"large {number}", torch.zeros(62 << 20, dtype=torch.uint8))
    world = dist.get_world_size()
    for p in model.parameters():
        if p.requires_grad:
            dist.all_reduce(p.grad)
            p.grad /= world
