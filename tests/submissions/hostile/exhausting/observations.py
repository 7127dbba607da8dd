# exercise: average_gradients
# family: exhausting
# verdict: too-much-output
# without: stub
# protection: judge
# why: observations without end
import torch
import torch.distributed as dist

from lockstep.ranks import observe


def average_gradients(model):
    large = torch.zeros(4 << 20)
    while dist.get_rank() == 0:
        observe("large", large)
