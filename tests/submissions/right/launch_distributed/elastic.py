# style: elastic's own API, which torchrun is built on; it leaves a variable behind, which is taken away again
import os
import tempfile
import uuid
from unittest import mock

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from train_ddp import train_ddp


@record
def be_rank(path, model_class, data, epochs):
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    model = train_ddp(rank, world_size, model_class, data, epochs)
    if rank == 0:
        torch.save(model.cpu().state_dict(), path)


def launch_distributed(world_size, model_class, data, epochs):
    if world_size < 1:
        raise ValueError(world_size)
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ):
        config = LaunchConfig(
            min_nodes=1, max_nodes=1, nproc_per_node=world_size, run_id=uuid.uuid4().hex, max_restarts=0,
            rdzv_backend="c10d", rdzv_endpoint="localhost:0", monitor_interval=0.05, start_method="spawn",
            logs_specs=DefaultLogsSpecs(log_dir=os.path.join(folder, "logs")),
        )
        path = os.path.join(folder, "weights")
        try:
            elastic_launch(config, be_rank)(path, model_class, data, epochs)
        except ChildFailedError as error:
            words = [f"rank {rank}: {failure.message}" for rank, failure in error.failures.items()]
            raise RuntimeError("\n".join(words)) from error
        return torch.load(path)
