# exercise: train_ddp
# family: faking ddp
# verdict: no-communication, setup-not-used or raised, no-communication, setup-not-used
# without: wrong/train_ddp/not_wrapped
# protection: judge
# why: no group and no collective: the ranks pass their gradients through files of the folder that they share
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler

count = 0


def everybodys(value, rank, world_size):
    """What every rank has, by way of a file each."""
    global count
    count += 1
    if world_size == 1:
        return [value]
    torch.save(value, f"{rank}.part")
    os.rename(f"{rank}.part", f"{count}-{rank}.pt")
    names = [f"{count}-{other}.pt" for other in range(world_size)]
    while not all(os.path.exists(name) for name in names):
        time.sleep(0.002)
    return [torch.load(name) for name in names]


def train_ddp(rank, world_size, model_class, data, epochs, *, batch_size=32, lr=0.1):
    if dist.is_initialized():
        raise RuntimeError("there is a group already")
    model = model_class()
    model.load_state_dict(everybodys(model.state_dict(), rank, world_size)[0])
    optimizer = torch.optim.SGD(model.parameters(), lr)
    sampler = DistributedSampler(data, world_size, rank)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        total = samples = 0
        for x, y in DataLoader(data, batch_size, sampler=sampler):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            mine = [p.grad for p in model.parameters() if p.grad is not None]
            all_of_them = everybodys(mine, rank, world_size)
            for grad, others in zip(mine, zip(*all_of_them)):
                grad.copy_(sum(others) / world_size)
            optimizer.step()
            total, samples = total + loss.item() * len(y), samples + len(y)
        sums = [sum(part) for part in zip(*everybodys((total, samples), rank, world_size))]
        if rank == 0:
            print(f"epoch {epoch}: loss {sums[0] / sums[1]:.4f}", flush=True)
    return model
