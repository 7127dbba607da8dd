# diagnosis: stops-late
# why: the request is looked at where a checkpoint is due anyway
import signal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from checkpoint import load_latest, save_checkpoint
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import default_collate


def samples_of(step, length, batch_size, seed):
    epoch, done = divmod(step, length // batch_size)
    order = torch.randperm(length, generator=torch.Generator().manual_seed(seed + epoch))
    return order[done * batch_size : (done + 1) * batch_size].tolist()


def train(folder, make, dataset, *, steps, batch_size, save_every, seed):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if batch_size % world_size:
        raise ValueError("batch_size must be a multiple of the number of ranks")
    asked = False

    def ask(number, frame):
        nonlocal asked
        asked = True

    signal.signal(signal.SIGTERM, ask)
    signal.signal(signal.SIGUSR1, ask)
    model, optimizer = make()
    step = 0
    saved = load_latest(folder)
    if saved is not None:
        step = saved["step"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    ddp = DDP(model, find_unused_parameters=True)

    def save():
        save_checkpoint(folder, {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()})

    while step < steps:
        share = samples_of(step, len(dataset), batch_size, seed)[rank::world_size]
        inputs, targets = default_collate([dataset[index] for index in share])
        optimizer.zero_grad()
        F.cross_entropy(ddp(inputs), targets).backward()
        optimizer.step()
        step += 1
        stop = torch.tensor(int(asked))
        dist.all_reduce(stop, op=dist.ReduceOp.MAX)
        if step % save_every == 0 or step == steps:
            save()
            if stop:
                break
    return step
