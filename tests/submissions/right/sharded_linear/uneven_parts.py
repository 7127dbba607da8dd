# style: weight and bias are parameters of their own, without padding, which travel in one flat tensor
import torch
import torch.distributed as dist
from torch import nn


class Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, layer):
        ctx.layer = layer
        ctx.save_for_backward(x, weight, bias)
        full_weight, full_bias = layer.collect(weight, bias)
        y = torch.einsum("...i,oi->...o", x, full_weight)
        return y if full_bias is None else y + full_bias

    @staticmethod
    def backward(ctx, dy):
        x, weight, bias = ctx.saved_tensors
        layer = ctx.layer
        full_weight, _ = layer.collect(weight, bias)
        dx = torch.einsum("...o,oi->...i", dy, full_weight) if ctx.needs_input_grad[0] else None
        del full_weight
        dy, x = dy.reshape(-1, layer.out_features), x.reshape(-1, layer.in_features)
        dw = torch.einsum("no,ni->oi", dy, x)
        db = dy.sum(0)
        slots = []
        for start, stop in layer.bounds:
            pieces = [dw[start:stop].flatten()] + ([] if bias is None else [db[start:stop]])
            piece = torch.cat(pieces)
            slots.append(torch.cat([piece, piece.new_zeros(layer.slot - len(piece))]))
        mine = slots[0].new_empty(layer.slot)
        dist.reduce_scatter(mine, slots, op=dist.ReduceOp.AVG)
        dw = mine[: weight.numel()].view_as(weight)
        db = None if bias is None else mine[weight.numel() : weight.numel() + bias.numel()]
        return dx, dw, db, None


class ShardedLinear(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        world = dist.get_world_size()
        small, larger = divmod(linear.out_features, world)
        self.bounds = []
        start = 0
        for rank in range(world):
            stop = start + small + (rank < larger)
            self.bounds.append((start, stop))
            start = stop
        own = slice(*self.bounds[dist.get_rank()])
        self.weight = nn.Parameter(linear.weight.detach()[own].clone())
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach()[own].clone())
        self.slot = (small + (larger > 0)) * (linear.in_features + (self.bias is not None))

    def collect(self, weight, bias):
        flat = torch.cat([weight.detach().flatten()] + ([] if bias is None else [bias.detach()]))
        sent = flat.new_zeros(self.slot)
        sent[: len(flat)] = flat
        slots = [torch.empty_like(sent) for _ in self.bounds]
        dist.all_gather(slots, sent)
        weights, biases = [], []
        for slot, (start, stop) in zip(slots, self.bounds):
            n = (stop - start) * self.in_features
            weights.append(slot[:n].view(-1, self.in_features))
            biases.append(slot[n : n + stop - start])
        return torch.cat(weights), None if bias is None else torch.cat(biases)

    def forward(self, x):
        return Linear.apply(x, self.weight, self.bias, self)

    def full_state_dict(self):
        weight, bias = self.collect(self.weight, self.bias)
        return {"weight": weight, **({} if bias is None else {"bias": bias})}
