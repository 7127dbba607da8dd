# style: state_dict by hooks on the wrapper; reversed index arithmetic; averages with ReduceOp.AVG on scaled gradients
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn as nn


class MiniDDP(nn.Module):
    def __init__(self, module: nn.Module, bucket_cap_mb: float = 25) -> None:
        super().__init__()
        self.module = module
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), src=0)
        self.quiet = 0
        trainable = [p for p in module.parameters() if p.requires_grad]
        self.plan: list[list[nn.Parameter]] = []
        room = 0.0
        for index in range(len(trainable) - 1, -1, -1):
            need = trainable[index].numel() * trainable[index].element_size()
            if need > room or not self.plan:
                self.plan.append([])
                room = bucket_cap_mb * 2**20
            room -= need
            self.plan[-1].append(trainable[index])
        self.fresh: set[int] = set()
        self.inflight: list[tuple[torch.Tensor, dist.Work]] = []
        for p in trainable:
            p.register_post_accumulate_grad_hook(self.on_gradient)

    def on_gradient(self, p: nn.Parameter) -> None:
        if self.quiet:
            return
        self.fresh.add(id(p))
        for bucket in self.plan[len(self.inflight) :]:
            if not all(id(q) in self.fresh for q in bucket):
                break
            self.start(bucket)

    @torch.no_grad()
    def start(self, bucket: list[nn.Parameter]) -> None:
        rows = [p.new_zeros(p.shape) if p.grad is None else p.grad for p in bucket]
        flags = [torch.tensor([p.grad is not None], dtype=p.dtype) for p in bucket]
        buffer = torch.cat([t.flatten() for t in rows] + flags).mul_(1 / dist.get_world_size())
        self.inflight.append((buffer, dist.all_reduce(buffer, async_op=True)))

    @torch.no_grad()
    def finish_gradient_synchronization(self) -> None:
        for bucket in self.plan[len(self.inflight) :]:
            self.start(bucket)
        for bucket, (buffer, work) in zip(self.plan, self.inflight):
            work.wait()
            flags = buffer[-len(bucket) :]
            start = 0
            for p, flag in zip(bucket, flags):
                stop = start + p.numel()
                if flag > 0:
                    p.grad = buffer[start:stop].reshape(p.shape)
                start = stop
        self.inflight.clear()
        self.fresh.clear()

    @contextmanager
    def no_sync(self):
        self.quiet += 1
        try:
            yield
        finally:
            self.quiet -= 1

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def state_dict(self, *args, **kwargs):
        full = super().state_dict(*args, **kwargs)
        return {name.removeprefix("module."): value for name, value in full.items()}

    def load_state_dict(self, state, strict=True, assign=False):
        return super().load_state_dict({f"module.{name}": value for name, value in state.items()}, strict, assign)
