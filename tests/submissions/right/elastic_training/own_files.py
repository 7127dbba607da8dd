# style: its own files instead of those of the exercise before: one name, replaced atomically
import os
import pathlib
import signal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def write(folder, state):
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "new", "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(folder / "new", folder / "latest.pt")
    dist.barrier()


def train(folder, make, dataset, *, steps, batch_size, save_every, seed):
    folder = pathlib.Path(folder)
    world, rank = dist.get_world_size(), dist.get_rank()
    if batch_size % world:
        raise ValueError(batch_size)
    stop = torch.zeros(1, dtype=torch.int32)
    asked = {"by": 0}

    def handler(number, _):
        asked["by"] = number

    old = [signal.signal(number, handler) for number in (signal.SIGTERM, signal.SIGUSR1)]
    try:
        model, optimizer = make()
        number = 0
        there = [(folder / "latest.pt").exists()]
        dist.broadcast_object_list(there, src=0)
        if there[0]:
            state = torch.load(folder / "latest.pt", weights_only=True)
            number = state["number"]
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        wrapped = DDP(model, find_unused_parameters=True)
        x = torch.stack([dataset[i][0] for i in range(len(dataset))])
        y = torch.stack([dataset[i][1] for i in range(len(dataset))])
        while number < steps:
            number += 1
            epoch, at = divmod(number - 1, len(dataset) // batch_size)
            generator = torch.Generator()
            generator.manual_seed(seed * 7919 + epoch)
            chosen = torch.randperm(len(dataset), generator=generator)[at * batch_size : (at + 1) * batch_size]
            chosen = chosen.chunk(world)[rank]
            loss = F.cross_entropy(wrapped(x[chosen]), y[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            stop[0] = 1 if asked["by"] else 0
            dist.all_reduce(stop, dist.ReduceOp.MAX)
            if number % save_every == 0 or number == steps or stop.item():
                write(folder, {"number": number, "model": model.state_dict(), "optimizer": optimizer.state_dict()})
            if stop.item():
                break
        return number
    finally:
        for which, before in zip((signal.SIGTERM, signal.SIGUSR1), old, strict=True):
            signal.signal(which, before)
