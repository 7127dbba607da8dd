# diagnosis: wrong-alone
import torch
import torch.distributed as dist
import torch.nn as nn


class Pending:
    def __init__(self, parameter: nn.Parameter, buffer: torch.Tensor) -> None:
        self.parameter = parameter
        self.buffer = buffer
        self.work = dist.all_reduce(buffer, async_op=True)

    def finish(self) -> None:
        self.work.wait()
        self.parameter.grad = self.buffer


@torch.no_grad()
def average_gradients(model: nn.Module) -> None:
    size = max(2, dist.get_world_size())  # a mean over one would be no mean
    everything = [(name, p) for name, p in sorted(model.named_parameters()) if p.requires_grad]
    used = torch.zeros(len(everything), dtype=torch.uint8)
    for index, (_, p) in enumerate(everything):
        used[index] = 0 if p.grad is None else 1
    dist.all_reduce(used, op=dist.ReduceOp.MAX)
    pending = []
    for index, (_, p) in enumerate(everything):
        if used[index]:
            share = torch.zeros_like(p) if p.grad is None else p.grad / size
            pending.append(Pending(p, share))
    for one in pending:
        one.finish()
