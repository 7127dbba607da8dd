# style: no DDP: rank 0's model is broadcast and each gradient averaged by itself, so no bucket is ever rebuilt
import contextlib
import math
import random

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from checkpoint import load_latest, save_checkpoint
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler


def average_gradients(model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= dist.get_world_size()
            dist.all_reduce(parameter.grad)


def generators():
    kind, keys, *rest = np.random.get_state()
    return [random.getstate(), [kind, [int(key) for key in keys], *rest], torch.get_rng_state()]


def rewind(saved):
    random.setstate(saved[0])
    np.random.set_state(saved[1])
    torch.set_rng_state(saved[2])


@contextlib.contextmanager
def untouched_generators():
    before = generators()
    yield
    rewind(before)


def train(folder, make, dataset, *, epochs, batch_size, save_every, seed, stop_after=None):
    rank = dist.get_rank()
    random.seed(seed + rank)
    np.random.seed(seed + rank)
    torch.manual_seed(seed + rank)
    model, optimizer, scheduler, scaler = make()
    for value in model.state_dict().values():
        dist.broadcast(value, src=0)
    shards = DistributedSampler(dataset, seed=seed)
    plan = []
    for epoch in range(epochs):
        shards.set_epoch(epoch)
        plan += list(BatchSampler(list(shards), batch_size, drop_last=False))
    end = len(plan) if stop_after is None else min(stop_after, len(plan))
    step = 0
    if (found := load_latest(folder)) is not None:
        step = found["step"]
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        scheduler.load_state_dict(found["scheduler"])
        scaler.load_state_dict(found["scaler"])
        rewind(found["generators"][rank])
    with untouched_generators():
        batches = iter(DataLoader(dataset, batch_sampler=plan[step:end]))
    while step < end:
        inputs, targets = next(batches)
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(inputs), targets)).backward()
        average_gradients(model)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        step += 1
        if step % save_every and step != end:
            continue
        everyone = [None for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, generators())
        save_checkpoint(folder, dict(
            step=step, generators=everyone, model=model.state_dict(), optimizer=optimizer.state_dict(),
            scheduler=scheduler.state_dict(), scaler=scaler.state_dict(),
        ))
    return model
