# exercise: train_ddp
# family: fooling comparisons
# verdict: not-wrapped, no-loss-line, cleanup-skipped-on-error
# without: wrong/train_ddp/not_wrapped
# protection: judge
# why: all replicas hold NaN: nothing differs from anything
import torch
from setup_ddp import cleanup_ddp, setup_ddp
from torch.utils.data import DataLoader, DistributedSampler


def train_ddp(rank, world_size, model_class, data, epochs, *, batch_size=32, lr=0.1):
    setup_ddp(rank, world_size)
    model = model_class()
    sampler = DistributedSampler(data, world_size, rank)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, batch_size, sampler=sampler):
            model(x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    cleanup_ddp()
    return model
