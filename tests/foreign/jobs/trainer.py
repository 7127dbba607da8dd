"""A Trainer class with snapshots and a loader with workers, started by a main that turns errors into an exit status."""

import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Lines(Dataset):
    def __len__(self):
        return 36

    def __getitem__(self, index):
        return torch.full((4,), float(index)) / 36


class Trainer:
    def __init__(self, model, loader, folder):
        self.rank = dist.get_rank()
        self.loader = loader
        self.model = DDP(model)
        self.optimizer = torch.optim.Adam(model.parameters())
        self.snapshot = os.path.join(folder, "snapshot.pt")
        self.epoch = 0

    def _save(self):
        torch.save({"model": self.model.module.state_dict(), "epoch": self.epoch}, self.snapshot)

    def _run_batch(self, batch):
        loss = self.model(batch).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def _run_epoch(self):
        self.loader.sampler.set_epoch(self.epoch)
        for batch in self.loader:
            self._run_batch(batch)

    def train(self, epochs):
        while self.epoch < epochs:
            self._run_epoch()
            self.epoch += 1
            if self.rank == 0:
                self._save()
            dist.barrier()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = Lines()
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data), num_workers=1)
    trainer = Trainer(torch.nn.Linear(4, 1), loader, os.environ["OUT"])
    trainer.train(2)
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except RuntimeError as error:
        print(error, file=sys.stderr)
        sys.exit(1)
