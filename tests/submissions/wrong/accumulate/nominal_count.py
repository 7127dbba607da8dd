# diagnosis: scales-by-count
# why: the usual loss / accumulation_steps
from contextlib import nullcontext

import torch
import torch.distributed as dist


def train_step(ddp_model, micro_batches, loss_fn, optimizer):
    micro_batches = list(micro_batches)
    if not micro_batches:
        raise ValueError("no micro-batches were given")
    device = micro_batches[0][0].device
    n_samples = torch.tensor(float(sum(x.size(0) for x, _ in micro_batches)), device=device)
    dist.all_reduce(n_samples)
    n_samples = n_samples.item()
    optimizer.zero_grad()
    running = 0.0
    for i, (x, y) in enumerate(micro_batches):
        is_last = i == len(micro_batches) - 1
        with nullcontext() if is_last else ddp_model.no_sync():
            loss = loss_fn(ddp_model(x), y)
            (loss / len(micro_batches)).backward()
        running += loss.item() * x.size(0)
    optimizer.step()
    stats = torch.tensor(running, device=device)
    dist.all_reduce(stats)
    return stats.item() / n_samples
