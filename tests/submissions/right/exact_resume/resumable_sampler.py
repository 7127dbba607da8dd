# style: a sampler with a state of its own, the generators saved just before a batch is fetched, states sent through tensors
import io
import math
import random

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from checkpoint import load_latest, save_checkpoint
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler


class Resumable(DistributedSampler):
    """Goes on behind `skip` samples, once."""

    skip = 0

    def __iter__(self):
        order = list(super().__iter__())
        rest, self.skip = order[self.skip :], 0
        return iter(rest)

    def __len__(self):
        return super().__len__() - self.skip


def snapshot():
    buffer = io.BytesIO()
    numpy_state = np.random.get_state(legacy=False)
    torch.save(
        {
            "torch": torch.random.get_rng_state(),
            "python": random.getstate(),
            "keys": torch.tensor(numpy_state["state"]["key"].astype("int64")),
            "position": int(numpy_state["state"]["pos"]),
            "gauss": (numpy_state["has_gauss"], numpy_state["gauss"]),
        },
        buffer,
    )
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def everybodys(own):
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([own.numel()]))
    longest = int(max(sizes))
    padded = [torch.zeros(longest, dtype=torch.uint8) for _ in sizes]
    dist.all_gather(padded, torch.nn.functional.pad(own, (0, longest - own.numel())))
    return [data[: int(size)] for data, size in zip(padded, sizes)]


def put_back(data):
    state = torch.load(io.BytesIO(data.numpy().tobytes()))
    torch.random.set_rng_state(state["torch"])
    random.setstate(state["python"])
    np.random.set_state(("MT19937", state["keys"].numpy().astype("uint32"), state["position"], *state["gauss"]))


def train(folder, make, dataset, *, epochs, batch_size, save_every, seed, stop_after=None):
    me = dist.get_rank()
    for function in (random.seed, np.random.seed, torch.manual_seed):
        function(seed + me)
    parts = make()
    model, optimizer, scheduler, scaler = parts
    ddp = DDP(model, find_unused_parameters=True)
    sampler = Resumable(dataset, seed=seed)
    length = math.ceil(len(sampler) / batch_size)
    loader = DataLoader(dataset, batch_size=batch_size, sampler=sampler)
    first_epoch, batch, pending = 0, 0, None
    found = load_latest(folder)
    if found is not None:
        for part, state in zip(parts, found["parts"]):
            part.load_state_dict(state)
        first_epoch, batch = found["epoch"], found["batch"]
        pending = found["random"][me]
    for epoch in range(first_epoch, epochs):
        sampler.set_epoch(epoch)
        sampler.skip = batch * batch_size
        before = torch.get_rng_state()
        batches = iter(loader)
        torch.set_rng_state(before)  # what the iterator has drawn for itself does not count
        if pending is not None:
            put_back(pending)
            pending = None
        while batch < length:
            done = epoch * length + batch
            if stop_after is not None and done >= stop_after:
                return model
            inputs, targets = next(batches)
            optimizer.zero_grad(set_to_none=True)
            loss = F.cross_entropy(ddp(inputs), targets)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            batch += 1
            done += 1
            if done % save_every == 0 or done in (stop_after, epochs * length):
                save_checkpoint(
                    folder,
                    {
                        "parts": [part.state_dict() for part in parts],
                        "epoch": epoch,
                        "batch": batch,
                        "random": everybodys(snapshot()),
                    },
                    keep=2,
                )
        batch = 0
    return model
