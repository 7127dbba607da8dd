"""The program behind chapter 1's first picture: a small network, trained for two steps on however many ranks."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from lockstep.ranks import mark

dist.init_process_group("gloo")
model = DDP(torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(12)]))
for name, parameter in model.module.named_parameters():
    parameter.register_post_accumulate_grad_hook(lambda _, name=name: mark(f"ready {name}"))
batch = torch.randn(256, 256)
for _ in range(2):
    mark("forward")
    loss = model(batch).square().mean()
    mark("backward")
    loss.backward()
    mark("end")
