"""A pipeline of one stage a rank, by torch.distributed.pipelining."""

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
layer = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
stage = PipelineStage(layer, rank, size, torch.device("cpu"))
chunks = 4
schedule = Schedule1F1B(stage, chunks, loss_fn=torch.nn.functional.mse_loss)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
for step in range(3):
    batch, target = torch.randn(8, 8), torch.zeros(8, 8)
    if rank == 0:
        schedule.step(batch)
    elif rank == size - 1:
        losses = []
        schedule.step(target=target, losses=losses)
    else:
        schedule.step()
    optimizer.step()
    optimizer.zero_grad()
dist.barrier()
dist.destroy_process_group()
