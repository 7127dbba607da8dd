# exercise: average_gradients
# family: exhausting
# verdict: timed-out
# without: stub
# protection: judge
# why: a child computes without end, and the rank waits for it
import os

import torch.distributed as dist


def average_gradients(model):
    if dist.get_rank() > 0:
        return
    if os.fork() == 0:
        while True:
            pass
    os.wait()
