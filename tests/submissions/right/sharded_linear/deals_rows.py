# style: rows are dealt in turn, weight and bias are two parameters, and the gradient is divided before it is sent
import torch
import torch.distributed as dist
import torch.nn as nn


class _Deal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs, weight, bias, rows):
        ctx.save_for_backward(inputs, weight, bias)
        ctx.rows = rows
        whole_weight, whole_bias = collect(weight, bias, rows)
        out = inputs @ whole_weight.t()
        return out if whole_bias is None else out + whole_bias

    @staticmethod
    def backward(ctx, grad):
        inputs, weight, bias = ctx.saved_tensors
        whole, _ = collect(weight, bias, ctx.rows)
        of_inputs = torch.matmul(grad, whole) if ctx.needs_input_grad[0] else None
        del whole
        world = dist.get_world_size()
        g = grad.reshape(-1, ctx.rows)
        of_weight = g.t().mm(inputs.reshape(-1, weight.shape[1]))
        if bias is not None:
            of_weight = torch.cat([of_weight, g.sum(0)[:, None]], 1)
        share = weight.shape[0]
        pieces = []
        for r in range(world):
            piece = of_weight.new_zeros(share, of_weight.shape[1])
            own = of_weight[r::world]
            piece[: len(own)] = own / world
            pieces.append(piece)
        mine = torch.empty_like(pieces[0])
        dist.reduce_scatter(mine, pieces)
        if bias is None:
            return of_inputs, mine, None, None
        return of_inputs, mine[:, :-1].contiguous(), mine[:, -1].contiguous(), None


def collect(weight, bias, rows):
    world = dist.get_world_size()
    part = weight if bias is None else torch.cat([weight, bias[:, None]], 1)
    parts = [torch.empty_like(part) for _ in range(world)]
    dist.all_gather(parts, part.contiguous())
    whole = torch.stack(parts, 1).flatten(0, 1)[:rows]
    return (whole, None) if bias is None else (whole[:, :-1], whole[:, -1])


class ShardedLinear(nn.Module):
    def __init__(self, linear):
        super().__init__()
        world, rank = dist.get_world_size(), dist.get_rank()
        self.rows = linear.out_features
        share = (self.rows + world - 1) // world

        def deal(tensor):
            mine = tensor.detach()[rank::world]
            kept = tensor.new_zeros(share, *tensor.shape[1:])
            kept[: len(mine)] = mine
            return nn.Parameter(kept.detach())

        self.weight = deal(linear.weight)
        self.register_parameter("bias", None if linear.bias is None else deal(linear.bias))

    def forward(self, inputs):
        return _Deal.apply(inputs, self.weight, self.bias, self.rows)

    @torch.no_grad()
    def full_state_dict(self):
        weight, bias = collect(self.weight, self.bias, self.rows)
        return {"weight": weight.clone()} | ({} if bias is None else {"bias": bias.clone()})
