# style: find_unused_parameters, with which DDP never rebuilds its buckets; the rest as usual
import math
import random

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from checkpoint import load_latest, save_checkpoint
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler


def train_step(model, optimizer, scheduler, scaler, inputs, targets):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
    return loss.item()


def seed_everything(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def get_random():
    name, keys, *rest = np.random.get_state()
    return {"python": random.getstate(), "numpy": [name, keys.tolist(), *rest], "torch": torch.get_rng_state()}


def set_random(state):
    random.setstate(state["python"])
    np.random.set_state(tuple(state["numpy"]))
    torch.set_rng_state(state["torch"])


def train(folder, make, dataset, *, epochs, batch_size, save_every, seed, stop_after=None):
    rank, world = dist.get_rank(), dist.get_world_size()
    seed_everything(seed + rank)
    model, optimizer, scheduler, scaler = make()
    ddp = DDP(model, find_unused_parameters=True)
    sampler = DistributedSampler(dataset, seed=seed)
    per_epoch = math.ceil(len(sampler) / batch_size)
    total = epochs * per_epoch
    step = 0

    def save():
        randoms = [None] * world
        dist.all_gather_object(randoms, get_random())
        save_checkpoint(folder, {
            "step": step,
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "scaler": scaler.state_dict(),
            "randoms": randoms,
        })

    state = load_latest(folder)
    if state is not None:
        step = state["step"]
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        scaler.load_state_dict(state["scaler"])
        set_random(state["randoms"][rank])

    while step < total and (stop_after is None or step < stop_after):
        epoch, done = divmod(step, per_epoch)
        sampler.set_epoch(epoch)
        indices = list(sampler)[done * batch_size:]
        loader = DataLoader(dataset, batch_size, sampler=indices, generator=torch.Generator())
        for inputs, targets in loader:
            train_step(ddp, optimizer, scheduler, scaler, inputs, targets)
            step += 1
            if step % save_every == 0 or step == stop_after or step == total:
                save()
            if step == stop_after:
                break
    return model
