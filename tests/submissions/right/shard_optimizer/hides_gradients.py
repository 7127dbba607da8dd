# style: an optimizer of all parameters that sees the gradients of its own only, so that it never makes other state
import torch
import torch.distributed as dist


class ShardedOptimizer:
    def __init__(self, params, optimizer_class, **defaults):
        self.whole = optimizer_class(params, **defaults)
        self.param_groups = self.whole.param_groups
        self.params = [p for group in self.param_groups for p in group["params"]]
        size = dist.get_world_size()
        filled = [0] * size
        self.owners = []
        for p in self.params:
            owner = filled.index(min(filled))
            filled[owner] += p.numel()
            if owner != dist.get_rank():
                self.whole.state.pop(p, None)  # Adagrad makes its state at once
            self.owners.append(owner)

    def step(self):
        rank = dist.get_rank()
        gradients = [p.grad for p in self.params]
        for p, owner in zip(self.params, self.owners):
            if owner != rank:
                p.grad = None
        self.whole.step()
        for p, gradient in zip(self.params, gradients):
            p.grad = gradient
        works = [dist.broadcast(p.detach(), src=owner, async_op=True) for p, owner in zip(self.params, self.owners)]
        for work in works:
            work.wait()

    def zero_grad(self):
        self.whole.zero_grad(set_to_none=True)
