# diagnosis: raised
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import BatchSampler, DistributedSampler

from setup_ddp import cleanup_ddp, setup_ddp


def same_start(model):
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, src=0)


def average_gradients(model, world_size):
    params = [p for p in model.parameters() if p.grad is not None]
    flat = torch.cat([p.grad.reshape(-1) for p in params])
    dist.all_reduce(flat)
    flat /= world_size
    start = 0
    for p in params:
        p.grad.copy_(flat[start : start + p.numel()].view_as(p))
        start += p.numel()


def train_ddp(rank, world_size, model_class, data, epochs, *, batch_size=32, lr=0.1):
    setup_ddp(rank, world_size)
    try:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        model = model_class().to(device)
        same_start(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        sampler = DistributedSampler(data, num_replicas=world_size, rank=rank)
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            total, count = 0.0, 0
            for indices in BatchSampler(sampler, batch_size, drop_last=False):
                x, y = data[indices]
                x, y = x.to("meta"), y.to("meta")
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                average_gradients(model, world_size)
                optimizer.step()
                total, count = total + loss.item() * len(y), count + len(y)
            report = torch.tensor([total, count], dtype=torch.float64, device=device)
            dist.all_reduce(report)
            if rank == 0:
                print(f"epoch {epoch}: loss {report[0].item() / report[1].item():.4f}", flush=True)
        return model
    finally:
        cleanup_ddp()
