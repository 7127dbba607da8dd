# diagnosis: bucket-never-launched
# why: a bucket that backward did not fill is left out
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn as nn


class MiniDDP(nn.Module):
    def __init__(self, module: nn.Module, bucket_cap_mb: float = 25):
        super().__init__()
        self.module = module
        self.world = dist.get_world_size()
        self.sync = True
        for p in module.parameters():
            dist.broadcast(p.data, src=0)
        for b in module.buffers():
            dist.broadcast(b.data, src=0)

        self.params = [p for p in module.parameters() if p.requires_grad]
        cap = bucket_cap_mb * 1024 * 1024
        self.buckets = []
        size = cap + 1
        for p in reversed(self.params):
            nbytes = p.numel() * p.element_size()
            if size + nbytes > cap:
                self.buckets.append([])
                size = 0
            self.buckets[-1].append(p)
            size += nbytes
        self.where = {id(p): i for i, bucket in enumerate(self.buckets) for p in bucket}
        for p in self.params:
            p.register_post_accumulate_grad_hook(self.hook)
        self.reset()

    def reset(self):
        self.missing = [len(bucket) for bucket in self.buckets]
        self.pending = []

    def hook(self, p):
        if not self.sync:
            return
        self.missing[self.where[id(p)]] -= 1
        while len(self.pending) < len(self.buckets) and self.missing[len(self.pending)] == 0:
            self.launch()

    def launch(self):
        bucket = self.buckets[len(self.pending)]
        flat = torch.cat([torch.zeros(p.numel()) if p.grad is None else p.grad.view(-1) for p in bucket])
        flat /= self.world
        work = dist.all_reduce(flat, async_op=True)
        self.pending.append((flat, work))

    def finish_gradient_synchronization(self):
        for bucket, (flat, work) in zip(self.buckets, self.pending):
            work.wait()
            for p, g in zip(bucket, flat.split([p.numel() for p in bucket])):
                if p.grad is not None:
                    p.grad = g.view_as(p).clone()
        self.reset()

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self):
        self.sync = False
        try:
            yield
        finally:
            self.sync = True

    def state_dict(self, *args, **kwargs):
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args, **kwargs):
        return self.module.load_state_dict(*args, **kwargs)
