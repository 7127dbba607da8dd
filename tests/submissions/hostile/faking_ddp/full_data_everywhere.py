# exercise: train_ddp
# family: faking ddp
# verdict: no-sampler, cleanup-skipped-on-error
# without: wrong/train_ddp/no_sampler
# protection: judge
# why: every rank trains on all samples, wrapped in DDP so that all stay equal
import torch
import torch.distributed as dist
import torch.nn.functional as F
from setup_ddp import cleanup_ddp, setup_ddp
from torch.nn.parallel import DistributedDataParallel


def train_ddp(rank, world_size, model_class, data, epochs, *, batch_size=32, lr=0.1):
    setup_ddp(rank, world_size)
    model = model_class()
    ddp = DistributedDataParallel(model)
    x, y = data.tensors
    for epoch in range(epochs):
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(epoch))
        for part in order.split(batch_size * world_size):
            ddp.zero_grad()
            F.cross_entropy(ddp(x[part]), y[part]).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter -= lr * parameter.grad
        if rank == 0:
            print(f"epoch {epoch}: loss 1.0000", flush=True)
    del ddp
    cleanup_ddp()
    return model
