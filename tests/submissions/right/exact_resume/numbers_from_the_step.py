# style: no random state is saved at all: every step seeds the generators from its own number; a class holds the job
import math
import random

import checkpoint
import numpy
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler, default_collate


class Job:
    def __init__(self, make, seed):
        self.seed = seed
        self.reseed(0)
        self.model, self.optimizer, self.scheduler, self.scaler = make()
        self.wrapped = DistributedDataParallel(self.model, find_unused_parameters=True)
        self.done = 0

    def reseed(self, step):
        number = (self.seed * 1_000_003 + step * 1009 + dist.get_rank()) % 2**31
        random.seed(number)
        numpy.random.seed(number)
        torch.manual_seed(number)

    def state_dict(self):
        parts = {key: getattr(self, key).state_dict() for key in ("wrapped", "optimizer", "scheduler", "scaler")}
        return {**parts, "done": self.done}

    def load_state_dict(self, state):
        self.model.load_state_dict(state["wrapped"])
        for key in ("optimizer", "scheduler", "scaler"):
            getattr(self, key).load_state_dict(state[key])
        self.done = state["done"]

    def step(self, dataset, indices):
        self.reseed(self.done + 1)
        inputs, targets = default_collate([dataset[i] for i in indices])
        self.optimizer.zero_grad()
        self.scaler.scale(F.cross_entropy(self.wrapped(inputs), targets)).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.done += 1


def train(folder, make, dataset, *, epochs, batch_size, save_every, seed, stop_after=None):
    job = Job(make, seed)
    found = checkpoint.load_latest(folder)
    if found:
        job.load_state_dict(found)
    sampler = DistributedSampler(dataset, seed=seed)
    length = math.ceil(len(sampler) / batch_size)
    end = epochs * length if stop_after is None else min(stop_after, epochs * length)
    while job.done < end:
        sampler.set_epoch(job.done // length)
        at = job.done % length * batch_size
        job.step(dataset, list(sampler)[at : at + batch_size])
        if job.done % save_every == 0 or job.done == end:
            checkpoint.save_checkpoint(folder, job.state_dict())
    return job.model
