"""How far the ranks are apart: the one number that DDP never looks at."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor


def spread(tensors: Iterable[Tensor]) -> float:
    """The largest difference between two ranks, over all elements of these tensors. Every rank has to call it."""
    low = torch.cat([tensor.detach().flatten().double() for tensor in tensors])
    high = low.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN)
    dist.all_reduce(high, dist.ReduceOp.MAX)
    return (high - low).max().item()
