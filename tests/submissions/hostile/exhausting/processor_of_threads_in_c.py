# exercise: average_gradients
# family: exhausting
# verdict: timed-out
# without: stub
# protection: judge
# why: computes in torch with the interpreter lock released, so that no Python sees it, in more threads than there are cores
import torch
import torch.distributed as dist


def average_gradients(model):
    torch.set_num_threads(16)
    large = torch.ones(1500, 1500)
    while dist.get_rank() == 0:
        large = large @ large.sign()
