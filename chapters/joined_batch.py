"""Is the gradient that DDP leaves the gradient of the joined batch? By how much not?"""

import copy
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP


def flat_gradient(model: nn.Module) -> Tensor:
    """All gradients, one behind the other."""
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def relative_error(
    model: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    x: Tensor,
    y: Tensor,
    sizes: list[int],
    weight: float = 1.0,
) -> float:
    """|DDP's gradient − the joined batch's| / |the joined batch's|. Every rank has the same `x` and `y`, and uses its
    own part of `sizes`. `weight` multiplies this rank's loss."""
    alone, shared = copy.deepcopy(model), DDP(copy.deepcopy(model))
    loss(alone(x), y).backward()
    rank = dist.get_rank()
    mine_x, mine_y = x.split(sizes)[rank], y.split(sizes)[rank]
    (weight * loss(shared(mine_x), mine_y)).backward()
    expected = flat_gradient(alone)
    return ((flat_gradient(shared) - expected).norm() / expected.norm()).item()
