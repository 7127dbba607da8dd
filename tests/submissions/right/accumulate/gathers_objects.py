# style: everybody gathers everybody's numbers as objects
import torch.distributed as dist


def train_step(ddp_model, micro_batches, loss_fn, optimizer):
    micro_batches = tuple(micro_batches)
    if len(micro_batches) == 0:
        raise ValueError("empty step")
    sizes = [None] * dist.get_world_size()
    dist.all_gather_object(sizes, sum(y.shape[0] for _, y in micro_batches))
    for p in ddp_model.parameters():
        p.grad = None
    mine = 0.0
    *head, tail = micro_batches
    def one(x, y):
        loss = loss_fn(ddp_model(x), y)
        weight = y.shape[0] / sum(sizes)
        (len(sizes) * weight * loss).backward()
        return weight * loss.item()
    if head:
        with ddp_model.no_sync():
            for x, y in head:
                mine += one(x, y)
    mine += one(*tail)
    optimizer.step()
    parts = [None] * len(sizes)
    dist.all_gather_object(parts, mine)
    return float(sum(parts))
