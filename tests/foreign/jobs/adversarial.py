"""Two models that are trained in turn, each in a DDP of its own, with a mean by an object collective."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def step_of(model, optimizer, batch):
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
writer, critic = DDP(torch.nn.Linear(6, 6)), DDP(torch.nn.Linear(6, 1))
by_writer, by_critic = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (writer, critic))
for round in range(3):
    batch = torch.randn(4, 6)
    step_of(critic, by_critic, batch)
    step_of(writer, by_writer, batch)
    losses = [None] * size
    dist.all_gather_object(losses, float(round))
dist.destroy_process_group()
