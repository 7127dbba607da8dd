# exercise: average_gradients
# family: exhausting
# verdict: timed-out
# without: stub
# protection: judge
# why: one call of C that never comes back and never releases the lock: no thread of the rank answers
import re

import torch.distributed as dist


def average_gradients(model):
    if dist.get_rank() == 0:
        re.match(r"(a*)*b", "a" * 100)
