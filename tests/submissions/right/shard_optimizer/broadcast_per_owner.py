# style: each owner's parameters travel as one long tensor; owners in the order given, the emptiest rank first
import torch
import torch.distributed as dist


class ShardedOptimizer:
    def __init__(self, params, optimizer_class, **defaults):
        params = list(params)
        if not isinstance(params[0], dict):
            params = [{"params": params}]
        world, rank = dist.get_world_size(), dist.get_rank()
        self.shards = [[] for _ in range(world)]
        load = [0] * world
        mine = []
        for group in params:
            owned = []
            for p in group["params"]:
                owner = min(range(world), key=load.__getitem__)
                load[owner] += p.numel()
                self.shards[owner].append(p)
                if owner == rank:
                    owned.append(p)
            mine.append({**group, "params": owned})
        self.optimizer = optimizer_class(mine, **defaults)
        self.param_groups = self.optimizer.param_groups

    def step(self):
        self.optimizer.step()
        with torch.no_grad():
            for owner, shard in enumerate(self.shards):
                if not shard:
                    continue
                flat = torch.cat([p.flatten() for p in shard])
                dist.broadcast(flat, owner)
                for p, piece in zip(shard, flat.split([p.numel() for p in shard])):
                    p.copy_(piece.view_as(p))

    def zero_grad(self):
        for shard in self.shards:
            for p in shard:
                p.grad = None
