"""A training loop as tutorials have it: DDP, a sampler for each rank, evaluation on every rank, a checkpoint by rank 0."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Digits(Dataset):
    def __init__(self, count):
        draw = torch.Generator().manual_seed(1)
        self.images = torch.randn(count, 16, generator=draw)
        self.labels = torch.randint(0, 4, (count,), generator=draw)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.images[index], self.labels[index]


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(16, 32)
        self.norm = torch.nn.BatchNorm1d(32)
        self.last = torch.nn.Linear(32, 4)

    def forward(self, x):
        x = F.relu(self.norm(self.first(x)))
        return self.last(x)


def evaluate(model, loader):
    model.eval()
    right = torch.zeros(2)
    with torch.no_grad():
        for images, labels in loader:
            right[0] += (model(images).argmax(1) == labels).sum()
            right[1] += len(labels)
    dist.all_reduce(right)
    model.train()
    return (right[0] / right[1]).item()


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    data = Digits(48 * size)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = DDP(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = 0
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            step += 1
        accuracy = evaluate(model, loader)
        if rank == 0:
            print(f"epoch {epoch}: {accuracy:.2f}")
            torch.save(model.module.state_dict(), os.path.join(os.environ["OUT"], "model.pt"))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
