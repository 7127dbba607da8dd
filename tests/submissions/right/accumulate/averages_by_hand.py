# style: everything in no_sync, and one flat all-reduce of its own with loss and count in it
import torch
import torch.distributed as dist


def train_step(ddp_model, micro_batches, loss_fn, optimizer):
    optimizer.zero_grad()
    loss_sum, count = 0.0, 0
    with ddp_model.no_sync():
        for x, y in micro_batches:
            loss = loss_fn(ddp_model(x), y) * len(x)
            loss.backward()
            loss_sum += loss.item()
            count += len(x)
    if count == 0:
        raise ValueError("micro_batches must not be empty")
    parameters = [p for p in ddp_model.parameters() if p.requires_grad]
    extra = parameters[0].new_tensor([loss_sum, count])
    flat = torch.cat([*(p.grad.flatten() for p in parameters), extra])
    dist.all_reduce(flat)
    loss_sum, count = flat[-2:].tolist()
    at = 0
    for p in parameters:
        p.grad.copy_(flat[at : at + p.numel()].view_as(p) / count)
        at += p.numel()
    optimizer.step()
    return loss_sum / count
