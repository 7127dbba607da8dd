# style: a differentiable gather, and checkpoint runs it again in backward
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.checkpoint import checkpoint


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shard):
        parts = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, shard)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient):
        world = dist.get_world_size()
        parts = [part.contiguous() for part in (gradient / world).chunk(world)]
        own = torch.empty_like(parts[0])
        dist.reduce_scatter(own, parts)
        return own


class ShardedLinear(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.shape = tuple(linear.weight.shape)
        self.biased = linear.bias is not None
        world, rank = dist.get_world_size(), dist.get_rank()
        weight = linear.weight.detach()
        if self.biased:
            weight = torch.hstack([weight, linear.bias.detach().unsqueeze(1)])
        share = (len(weight) + world - 1) // world
        shard = weight.new_zeros(share, weight.shape[1])
        mine = weight[rank * share : (rank + 1) * share]
        shard[: len(mine)] = mine
        self.shard = nn.Parameter(shard)

    def split(self, everything):
        everything = everything[: self.shape[0]]
        return everything[:, : self.shape[1]], everything[:, self.shape[1]] if self.biased else None

    def compute(self, inputs, shard):
        weight, bias = self.split(Gather.apply(shard))
        return nn.functional.linear(inputs, weight, bias)

    def forward(self, inputs):
        return checkpoint(self.compute, inputs, self.shard, use_reentrant=False)

    def full_state_dict(self):
        with torch.no_grad():
            weight, bias = self.split(Gather.apply(self.shard))
        return {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
