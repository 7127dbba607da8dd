"""Tensor parallel: a column-wise and a row-wise layer on a one-dimensional mesh."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class MLP(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(12, 24)
        self.down = torch.nn.Linear(24, 12)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (size,))
torch.manual_seed(0)
model = parallelize_module(MLP(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    torch.manual_seed(step)
    batch = torch.randn(6, 12)
    out = model(batch)
    loss = out.square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
whole = model.up.weight.full_tensor()
if rank == 0:
    print(whole.shape, loss.item())
dist.barrier()
dist.destroy_process_group()
