# style: sets DDP's flag itself, as trainers do
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def train_step(ddp_model: DistributedDataParallel, micro_batches, loss_fn, optimizer) -> float:
    group = ddp_model.process_group
    batches = tuple(micro_batches)
    if len(batches) == 0:
        raise ValueError("an accumulated step of zero micro-batches")
    counts = [None] * dist.get_world_size(group)
    mine = torch.tensor([sum(y.shape[0] for _, y in batches)], device=batches[0][1].device)
    counts = [torch.zeros_like(mine) for _ in counts]
    dist.all_gather(counts, mine, group=group)
    total = int(torch.cat(counts).sum())

    for p in ddp_model.parameters():
        p.grad = None
    losses = []
    before = ddp_model.require_backward_grad_sync
    try:
        for index, (x, y) in enumerate(batches):
            ddp_model.require_backward_grad_sync = index + 1 == len(batches)
            loss = loss_fn(ddp_model(x), y)
            loss.backward(torch.full_like(loss, y.shape[0] * len(counts) / total))
            losses.append(loss.detach() * y.shape[0])
    finally:
        ddp_model.require_backward_grad_sync = before
    optimizer.step()
    whole = torch.stack(losses).sum()
    dist.all_reduce(whole, group=group)
    return float(whole) / total
