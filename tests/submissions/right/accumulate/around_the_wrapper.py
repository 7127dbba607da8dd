# style: the inner module, gradients collected by torch.autograd.grad, one flat all-reduce
import torch
import torch.distributed as dist


def train_step(ddp_model, micro_batches, loss_fn, optimizer):
    params = [p for p in ddp_model.module.parameters() if p.requires_grad]
    sums, loss_sum, seen = None, 0.0, 0
    for x, y in micro_batches:
        loss = loss_fn(ddp_model.module(x), y)
        grads = torch.autograd.grad(loss * x.shape[0], params)
        sums = grads if sums is None else [a + b for a, b in zip(sums, grads)]
        loss_sum += loss.item() * x.shape[0]
        seen += x.shape[0]
    if not seen:
        raise ValueError("nothing to train on")
    flat = torch.cat([g.flatten() for g in sums])
    numbers = torch.tensor([loss_sum, seen], dtype=torch.float64, device=flat.device)
    dist.all_reduce(flat)
    dist.all_reduce(numbers)
    loss_sum, seen = numbers.tolist()
    for p, g in zip(params, flat.split([p.numel() for p in params])):
        p.grad = (g / seen).view_as(p)
    optimizer.step()
    return loss_sum / seen
