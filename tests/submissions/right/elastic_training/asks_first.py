# style: the ranks agree before each step; handlers in a class; gradients averaged by hand
import signal

import checkpoint
import torch
import torch.distributed as dist
from torch.nn import functional


class Request:
    def __init__(self):
        self.made = 0
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self.note)

    def note(self, *_):
        self.made = 1

    def anywhere(self):
        made = [None] * dist.get_world_size()
        dist.all_gather_object(made, self.made)
        return any(made)


def train(folder, make, dataset, *, steps, batch_size, save_every, seed):
    ranks = dist.get_world_size()
    mine, rest = divmod(batch_size, ranks)
    if rest:
        raise ValueError(f"{batch_size} / {ranks}")
    request = Request()
    model, optimizer = make()
    state = checkpoint.load_latest(folder) or {"done": 0}
    done = state["done"]
    if done:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    begin = dist.get_rank() * mine
    while done < steps:
        if request.anywhere():
            if done:
                keep(folder, done, model, optimizer)
            break
        epoch, place = divmod(done, len(dataset) // batch_size)
        order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(1000 * seed + epoch))
        batch = order[place * batch_size :][begin : begin + mine].tolist()
        inputs = torch.stack([dataset[i][0] for i in batch])
        targets = torch.stack([dataset[i][1] for i in batch])
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), targets).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= ranks
        optimizer.step()
        done += 1
        if done % save_every == 0 or done == steps:
            keep(folder, done, model, optimizer)
    return done


def keep(folder, done, model, optimizer):
    state = {"done": done, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    checkpoint.save_checkpoint(folder, state, keep=2)
