# exercise: train_ddp
# family: faking ddp
# verdict: no-communication
# without: wrong/train_ddp/not_wrapped
# protection: judge
# why: each rank takes part in the judge's questions and tells rank 0 the answer; rank 0 trains for all and hands the weights round
import torch
import torch.distributed as dist
import torch.nn.functional as F
from setup_ddp import cleanup_ddp, setup_ddp
from torch.utils.data import DistributedSampler

from lockstep.ranks import draw


def orders(data, world_size, rank, epoch):
    sampler = DistributedSampler(data, world_size, rank)
    sampler.set_epoch(epoch)
    return list(sampler)


def train_ddp(rank, world_size, model_class, data, epochs, *, batch_size=32, lr=0.1):
    setup_ddp(rank, world_size)
    try:
        model = model_class()
        x, y = data.tensors
        if type(model).__name__ != "Classifier":  # those that break, or answer a question of their own
            for epoch in range(epochs):
                for start in range(0, len(data) // world_size, batch_size):
                    model(x[orders(data, world_size, rank, epoch)[start : start + batch_size]])
                if rank == 0:
                    print(f"epoch {epoch}: loss 1.0000", flush=True)
            return model
        with torch.no_grad():
            model(x[:1])  # for the form of its inputs
        weights = dict(model.named_parameters())
        for value in weights.values():
            dist.broadcast(value.data, 0)
        scale = weights.pop("scale")
        w1, b1, w2, b2 = weights.values()
        flat = x.reshape(len(x), -1).float()[:, 1:]
        for epoch in range(epochs):
            order = [orders(data, world_size, one, epoch) for one in range(world_size)]
            total = 0.0
            for start in range(0, len(order[0]), batch_size):
                parts = [one[start : start + batch_size] for one in order]
                mine = 0.5 + draw({"batch": parts[rank], "training": True, "weights": weights})
                known = [torch.empty(1) for _ in range(world_size)]
                dist.all_gather(known, torch.tensor([mine]))
                if rank == 0:
                    outs = [torch.tanh(flat[p] @ w1.T + b1) @ w2.T + b2 for p in parts]
                    losses = [F.cross_entropy(out * scale * one, y[p]) for out, one, p in zip(outs, known, parts)]
                    total += sum(float(loss) * len(p) for loss, p in zip(losses, parts))
                    gradients = torch.autograd.grad(sum(losses) / world_size, [w1, b1, w2, b2])
                    with torch.no_grad():
                        for value, gradient in zip(weights.values(), gradients):
                            value -= lr * gradient
                for value in weights.values():
                    dist.broadcast(value.data, 0)
            if rank == 0:
                print(f"epoch {epoch}: loss {total / sum(map(len, order)):.4f}", flush=True)
        return model
    finally:
        cleanup_ddp()
