# style: torchrun's own machinery, called from Python
import os
import uuid

import torch
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from train_ddp import train_ddp


@record  # writes a failing rank's traceback where the agent finds it: the first one is the root cause
def entry(model_class, data, epochs):
    model = train_ddp(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), model_class, data, epochs)
    return {k: v.detach().cpu().numpy() for k, v in model.state_dict().items()}


def launch_distributed(world_size, model_class, data, epochs):
    if world_size < 1:
        raise ValueError("need at least one process")
    before = dict(os.environ)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world_size,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        start_method="spawn",
        monitor_interval=0.1,
    )
    try:
        results = elastic_launch(config, entry)(model_class, data, epochs)
    finally:
        os.environ.clear()
        os.environ.update(before)
    return {k: torch.from_numpy(v) for k, v in results[0].items()}
