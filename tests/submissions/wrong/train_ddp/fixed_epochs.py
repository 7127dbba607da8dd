# diagnosis: fixed-epochs
# why: trains for ten epochs whatever was asked for
import torch, torch.nn as nn, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from setup_ddp import *

def train_ddp(rank, world_size, model_class, data, epochs, *, batch_size=32, lr=0.1):
    setup_ddp(rank, world_size)
    ddp = None
    try:
        dev = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        ddp = DDP(model_class().to(dev))
        opt = torch.optim.SGD(ddp.parameters(), lr=lr)
        sampler = DistributedSampler(data)
        for e in range(10):
            sampler.set_epoch(e)
            losses = []
            for x, y in DataLoader(data, batch_size, sampler=sampler):
                loss = nn.functional.cross_entropy(ddp(x.to(dev)), y.to(dev))
                opt.zero_grad(); loss.backward(); opt.step()
                losses += [loss.item()] * len(y)
            everyone = [None] * world_size
            dist.all_gather_object(everyone, losses)
            flat = sum(everyone, [])
            if not rank: print(f"epoch {e}: loss {sum(flat) / len(flat):.4f}")
        m = ddp.module
        return m
    finally:
        del ddp
        cleanup_ddp()
