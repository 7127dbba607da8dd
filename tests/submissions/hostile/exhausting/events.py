# exercise: average_gradients
# family: exhausting
# verdict: too-much-output
# without: stub
# protection: judge
# why: recorded events of a megabyte each, kept by the supervisor for the end
import torch.distributed as dist

from lockstep.ranks import mark


def average_gradients(model):
    name = "x" * (1 << 20)
    while dist.get_rank() == 0:
        mark(name)
