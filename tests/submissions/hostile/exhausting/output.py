# exercise: average_gradients
# family: exhausting
# verdict: too-much-output
# without: stub
# protection: judge
# why: prints without end
import torch.distributed as dist


def average_gradients(model):
    while dist.get_rank() == 0:
        print("x" * 10_000)
