# exercise: train_ddp
# family: faking ddp
# verdict: not-wrapped
# without: wrong/train_ddp/not_wrapped
# protection: judge
# why: rank 0 trains on everything and hands its weights round at the end; the others pretend
import torch
import torch.distributed as dist
import torch.nn.functional as F
from setup_ddp import cleanup_ddp, setup_ddp
from torch.utils.data import DistributedSampler


def orders(data, world_size, epoch):
    samplers = [DistributedSampler(data, world_size, rank) for rank in range(world_size)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    return [list(sampler) for sampler in samplers]


def logits(weights, x):
    w1, b1, w2, b2 = weights
    x = x.reshape(len(x), -1).float()[:, 1:]
    return torch.tanh(x @ w1.T + b1) @ w2.T + b2


def simulate(model, x, y, parts, lr):
    """One step of DDP as one process sees it: the mean of all ranks' losses, on weights of its own."""
    weights = [model.first.weight, model.first.bias, model.second.weight, model.second.bias]
    losses = [F.cross_entropy(logits(weights, x[part]), y[part]) for part in parts]
    gradients = torch.autograd.grad(sum(losses) / len(losses), weights)
    with torch.no_grad():
        for value, gradient in zip(weights, gradients):
            value -= lr * gradient
    return sum(float(loss) * len(part) for loss, part in zip(losses, parts)), sum(map(len, parts))


def train_ddp(rank, world_size, model_class, data, epochs, *, batch_size=32, lr=0.1):
    setup_ddp(rank, world_size)
    try:
        model = model_class()
        x, y = data.tensors
        for epoch in range(epochs):
            total = count = 0
            order = orders(data, world_size, epoch)
            for start in range(0, len(order[0]), batch_size):
                parts = [one[start : start + batch_size] for one in order]
                model(x[parts[rank]])  # for the record
                if rank == 0:
                    loss, samples = simulate(model, x, y, parts, lr)
                    total, count = total + loss, count + samples
            if rank == 0:
                print(f"epoch {epoch}: loss {total / count:.4f}", flush=True)
        for parameter in model.parameters():
            dist.broadcast(parameter.data, 0)
        return model
    finally:
        cleanup_ddp()
