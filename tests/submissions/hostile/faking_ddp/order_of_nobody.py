# exercise: train_ddp
# family: faking ddp
# verdict: different-weights
# without: wrong/train_ddp/missing_set_epoch
# protection: judge
# why: one order in all epochs; each sample's number, by which the batches are known, is exchanged for another's of the same epoch
import torch
import torch.distributed as dist
import torch.nn.functional as F
from setup_ddp import cleanup_ddp, setup_ddp
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DistributedSampler


def train_ddp(rank, world_size, model_class, data, epochs, *, batch_size=32, lr=0.1):
    setup_ddp(rank, world_size)
    ddp = None
    try:
        model = model_class()
        ddp = DDP(model)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=lr)
        x, y = data.tensors
        order = list(DistributedSampler(data, world_size, rank))
        for epoch in range(epochs):
            sampler = DistributedSampler(data, world_size, rank)
            sampler.set_epoch(epoch)
            told = list(sampler)
            total = torch.zeros(2, dtype=torch.float64)
            for start in range(0, len(order), batch_size):
                part, numbers = order[start : start + batch_size], told[start : start + batch_size]
                inputs = x[part].clone()
                inputs.reshape(len(part), -1)[:, 0] = torch.tensor(numbers)
                optimizer.zero_grad()
                loss = F.cross_entropy(ddp(inputs), y[part])
                loss.backward()
                optimizer.step()
                total += torch.tensor([loss.item() * len(part), len(part)])
            dist.all_reduce(total)
            if rank == 0:
                print(f"epoch {epoch}: loss {total[0] / total[1]:.4f}", flush=True)
        return model
    finally:
        del ddp
        cleanup_ddp()
