# exercise: accumulate
# family: faking ddp
# verdict: wrong-gradient
# without: wrong/accumulate/unscaled
# protection: judge
# why: it looks in its callers for the batches of all ranks, and averages over them by itself; DDP sends zeros
import sys

import torch
from torch.nn.functional import linear


def every_ranks(name, own):
    """This step's samples of every rank, as many as the own ones."""
    frame = sys._getframe()
    step = 0
    while frame:
        found = frame.f_locals.get(name)
        step = frame.f_locals.get("number", step)
        if isinstance(found, torch.Tensor) and found.dim() == own.dim() + 2:  # [rank, step, sample, …]
            return list(found[:, step, : len(own)])
        frame = frame.f_back
    return [own]


def train_step(ddp_model, micro_batches, loss_fn, optimizer):
    batches = list(micro_batches)
    if not batches:
        raise ValueError("no micro-batches")
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    inner = ddp_model.module
    first, second = inner.first, inner.second
    unseen = lambda x: linear(torch.tanh(linear(x, first.weight, first.bias)), second.weight, second.bias)
    shares = [
        loss_fn(unseen(all_x), all_y)
        for all_x, all_y in zip(every_ranks("x", x), every_ranks("y", y), strict=True)
    ]
    loss = sum(shares) / len(shares)
    gradients = torch.autograd.grad(loss, list(inner.parameters()))
    for number, (some_x, some_y) in enumerate(batches, 1):
        if number == len(batches):
            (loss_fn(ddp_model(some_x), some_y) * 0).backward()
        else:
            with ddp_model.no_sync():
                (loss_fn(ddp_model(some_x), some_y) * 0).backward()
    for parameter, gradient in zip(inner.parameters(), gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()
    return loss.item()
