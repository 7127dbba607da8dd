# style: a tiny optimizer for each group; a group of which this rank owns nothing is a dictionary that nobody reads
import torch
import torch.distributed as dist


class ShardedOptimizer:
    def __init__(self, params, optimizer_class, **defaults):
        groups = list(params)
        groups = [{"params": groups}] if torch.is_tensor(groups[0]) else groups
        held = torch.zeros(dist.get_world_size())
        self.all, self.owner_of = [], []
        self.optimizers, self.param_groups = [], []
        for group in groups:
            options = {key: value for key, value in group.items() if key != "params"}
            own = []
            for p in group["params"]:
                owner = int(held.argmin())
                held[owner] += p.numel()
                self.all.append(p)
                self.owner_of.append(owner)
                if owner == dist.get_rank():
                    own.append(p)
            if own:
                self.optimizers.append(optimizer_class(own, **{**defaults, **options}))
                self.param_groups.append(self.optimizers[-1].param_groups[0])
            else:
                self.param_groups.append({"params": [], **defaults, **options})

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()
        for p, owner in zip(self.all, self.owner_of):
            dist.broadcast(p.data, owner)

    def zero_grad(self):
        for p in self.all:
            p.grad = None
