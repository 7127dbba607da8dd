# diagnosis: nothing-returned
# why: forgets to return the model
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from setup_ddp import cleanup_ddp, setup_ddp


def train_ddp(rank, world_size, model_class, data, epochs, *, batch_size=32, lr=0.1):
    setup_ddp(rank, world_size)
    try:
        if torch.cuda.is_available():
            device = torch.device("cuda", torch.cuda.current_device())
        else:
            device = torch.device("cpu")

        model = model_class()
        model.to(device)
        if device.type == "cuda":
            ddp_model = DDP(model, device_ids=[device.index])
        else:
            ddp_model = DDP(model)

        sampler = DistributedSampler(data, num_replicas=world_size, rank=rank, shuffle=True)
        loader = DataLoader(data, batch_size=batch_size, sampler=sampler)
        optimizer = torch.optim.SGD(ddp_model.parameters(), lr=lr)
        criterion = nn.CrossEntropyLoss()

        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            ddp_model.train()
            loss_sum = torch.tensor(0.0, device=device)
            count = torch.tensor(0.0, device=device)
            for x, y in loader:
                x = x.to(device)
                y = y.to(device)
                optimizer.zero_grad()
                logits = ddp_model(x)
                loss = criterion(logits, y)
                loss.backward()
                optimizer.step()
                loss_sum += loss.item() * x.size(0)
                count += x.size(0)

            dist.all_reduce(loss_sum, op=dist.ReduceOp.SUM)
            dist.all_reduce(count, op=dist.ReduceOp.SUM)
            if rank == 0:
                print(f"epoch {epoch}: loss {(loss_sum / count).item():.4f}")

        model = ddp_model.module
    finally:
        cleanup_ddp()
