# style: the store waits for all keys at once, and carries the results
import datetime
import itertools
import json
import os
import socket
import threading
import time

import torch
import torch.distributed as dist

calls = itertools.count()
kept = []


def number(name, low, high, problems):
    text = os.environ.get(name)
    if not text:
        problems.append(f"{name} is missing from the environment: use torchrun")
        return None
    try:
        value = int(text)
    except ValueError:
        problems.append(f"{name}={text!r} is not an integer")
        return None
    if value < low or value > high:
        problems.append(f"{name}={value} is out of range")
        return None
    return value


def environment():
    problems = []
    world = number("WORLD_SIZE", 1, 10**6, problems)
    number("RANK", 0, (world or 10**6) - 1, problems)
    number("LOCAL_RANK", 0, 10**6, problems)
    number("MASTER_PORT", 1, 65535, problems)
    if not os.environ.get("MASTER_ADDR"):
        problems.append("MASTER_ADDR is missing from the environment: use torchrun")
    return problems


def devices(backend):
    problems = []
    if backend == "nccl" and not torch.cuda.is_available():
        problems.append("the nccl backend needs CUDA: choose gloo")
    elif backend == "nccl":
        local = int(os.environ.get("LOCAL_RANK", 0))
        if local >= torch.cuda.device_count():
            problems.append(f"LOCAL_RANK {local} has no GPU: there are {torch.cuda.device_count()}")
    return problems


def in_time(seconds, function):
    result = []

    def run():
        try:
            result.append((function(), None))
        except Exception as error:
            result.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not result:
        raise TimeoutError(f"no answer within {seconds:.1f} s")
    value, error = result[0]
    if error is not None:
        raise error
    return value


def connect(seconds):
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    host = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and int(os.environ["RANK"]) == 0
    patience = datetime.timedelta(seconds=seconds)
    in_time(seconds, lambda: socket.gethostbyname(address))
    store = in_time(
        seconds,
        lambda: dist.TCPStore(address, port, None, host, timeout=patience, wait_for_workers=False, multi_tenant=True),
    )
    kept.append(store)
    return store


def preflight(timeout: float = 10.0, backend: str | None = None) -> list[str]:
    try:
        return check(timeout, backend)
    except Exception as error:
        return [f"preflight failed: {type(error).__name__}: {str(error)[:200]}"]


def check(timeout, backend):
    end = time.monotonic() + 0.8 * timeout
    given = dist.is_initialized()
    if backend is None:
        backend = "nccl" if torch.cuda.is_available() else "gloo"
    problems = ([] if given else environment()) + devices(backend)
    if problems:
        return problems
    rank = int(os.environ.get("RANK", dist.get_rank() if given else 0))
    world = dist.get_world_size() if given else int(os.environ["WORLD_SIZE"])
    try:
        store = dist.distributed_c10d._get_default_store() if given else connect(0.6 * timeout)
    except Exception as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        return [f"no store at {where} ({str(error).splitlines()[0][:150]}): check MASTER_ADDR and MASTER_PORT"]
    store = dist.PrefixStore(f"preflight{next(calls)} of {os.environ.get('TORCHELASTIC_RESTART_COUNT')}", store)
    problems = roll_call(store, rank, world, backend, end)
    if problems:
        return problems
    patience = datetime.timedelta(seconds=max(1.0, 0.5 * timeout))
    try:
        if not given:
            dist.init_process_group(
                backend, store=dist.PrefixStore("pg", store), rank=rank, world_size=world, timeout=patience
            )
        side = dist.group.WORLD if backend == "gloo" else dist.new_group(backend="gloo")
        dist.monitored_barrier(side, timeout=patience, wait_all_ranks=True)
        total = torch.tensor([rank], device="cuda" if backend == "nccl" else "cpu")
        dist.all_reduce(total)
        mine = []
        if int(total) != sum(range(world)):
            mine.append(f"rank {rank}: the all_reduce of ranks gave {int(total)}, not {sum(range(world))}")
        store.set(f"sum/{rank}", json.dumps(mine))
        store.wait([f"sum/{r}" for r in range(world)], patience)
        return sum((json.loads(store.get(f"sum/{r}")) for r in range(world)), [])
    finally:
        if not given and dist.is_initialized():
            dist.destroy_process_group()


def roll_call(store, rank, world, backend, end):
    problems = []
    store.add(f"here/{rank}", 1)
    store.set(f"info/{rank}", json.dumps({"WORLD_SIZE": world, "torch": str(torch.__version__), "backend": backend}))
    while True:
        left = max(0.01, end - time.monotonic())
        try:
            store.wait([f"info/{r}" for r in range(world)], datetime.timedelta(seconds=left))
        except Exception:
            pass
        missing = [r for r in range(world) if not store.check([f"info/{r}"])]
        break
    if missing:
        problems.append(f"rank {', '.join(map(str, missing))} did not come: see its log")
    for other in range(world):
        if store.add(f"here/{other}", 0) > 1:
            problems.append(f"RANK {other} was given to more than one process")
    infos = {r: json.loads(store.get(f"info/{r}")) for r in range(world) if r not in missing}
    for what in ("WORLD_SIZE", "torch", "backend"):
        values = {r: info[what] for r, info in infos.items()}
        if len(set(values.values())) > 1:
            problems.append(f"{what} differs between the ranks: {values}")
    return problems
