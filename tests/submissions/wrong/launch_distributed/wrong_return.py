# diagnosis: wrong-return
# why: returns a list with the tensors instead of a dictionary
from __future__ import annotations

import io
import multiprocessing as mp
import os
from concurrent import futures
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

from train_ddp import train_ddp


@dataclass(frozen=True)
class Job:
    rank: int
    world_size: int
    port: int
    model_class: Any
    tensors: tuple
    epochs: int

    def __call__(self) -> bytes:
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(self.port)
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the parent hosts the store
        for i in ("RANK", "LOCAL_RANK"):
            os.environ[i] = str(self.rank)
        for i in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            os.environ[i] = str(self.world_size)
        data = TensorDataset(*[torch.tensor(t) for t in self.tensors])
        model = train_ddp(self.rank, self.world_size, self.model_class, data, self.epochs)
        buffer = io.BytesIO()
        torch.save({k: v.cpu() for k, v in model.state_dict().items()}, buffer)
        return buffer.getvalue()


def _run(job: Job) -> bytes:
    return job()


def launch_distributed(world_size: int, model_class, data: TensorDataset, epochs: int) -> dict[str, torch.Tensor]:
    if world_size < 1:
        raise ValueError(f"world_size is {world_size}")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    tensors = tuple(t.cpu().numpy() for t in data.tensors)
    pool = futures.ProcessPoolExecutor(world_size, mp_context=mp.get_context("spawn"))
    try:
        jobs = [Job(rank, world_size, store.port, model_class, tensors, epochs) for rank in range(world_size)]
        ranks = {pool.submit(_run, job): job.rank for job in jobs}
        done, waiting = futures.wait(ranks, return_when=futures.FIRST_EXCEPTION)
        if any(f.exception() for f in done):
            done |= futures.wait(waiting, timeout=2).done
        failed = [f for f in done if f.exception()]
        if failed:
            for process in list(pool._processes.values()):
                process.kill()
            stories = [f"rank {ranks[f]}: {f.exception()!r}" for f in failed]
            raise RuntimeError("; ".join(stories)) from failed[0].exception()
        first = next(f for f in ranks if ranks[f] == 0)
        return list(torch.load(io.BytesIO(first.result())).values())
    finally:
        pool.shutdown(wait=True)
