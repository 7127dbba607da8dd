# style: start_processes, with the weights brought back through a manager's dictionary
import contextlib
import pickle
import socket
from unittest import mock
import os

import torch
import torch.multiprocessing as mp

from train_ddp import train_ddp


@contextlib.contextmanager
def rendezvous():
    with socket.create_server(("127.0.0.1", 0)) as s:
        port = str(s.getsockname()[1])
    with mock.patch.dict(os.environ, MASTER_ADDR="127.0.0.1", MASTER_PORT=port):
        yield


def _child(rank, n, box, model_class, data, epochs):
    trained = train_ddp(rank, n, model_class, data, epochs)
    if not rank:
        for key, value in trained.state_dict().items():
            box[key] = pickle.dumps(value.cpu())


def launch_distributed(world_size, model_class, data, epochs):
    if world_size < 1:
        raise ValueError(f"world_size must be positive, not {world_size}")
    with mp.get_context("spawn").Manager() as manager, rendezvous():
        box = manager.dict()
        mp.start_processes(_child, (world_size, box, model_class, data, epochs), nprocs=world_size, start_method="spawn")
        return {key: pickle.loads(value) for key, value in box.items()}
