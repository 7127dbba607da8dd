# diagnosis: uneven-steps
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import BatchSampler

from setup_ddp import cleanup_ddp, setup_ddp


def mine(count, rank, world_size, epoch):
    order = torch.randperm(count, generator=torch.Generator().manual_seed(epoch))
    return order[rank::world_size].tolist()


def train_ddp(rank, world_size, model_class, data, epochs, *, batch_size=32, lr=0.1):
    setup_ddp(rank, world_size)
    try:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        model = DDP(model_class().to(device))
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        for epoch in range(epochs):
            total, count = 0.0, 0
            with Join([model]):
                for indices in BatchSampler(mine(len(data), rank, world_size, epoch), batch_size, drop_last=False):
                    x, y = data[indices]
                    x, y = x.to(device), y.to(device)
                    optimizer.zero_grad()
                    loss = F.cross_entropy(model(x), y)
                    loss.backward()
                    optimizer.step()
                    total, count = total + loss.item() * len(y), count + len(y)
            report = torch.tensor([total, count], dtype=torch.float64, device=device)
            dist.all_reduce(report)
            if rank == 0:
                print(f"epoch {epoch}: loss {report[0].item() / report[1].item():.4f}", flush=True)
        return model.module
    finally:
        cleanup_ddp()
