# style: gradients are averaged in float32 and rounded once, as with the reduce_dtype of FSDP2
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


def gather(shard, world):
    whole = shard.new_empty(world * len(shard), shard.shape[1])
    dist.all_gather(list(whole.split(len(shard))), shard.detach().contiguous())
    return whole


class Sharded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs, shard, layer):
        ctx.layer = layer
        ctx.save_for_backward(inputs, shard)
        whole = gather(shard, layer.world)[: layer.out]
        bias = whole[:, layer.wide] if layer.has_bias else None
        return F.linear(inputs, whole[:, : layer.wide], bias)

    @staticmethod
    def backward(ctx, gradient):
        inputs, shard = ctx.saved_tensors
        layer = ctx.layer
        whole = gather(shard, layer.world)[: layer.out]
        of_inputs = None
        if ctx.needs_input_grad[0]:
            of_inputs = gradient @ whole[:, : layer.wide]
        del whole
        rows = gradient.reshape(-1, layer.out)
        of_whole = torch.zeros(
            layer.world * len(shard),
            shard.shape[1],
            dtype=shard.dtype if shard.dtype == torch.float64 else torch.float32,
            device=shard.device,
        )
        of_whole[: layer.out, : layer.wide] = rows.t() @ inputs.reshape(-1, layer.wide)
        if layer.has_bias:
            of_whole[: layer.out, layer.wide] = rows.sum(0)
        of_whole /= layer.world
        of_shard = torch.empty_like(shard, dtype=of_whole.dtype)
        dist.reduce_scatter(of_shard, list(of_whole.split(len(shard))))
        return of_inputs, of_shard.to(shard.dtype), None


class ShardedLinear(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.world, self.rank = dist.get_world_size(), dist.get_rank()
        self.out, self.wide = linear.weight.shape
        self.has_bias = linear.bias is not None
        each = -(-self.out // self.world)
        with torch.no_grad():
            weight = linear.weight if linear.bias is None else torch.cat([linear.weight, linear.bias[:, None]], 1)
            mine = weight[self.rank * each : (self.rank + 1) * each]
            rows = weight.new_zeros(each, weight.shape[1])
            rows[: len(mine)] = mine
        self.shard = nn.Parameter(rows)

    def forward(self, inputs):
        return Sharded.apply(inputs, self.shard, self)

    @torch.no_grad()
    def full_state_dict(self):
        whole = gather(self.shard, self.world)[: self.out]
        state = {"weight": whole[:, : self.wide].clone()}
        if self.has_bias:
            state["bias"] = whole[:, self.wide].clone()
        return state
