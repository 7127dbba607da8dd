# style: the roll is counted by `add`; what differs is found in the group, by all_gather_object
import concurrent.futures
import os
import socket
import time
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

_server = None
_number = 0


def preflight(timeout: float = 10.0, backend: str | None = None) -> list[str]:
    global _number
    _number += 1
    end = time.monotonic() + timeout
    problems: list[str] = []
    try:
        if dist.is_initialized():
            if group_works(problems, end, dist.get_backend()):
                everybody = [None] * dist.get_world_size()
                dist.all_gather_object(everybody, problems)
                problems = [line for lines in everybody for line in lines]
        else:
            from_nothing(problems, end, timeout, backend)
    except Exception as error:
        problems.append(f"rank {os.environ.get('RANK', '?')} stopped: {error}. Its log says more.")
    return list(dict.fromkeys(problems))


def seconds(end: float, most: float = 1e9) -> timedelta:
    return timedelta(seconds=min(most, max(0.1, end - time.monotonic())))


def from_nothing(problems, end, timeout, backend) -> None:
    values = {}
    for name in ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"]:
        if os.environ.get(name, "") == "":
            problems.append(f"{name}: not set. torchrun sets it; start the job with torchrun.")
        elif name == "MASTER_ADDR":
            values[name] = os.environ[name]
        elif not os.environ[name].strip().lstrip("+-").isdigit():
            problems.append(f"{name}: {os.environ[name]!r} is not an integer. Correct it.")
        else:
            values[name] = int(os.environ[name])
    rank, size, local, host, port = map(values.get, ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"])
    usable = True
    if size is not None and size < 1:
        problems.append(f"WORLD_SIZE: {size} ranks cannot train. Set it to how many there are.")
        usable = False
    elif rank is not None and (rank < 0 or size is not None and rank >= size):
        problems.append(f"RANK: {rank} is not below WORLD_SIZE {size}, or negative. Count ranks from 0.")
        usable = False
    if port is not None and not 0 < port < 65536:
        problems.append(f"MASTER_PORT: {port} is not between 1 and 65535. Choose another.")
        usable = False
    gpus = torch.cuda.is_available()
    if local is not None and (local < 0 or gpus and local >= torch.cuda.device_count()):
        problems.append(f"LOCAL_RANK: {local}, with {torch.cuda.device_count()} GPUs on the node. Start one rank for each GPU.")
    if backend is None:
        backend = "nccl" if gpus else "gloo"
    if backend == "nccl" and not (gpus and dist.is_nccl_available()) or backend == "gloo" and not dist.is_gloo_available():
        problems.append(f"backend {backend} (rank {rank}) cannot work here. Choose one that can.")
    elif backend not in ("nccl", "gloo"):
        problems.append(f"backend {backend} (rank {rank}) is unknown. Choose gloo or nccl.")
    if host is not None:
        try:
            socket.gethostbyname(host)
        except OSError:
            try:
                socket.getaddrinfo(host, None)
            except OSError as error:
                problems.append(f"MASTER_ADDR: {host} cannot be resolved, {error}. Write it as an IP address.")
                usable = False
    if not usable or None in (rank, size, host, port):
        return
    store = connect(problems, rank, host, port, end - timeout / 2)
    if store is None:
        return
    store = dist.PrefixStore(f"p{_number}r{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    say = lambda line: store.append("problems", line + "\n")  # noqa: E731
    for line in problems:
        say(line)
    store.append("sizes", f"{size} on rank {rank}\n")
    mark = store.add(f"arrived/{rank}", 1)
    if mark > 1:
        say(f"RANK: {mark} processes say that they are rank {rank}. Give each its own.")
    while time.monotonic() < end - 0.4 * timeout:
        if all(store.add(f"arrived/{r}", 0) for r in range(size)) or mark > 1:
            break
        if len({line.split()[0] for line in store.get("sizes").decode().splitlines()}) > 1:
            break
        time.sleep(0.03)
    sizes = store.get("sizes").decode().splitlines()
    if len({line.split()[0] for line in sizes}) > 1:
        say(f"WORLD_SIZE: {', '.join(sorted(sizes))}. It has to be the same on every rank.")
    for r in range(size):
        if not store.add(f"arrived/{r}", 0):
            say(f"rank {r} has not arrived. Is its process running?")
    time.sleep(0.3)
    if store.check(["problems"]):
        time.sleep(0.3)
        problems += store.get("problems").decode().splitlines()
        return
    try:
        if backend == "nccl":
            torch.cuda.set_device(local)
        # The facts go through gloo, which takes every tensor of Python's.
        dist.init_process_group("gloo", store=dist.PrefixStore("facts", store), rank=rank, world_size=size, timeout=seconds(end))
        facts: list = [None] * size
        dist.all_gather_object(facts, (torch.__version__, backend))
        for what, i in (("torch's version", 0), ("backend", 1)):
            if len({fact[i] for fact in facts}) > 1:
                told = ", ".join(f"{fact[i]} on rank {r}" for r, fact in enumerate(facts))
                problems.append(f"{what} differs: {told}. Install and pass the same everywhere.")
        if problems:
            return
        if backend == "nccl":
            dist.destroy_process_group()
            dist.init_process_group("nccl", store=dist.PrefixStore("nccl", store), rank=rank, world_size=size, timeout=seconds(end))
        group_works(problems, end, backend)
    except Exception as error:
        problems.append(f"rank {rank}: no group forms: {error}. Look for a firewall between the nodes.")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        for line in problems:
            say(line)
    store.add("ended", 1)
    with suppress(Exception):
        while store.add("ended", 0) < size and time.monotonic() < end:
            time.sleep(0.03)
        if store.check(["problems"]):
            problems += store.get("problems").decode().splitlines()


def connect(problems, rank, host, port, until):
    """The store at host:port, which rank 0 opens if no agent has."""
    global _server
    if rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        try:
            if _server is None or _server.port != port:
                _server = dist.TCPStore(host, port, is_master=True, wait_for_workers=False, multi_tenant=True, timeout=seconds(until))
            return _server
        except Exception as error:
            problems.append(f"MASTER_PORT: {port} is not free for rank 0: {error}. Choose another.")
            return None
    try:
        pool = concurrent.futures.ThreadPoolExecutor(1)
        arguments = dict(is_master=False, wait_for_workers=False, timeout=seconds(until))
        future = pool.submit(dist.TCPStore, host, port, **arguments)
        pool.shutdown(wait=False)
        return future.result(timeout=seconds(until).total_seconds() + 0.5)
    except Exception as error:
        problems.append(f"MASTER_PORT: at {host}:{port} no store answers: {error}. See whether rank 0 runs and what listens there.")
        return None


def group_works(problems, end, backend) -> bool:
    rank, size = int(os.environ.get("RANK") or dist.get_rank()), dist.get_world_size()
    try:
        barrier = dist.group.WORLD if backend == "gloo" else dist.new_group(backend="gloo", timeout=seconds(end))
        dist.monitored_barrier(barrier, seconds(end - 1))
        total = torch.tensor(float(rank), dtype=torch.double)
        if backend == "nccl":
            total = total.cuda()
        dist.all_reduce(total, async_op=True).wait(seconds(end))
        expected = size * (size - 1) / 2
        if total.item() != expected:
            problems.append(f"rank {rank}: the sum over ranks is {total.item():g}, not {expected:g}. Change network or driver.")
        return True
    except Exception as error:
        problems.append(f"rank {rank}: the group does not answer: {error}. Look at the other ranks' logs.")
        return False
