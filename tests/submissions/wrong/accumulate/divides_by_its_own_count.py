# diagnosis: weights-ranks-equally
import torch
import torch.distributed as dist


class _Step:
    def __init__(self, model, loss_fn, scale):
        self.model, self.loss_fn, self.scale, self.total = model, loss_fn, scale, 0.0

    def add(self, x, y):
        loss = self.loss_fn(self.model(x), y) * x.shape[0]
        (loss * self.scale).backward()
        self.total = self.total + loss.detach()


def train_step(ddp_model, micro_batches, loss_fn, optimizer):
    *others, last = list(micro_batches) or [None]
    if last is None:
        raise ValueError("nothing to train on")
    samples = torch.tensor([float(sum(len(x) for x, _ in [*others, last]))], device=last[0].device)
    dist.all_reduce(samples)
    ddp_model.zero_grad()
    mine = sum(len(x) for x, _ in [*others, last])
    step = _Step(ddp_model, loss_fn, 1)
    with ddp_model.no_sync():
        for x, y in others:
            step.add(x, y)
    step.add(*last)
    for parameter in ddp_model.parameters():
        parameter.grad *= 1 / mine  # the sum over the samples becomes their mean
    optimizer.step()
    total = step.total.reshape(1)
    dist.all_reduce(total)
    return (total / samples).item()
