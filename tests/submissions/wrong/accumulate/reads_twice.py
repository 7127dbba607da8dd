# diagnosis: needs-a-sequence
# why: counts the samples first and finds the iterator used up
from contextlib import nullcontext

import torch
import torch.distributed as dist


def train_step(ddp_model, micro_batches, loss_fn, optimizer):
    device = next(ddp_model.parameters()).device
    sizes = [x.size(0) for x, _ in micro_batches]
    if not sizes:
        raise ValueError("no micro-batches were given")
    n_samples = torch.tensor(float(sum(sizes)), device=device)
    dist.all_reduce(n_samples)
    n_samples = n_samples.item()
    optimizer.zero_grad()
    running = 0.0
    for i, (x, y) in enumerate(micro_batches):
        is_last = i == len(sizes) - 1
        with nullcontext() if is_last else ddp_model.no_sync():
            loss = loss_fn(ddp_model(x), y)
            (loss * x.size(0) * dist.get_world_size() / n_samples).backward()
        running += loss.item() * x.size(0)
    optimizer.step()
    stats = torch.tensor(running, device=device)
    dist.all_reduce(stats)
    return stats.item() / n_samples
