# style: parts of equal length, padded with zeros, in one all-gather
import torch
import torch.distributed as dist


class ShardedOptimizer:
    def __init__(self, params, optimizer_class, **defaults):
        given = list(params)
        groups = given if isinstance(given[0], dict) else [dict(params=given)]
        groups = [dict(g, params=list(g["params"])) for g in groups]
        self.world_size = dist.get_world_size()
        self.everything = [p for g in groups for p in g["params"]]
        self.parts = [[] for _ in range(self.world_size)]
        sizes = [0 for _ in range(self.world_size)]
        order = sorted(range(len(self.everything)), key=lambda n: -self.everything[n].numel())
        for n in order:
            smallest = sizes.index(min(sizes))
            sizes[smallest] += self.everything[n].numel()
            self.parts[smallest].append(self.everything[n])
        self.length = max(sizes)
        own = {id(p) for p in self.parts[dist.get_rank()]}
        self.inner = optimizer_class(
            [dict(g, params=[p for p in g["params"] if id(p) in own]) for g in groups], **defaults
        )

    @property
    def param_groups(self):
        return self.inner.param_groups

    @torch.no_grad()
    def step(self):
        self.inner.step()
        like = self.everything[0]
        padded = torch.zeros(self.length, dtype=like.dtype, device=like.device)
        start = 0
        for p in self.parts[dist.get_rank()]:
            padded[start : start + p.numel()] = p.view(-1)
            start += p.numel()
        gathered = [torch.empty_like(padded) for _ in range(self.world_size)]
        dist.all_gather(gathered, padded)
        for part, flat in zip(self.parts, gathered):
            start = 0
            for p in part:
                p.copy_(flat[start : start + p.numel()].view_as(p))
                start += p.numel()

    def zero_grad(self):
        for p in self.everything:
            p.grad = None
