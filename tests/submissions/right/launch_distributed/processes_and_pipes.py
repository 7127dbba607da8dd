# style: plain multiprocessing: one pipe a rank, pickles through it, sentinels to notice a death
import multiprocessing
import os
import pickle
import socket
import traceback
from multiprocessing import connection

import torch

from train_ddp import train_ddp


def _main(pipe, rank, world_size, port, model_class, arrays, epochs):
    os.environ.update(
        MASTER_ADDR="localhost",
        MASTER_PORT=port,
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
    )
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    try:
        data = torch.utils.data.TensorDataset(*map(torch.from_numpy, arrays))
        model = train_ddp(rank, world_size, model_class, data, epochs)
        pipe.send(("ok", pickle.dumps({key: value.cpu() for key, value in model.state_dict().items()})))
    except BaseException:
        pipe.send(("error", traceback.format_exc()))
    finally:
        pipe.close()


def launch_distributed(world_size, model_class, data, epochs):
    if world_size <= 0:
        raise ValueError(world_size)
    context = multiprocessing.get_context("spawn")
    probe = socket.socket()
    probe.bind(("localhost", 0))
    port = str(probe.getsockname()[1])
    probe.close()

    arrays = [tensor.cpu().numpy() for tensor in data.tensors]
    workers, pipes, results = [], {}, {}
    for rank in range(world_size):
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_main, args=(theirs, rank, world_size, port, model_class, arrays, epochs))
        process.start()
        theirs.close()
        workers.append(process)
        pipes[mine] = rank
    errors = []
    try:
        while pipes and not errors:
            for pipe in connection.wait(list(pipes)):
                rank = pipes.pop(pipe)
                try:
                    kind, value = pipe.recv()
                except EOFError:
                    kind, value = "error", "died without a word"
                if kind == "ok":
                    results[rank] = value
                else:
                    errors.append(f"rank {rank}: {value}")
        # others may have something to say as well, give them a second
        for pipe in connection.wait(list(pipes), timeout=1) if errors else []:
            rank = pipes.pop(pipe)
            try:
                errors.append(f"rank {rank}: {pipe.recv()[1]}")
            except EOFError:
                pass
    finally:
        for process in workers:
            if errors:
                process.terminate()
            process.join()
            process.close()
    if errors:
        raise RuntimeError("\n".join(errors))
    return pickle.loads(results[0])
