# exercise: average_gradients
# family: exhausting
# verdict: too-much-output
# without: stub
# protection: judge
# why: bytes that are no text and never a line, on both streams and below Python's
import os

import torch.distributed as dist


def average_gradients(model):
    while dist.get_rank() == 0:
        os.write(1, b"\xf0\x9f\xff\x00" * 4000)
        os.write(2, b"\x1b[2J\r" * 4000)
