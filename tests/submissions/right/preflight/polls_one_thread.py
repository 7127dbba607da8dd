# style: everything in one thread that the caller waits for, and a roll that polls the store
import itertools
import json
import os
import socket
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

hosted = []
calls = itertools.count()
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def preflight(timeout: float = 10.0, backend: str | None = None) -> list[str]:
    found: list[str] = []
    deadline = time.monotonic() + timeout

    def work() -> None:
        try:
            look(found, deadline, timeout, backend, next(calls))
        except Exception as error:
            found.append(f"rank {os.environ.get('RANK', '?')}: {type(error).__name__}: {error}. Read the lines above it.")

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(timeout)
    if thread.is_alive():
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        found.append(f"MASTER_PORT: nothing useful came from {where} in {timeout:g} s. Is it this job's store? Take another port.")
    return list(found)


def number(name: str, found: list[str]) -> int | None:
    text = os.environ.get(name)
    if text is None or not text.strip():
        found.append(f"{name} is not set: start with torchrun, or export it.")
        return None
    try:
        return int(text)
    except ValueError:
        found.append(f"{name} is {text!r}, which is no integer: set it to one.")
        return None


def look(found: list[str], deadline: float, timeout: float, backend: str | None, call: int) -> None:
    if dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
        if os.environ.get("RANK", str(rank)) != str(rank):
            found.append(f"RANK is {os.environ['RANK']} on rank {rank} of the group: unset it, or start again.")
        store = dist.PrefixStore(f"preflight{call}", dist.distributed_c10d._get_default_store())
        meet(found, store, rank, size, dist.get_backend(), deadline, timeout, own=False)
        return
    rank, size, local, port = (number(name, found) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"))
    address = os.environ.get("MASTER_ADDR")
    if not address:
        found.append("MASTER_ADDR is not set: start with torchrun, or export the first node's name.")
    if size is not None and size < 1:
        found.append(f"WORLD_SIZE is {size}: set it to the number of ranks, at least 1.")
        size = None
    if rank is not None and (rank < 0 or (size is not None and rank >= size)):
        found.append(f"RANK is {rank}, but ranks go from 0 to WORLD_SIZE - 1 (WORLD_SIZE is {size}): number them again.")
        rank = None
    if local is not None and local < 0:
        found.append(f"LOCAL_RANK is {local}: it must be 0 or more.")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if local is not None and gpus and local >= gpus:
        found.append(f"LOCAL_RANK is {local}, but this node has {gpus} GPUs: start fewer ranks on it.")
    if port is not None and not 1 <= port <= 65535:
        found.append(f"MASTER_PORT is {port}: choose one from 1 to 65535.")
        port = None
    backend = backend or ("nccl" if gpus else "gloo")
    there = {"nccl": dist.is_nccl_available, "gloo": dist.is_gloo_available}.get(backend)
    if there is None or not there():
        found.append(f"rank {rank}: backend {backend!r} is not in this build of torch: take gloo, or another build.")
    elif backend == "nccl" and not gpus:
        found.append(f"rank {rank}: backend nccl needs a GPU and this node has none: take gloo.")
    if address:
        try:
            socket.getaddrinfo(address, None)
        except OSError as error:
            found.append(f"MASTER_ADDR is {address!r}, which does not resolve ({error}): correct the name.")
            address = None
    if None in (rank, size, port, address):
        return
    host = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        left = timedelta(seconds=max(0.5, 0.6 * timeout))
        tcp = dist.TCPStore(address, port, None, host, timeout=left, wait_for_workers=False, multi_tenant=True)
        if host:
            hosted.append(tcp)
    except Exception as error:
        word = "cannot be opened" if host else "does not answer"
        found.append(f"MASTER_PORT: the store at {address}:{port} {word} ({error}). Take a free port; is rank 0 running?")
        return
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"preflight/{again}/{call}", tcp)
    meet(found, store, rank, size, backend, deadline, timeout, own=True)


def share(found, store, kind, me, others, until) -> None:
    store.set(f"{kind}/{me}", json.dumps(found))
    for other in others:
        while not store.check([f"{kind}/{other}"]) and time.monotonic() < until:
            time.sleep(0.02)
        if store.check([f"{kind}/{other}"]):
            for line in json.loads(store.get(f"{kind}/{other}")):
                if line not in found:
                    found.append(line)


def meet(found, store, rank, size, backend, deadline, timeout, own) -> None:
    facts = {"WORLD_SIZE": size, "torch": str(torch.__version__), "backend": backend}
    mine = store.add(f"count/{rank}", 1)
    store.set(f"facts/{rank}", json.dumps(facts))
    if mine > 1:
        found.append(f"RANK {rank} is taken by two processes: give each its own RANK.")
    until = deadline - 0.4 * timeout
    missing = set(range(size))
    while missing and time.monotonic() < until:
        missing = {r for r in missing if not store.check([f"facts/{r}"])}
        time.sleep(0.02)
    if missing:
        names = ", ".join(map(str, sorted(missing)))
        found.append(f"rank {names} of {size} never arrived: look at its log and its node.")
    present = [r for r in range(size) if r not in missing]
    for other in present:
        if store.add(f"count/{other}", 0) > 1 and not any(f"RANK {other} is taken" in line for line in found):
            found.append(f"RANK {other} is taken by two processes: give each its own RANK.")
        told = json.loads(store.get(f"facts/{other}"))
        for name, value in facts.items():
            if told[name] != value:
                found.append(f"{name} is {value} on rank {rank} and {told[name]} on rank {other}: make it the same.")
    # Two processes may have the same RANK, and each has its own problems.
    everybody = [f"{other}.{n + 1}" for other in present for n in range(store.add(f"count/{other}", 0))]
    share(found, store, "early", f"{rank}.{mine}", everybody, deadline - 0.3 * timeout)
    if found:
        return
    left = timedelta(seconds=max(0.5, 0.25 * timeout))
    try:
        if own:
            local = int(os.environ["LOCAL_RANK"])
            if backend == "nccl":
                torch.cuda.set_device(local)
            dist.init_process_group(backend, store=dist.PrefixStore("group", store), rank=rank, world_size=size, timeout=left)
        if backend == "gloo":
            dist.monitored_barrier(timeout=left, wait_all_ranks=True)
        else:
            side = dist.new_group(backend="gloo", timeout=left)
            dist.monitored_barrier(side, timeout=left, wait_all_ranks=True)
            dist.destroy_process_group(side)
        total = torch.tensor(rank, dtype=torch.int64, device="cuda" if backend == "nccl" else "cpu")
        dist.all_reduce(total, async_op=True).wait(left)
        if total.item() != size * (size - 1) // 2:
            found.append(f"rank {rank}: the sum of all ranks is {total.item()}, not {size * (size - 1) // 2}: check the network.")
    except Exception as error:
        found.append(f"rank {rank}: the group does not form: {error}. Look at the network between the nodes.")
    finally:
        if own and dist.is_initialized():
            dist.destroy_process_group()
    share(found, store, "late", f"{rank}.{mine}", everybody, deadline)
