# style: gradients are views into the buckets, which are zeroed for the next step
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn as nn


class _Group:
    def __init__(self, members):
        self.members = members
        self.storage = torch.zeros(sum(p.numel() for p in members), dtype=members[0].dtype, device=members[0].device)
        self.views, at = {}, 0
        for p in members:
            self.views[p] = self.storage[at : at + p.numel()].view(p.shape)
            at += p.numel()
        self.arrived = 0
        self.handle = None


class MiniDDP(nn.Module):
    def __init__(self, module, bucket_cap_mb=25):
        super().__init__()
        self.module = module
        self._active = True
        self._next = 0
        with torch.no_grad():
            for t in list(module.parameters()) + list(module.buffers()):
                dist.broadcast(t, 0)
        limit = bucket_cap_mb * (1 << 20)
        lists, used = [[]], 0
        for p in [p for p in module.parameters() if p.requires_grad][::-1]:
            n = p.nbytes
            if lists[-1] and used + n > limit:
                lists.append([])
                used = 0
            lists[-1].append(p)
            used += n
        self._groups = [_Group(members) for members in lists if members]
        self._home = {p: g for g in self._groups for p in g.members}
        self._index = {p: i for i, p in enumerate(self._home)}
        self._seen = torch.zeros(len(self._home), dtype=torch.int64)
        for p in self._home:
            p.register_post_accumulate_grad_hook(self._arrived)

    @torch.no_grad()
    def _arrived(self, p):
        self._seen[self._index[p]] = 1
        group = self._home[p]
        view = group.views[p]
        if p.grad.data_ptr() != view.data_ptr():
            view.copy_(p.grad)
            p.grad = view
        if self._active:
            group.arrived += 1
            self._go(force=False)

    def _go(self, force):
        while self._next < len(self._groups):
            group = self._groups[self._next]
            if not force and group.arrived < len(group.members):
                return
            for p in group.members:
                if p.grad is None:
                    group.views[p].zero_()
            group.storage.div_(dist.get_world_size())
            group.handle = dist.all_reduce(group.storage, async_op=True)
            self._next += 1

    @torch.no_grad()
    def finish_gradient_synchronization(self):
        self._go(force=True)
        dist.all_reduce(self._seen, op=dist.ReduceOp.MAX)
        for group in self._groups:
            group.handle.wait()
            group.arrived = 0
        for p, i in self._index.items():
            p.grad = self._home[p].views[p] if self._seen[i] else None
        self._seen.zero_()
        self._next = 0

    @contextmanager
    def no_sync(self):
        self._active = False
        try:
            yield
        finally:
            self._active = True

    def forward(self, *inputs, **named):
        return self.module(*inputs, **named)

    def state_dict(self, *a, **k):
        return self.module.state_dict(*a, **k)

    def load_state_dict(self, state, *a, **k):
        return self.module.load_state_dict(state, *a, **k)
