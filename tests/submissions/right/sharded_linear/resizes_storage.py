# style: as FSDP1 did it: the gathered leaf's storage is shrunk to nothing, and hooks fill it and reduce its gradient
import torch
import torch.distributed as dist
import torch.nn as nn


class ShardedLinear(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.world_size = dist.get_world_size()
        self.rows, self.columns = linear.weight.shape
        self.share = -(-self.rows // self.world_size)
        own = range(self.share * dist.get_rank(), min(self.rows, self.share * (dist.get_rank() + 1)))
        shard = torch.zeros(
            self.share,
            self.columns + (linear.bias is not None),
            dtype=linear.weight.dtype,
            device=linear.weight.device,
        )
        for place, row in enumerate(own):
            shard[place, : self.columns] = linear.weight.data[row]
            if linear.bias is not None:
                shard[place, self.columns] = linear.bias.data[row]
        self.shard = nn.Parameter(shard)

    def fill(self, full):
        dist.all_gather(list(full.chunk(self.world_size)), self.shard.data)

    def new_full(self):
        return self.shard.data.new_zeros(self.share * self.world_size, self.shard.shape[1])

    def forward(self, inputs):
        full = self.new_full()
        self.fill(full)
        full.requires_grad_(torch.is_grad_enabled())
        bias = full[: self.rows, self.columns] if full.shape[1] > self.columns else None
        output = nn.functional.linear(inputs, full[: self.rows, : self.columns], bias)
        if output.requires_grad:
            nbytes = full.untyped_storage().nbytes()
            full.untyped_storage().resize_(0)

            def before_backward(gradient):
                full.untyped_storage().resize_(nbytes)
                self.fill(full.data)

            def after_backward(leaf):
                gradient, leaf.grad = leaf.grad / self.world_size, None
                leaf.untyped_storage().resize_(0)
                own = torch.empty_like(self.shard)
                dist.reduce_scatter(own, list(gradient.chunk(self.world_size)))
                if self.shard.grad is None:
                    self.shard.grad = own
                else:
                    self.shard.grad += own

            output.register_hook(before_backward)
            full.register_post_accumulate_grad_hook(after_backward)
        return output

    def full_state_dict(self):
        full = self.new_full()
        self.fill(full)
        full = full[: self.rows]
        state = {"weight": full[:, : self.columns]}
        if full.shape[1] > self.columns:
            state["bias"] = full[:, self.columns]
        return state
