# style: one closure a parameter, futures, torch's own flatten; buffers are broadcast before every forward too
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn as nn


from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors


class MiniDDP(torch.nn.Module):
    def __init__(self, module, bucket_cap_mb=25):
        torch.nn.Module.__init__(self)
        self.module = module
        self._sync_now = True
        self._sync_tensors([p.data for p in module.parameters()])
        self._sync_tensors(list(module.buffers()))
        cap, buckets = int(bucket_cap_mb * 2**20), []
        for p in reversed([q for q in module.parameters() if q.requires_grad]):
            if not buckets or sum(q.nbytes for q in buckets[-1]) + p.nbytes > cap:
                buckets.append([])
            buckets[-1].append(p)
        self._buckets = buckets
        self._counts = [0] * len(buckets)
        self._futures = []
        for number, bucket in enumerate(buckets):
            for p in bucket:
                p.register_post_accumulate_grad_hook(self._make_hook(number))

    @staticmethod
    def _sync_tensors(tensors):
        for t in tensors:
            dist.broadcast(t, 0)

    def _make_hook(self, number):
        def hook(_):
            if self._sync_now:
                self._counts[number] += 1
                while len(self._futures) < len(self._buckets):
                    n = len(self._futures)
                    if self._counts[n] != len(self._buckets[n]):
                        return
                    self._send(n)

        return hook

    def _send(self, n):
        with torch.no_grad():
            shares = [torch.zeros_like(p) if p.grad is None else p.grad / dist.get_world_size() for p in self._buckets[n]]
            there = torch.tensor([float(p.grad is not None) for p in self._buckets[n]])
            flat = _flatten_dense_tensors([*shares, there])
            future = dist.all_reduce(flat, async_op=True).get_future()
        self._futures.append((future, flat, [*shares, there]))

    def finish_gradient_synchronization(self):
        for n in range(len(self._futures), len(self._buckets)):
            self._send(n)
        for bucket, (future, flat, shapes) in zip(self._buckets, self._futures):
            future.wait()
            *means, there = _unflatten_dense_tensors(flat, shapes)
            for p, mean, count in zip(bucket, means, there):
                if count > 0:
                    p.grad = mean.detach()
        self._futures = []
        self._counts = [0] * len(self._buckets)

    def forward(self, *args, **kwargs):
        self._sync_tensors(list(self.module.buffers()))
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self):
        old = self._sync_now
        self._sync_now = False
        try:
            yield self
        finally:
            self._sync_now = old

    def state_dict(self, *args, **kwargs):
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args, **kwargs):
        return self.module.load_state_dict(*args, **kwargs)
