# exercise: average_gradients
# family: exhausting
# verdict: trips-over-none
# without: wrong/average_gradients/trips_over_none
# protection: sandbox
# why: a right mean, after which it fills the sandbox's /tmp, in which the next run needs a folder
import os

import torch.distributed as dist


def average_gradients(model):
    world = dist.get_world_size()
    for p in model.parameters():
        if p.requires_grad:
            dist.all_reduce(p.grad)
            p.grad /= world
    full = 0
    for number in range(4000):
        try:
            with open(f"/tmp/full-{os.getpid()}-{number}", "wb") as file:
                os.posix_fallocate(file.fileno(), 0, 1 << 20 if number < 1100 else 4096)
        except OSError:
            full += 1
            if full > 1000:
                break
