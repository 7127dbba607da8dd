# diagnosis: device-by-global-rank
from __future__ import annotations

import dataclasses
import os

import torch
from torch import distributed


@dataclasses.dataclass
class World:
    rank: int
    size: int

    @property
    def local_rank(self) -> int:
        return int(os.environ.get("LOCAL_RANK", self.rank))

    @property
    def local_size(self) -> int:
        return int(os.environ.get("LOCAL_WORLD_SIZE", self.size))

    @property
    def backend(self) -> str:
        has_own_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= self.local_size
        return "nccl" if has_own_gpu else "gloo"

    def validate(self) -> World:
        if not (self.size > 0 and 0 <= self.rank < self.size):
            raise ValueError(f"{self} is impossible")
        launcher = World(int(os.environ.get("RANK", self.rank)), int(os.environ.get("WORLD_SIZE", self.size)))
        if launcher != self:
            raise ValueError(f"called as {self}, but launched as {launcher}")
        return self

    def select_device(self) -> World:
        if torch.cuda.is_available():
            torch.cuda.set_device(self.rank % torch.cuda.device_count())
        return self

    def join(self) -> None:
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if not missing:
            distributed.init_process_group(self.backend, rank=self.rank, world_size=self.size)
        elif self.size == 1:
            distributed.init_process_group(self.backend, store=distributed.HashStore(), rank=0, world_size=1)
        else:
            raise RuntimeError(f"set {' and '.join(missing)}: {self.size} ranks cannot find each other without")


def setup_ddp(rank: int, world_size: int) -> None:
    World(rank, world_size).validate().select_device().join()


def cleanup_ddp() -> None:
    if distributed.is_initialized():
        distributed.destroy_process_group()
