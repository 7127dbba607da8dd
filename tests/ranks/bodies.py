"""Functions that the tests run on ranks or start from launchers: they have to be in a file that can be imported."""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel


def total(start: float = 0.0) -> float:
    """An all-reduce; what it returns is observed."""
    dist.init_process_group("gloo")
    tensor = torch.tensor([start + dist.get_rank()])
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return tensor.item()


def leave(how: str) -> None:
    """Rank 1 leaves before its work is done."""
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        if how == "exit":
            sys.exit(0)
        raise ValueError("too early")
    dist.all_reduce(torch.ones(4))


def train_and_return_the_module(steps: int = 2) -> torch.nn.Module:
    """The usual way to write it, by which the DDP wrapper outlives its group (claims X29)."""
    dist.init_process_group("gloo")
    try:
        model = DistributedDataParallel(torch.nn.Linear(8, 8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
        return model.module
    finally:
        dist.destroy_process_group()


# Launchers -------------------------------------------------------------------------------------------------------


def worker(rank: int, size: int, port: int, mode: str) -> None:
    """A rank as `mp.spawn` starts it."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=size)
    tensor = torch.ones(3) * rank
    if rank == 1:
        match mode:
            case "raise":
                raise ValueError("bad shard")
            case "exit":
                sys.exit(7)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                dist.barrier()
            case "memory":
                hoard = [torch.ones(1 << 20) for _ in range(10_000)]
                print(len(hoard))
    dist.all_reduce(tensor)
    print("worker", rank, tensor.tolist(), os.environ.get("SET_BY_LAUNCHER"), flush=True)
    dist.destroy_process_group()


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def launch(mode: str = "", size: int = 2, times: int = 1) -> str:
    """A launcher of the kind that chapter 2 asks for."""
    os.environ["SET_BY_LAUNCHER"] = "yes"
    for _ in range(times):
        mp.spawn(worker, args=(size, free_port(), mode), nprocs=size)
    return "launched"


def put(queue: "mp.Queue[int]", number: int) -> None:
    queue.put(number * 10)
    if number == 1:
        sys.exit(7)


def launch_with_a_queue() -> list[int]:
    """Processes of the spawn context, a queue, exit codes."""
    context = mp.get_context("spawn")
    queue = context.Queue()
    processes = [context.Process(target=put, args=(queue, number)) for number in range(2)]
    for process in processes:
        process.start()
    values = sorted(queue.get() for _ in processes)
    for process in processes:
        process.join()
    return [*values, *(process.exitcode for process in processes)]


def share(tensor: torch.Tensor) -> None:
    tensor += 1


def launch_with_shared_memory() -> list[float]:
    """A tensor in shared memory goes to a child by its descriptor."""
    tensor = torch.zeros(2).share_memory_()
    mp.spawn(_share, args=(tensor,), nprocs=2)
    return tensor.tolist()


def _share(rank: int, tensor: torch.Tensor) -> None:
    tensor[rank] += rank + 1


def elastic_worker(mode: str) -> str:
    dist.init_process_group("gloo")
    if mode == "raise" and dist.get_rank() == 1:
        raise ValueError("bad shard")
    if mode == "hang" and dist.get_rank() == 1:
        dist.barrier()
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return f"{os.environ['LOCAL_RANK']} {tensor.item():g}"


def launch_elastic(mode: str = "") -> dict[str, str]:
    """torchrun's own launcher, as a function."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
    )
    results = elastic_launch(config, elastic_worker)(mode)
    return {str(rank): result for rank, result in results.items()}


def compute_first_launch_later(seconds: float) -> str:
    """A launcher that is busy by itself is not idle, though it has no workers."""
    give_up = time.monotonic() + seconds
    while time.monotonic() < give_up:
        torch.ones(100, 100) @ torch.ones(100, 100)
    return "done"
