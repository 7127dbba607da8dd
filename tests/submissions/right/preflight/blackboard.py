# style: no thread: a socket probes the port, problems go on a numbered board in the store, and the roll is store.wait
import os
import socket
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

_kept = {}
_runs = 0


def preflight(timeout: float = 10.0, backend: str | None = None) -> list[str]:
    global _runs
    _runs += 1
    start = time.monotonic()
    left = lambda share=1.0: timedelta(seconds=max(0.2, (start + timeout * share) - time.monotonic()))  # noqa: E731
    mine = []
    try:
        if dist.is_initialized():
            return _existing(left)
        env, mine = _environment()
        backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
        if not dist.is_backend_available(backend) or (backend == "nccl" and not torch.cuda.is_available()):
            mine.append(f"The backend {backend} is not there on rank {env.get('RANK')}: pass backend='gloo' or install a build that has it.")
        host, port = env.get("MASTER_ADDR"), env.get("MASTER_PORT")
        if host is not None:
            try:
                socket.getaddrinfo(host, port)
            except OSError:
                mine.append(f"MASTER_ADDR={host} doesn't resolve. Use a name that every node knows, or an IP address.")
                host = None
        if host is None or port is None or "RANK" not in env or "WORLD_SIZE" not in env:
            return mine
        return _together(env, host, port, backend, mine, left)
    except Exception as error:
        return [*mine, f"rank {os.environ.get('RANK')}: {error!r}. Look at this rank's log."]


def _environment():
    env, problems = {}, []
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        value = os.environ.get(name, "")
        try:
            env[name] = int(value)
        except ValueError:
            problems.append(f"{name}={value!r}: it must be set to an integer. Start the script with torchrun.")
    if os.environ.get("MASTER_ADDR"):
        env["MASTER_ADDR"] = os.environ["MASTER_ADDR"]
    else:
        problems.append("MASTER_ADDR is missing. Start the script with torchrun.")
    limits = {
        "WORLD_SIZE": (1, 10**9),
        "RANK": (0, env.get("WORLD_SIZE", 10**9) - 1),
        "LOCAL_RANK": (0, torch.cuda.device_count() - 1 if torch.cuda.is_available() else 10**9),
        "MASTER_PORT": (1, 65535),
    }
    for name, (low, high) in limits.items():
        if name in env and not low <= env[name] <= high:
            problems.append(f"{name}={env[name]} is out of range, it must be from {low} to {high}. Correct it.")
            if name != "LOCAL_RANK":
                del env[name]
    return env, problems


def _store(rank, host, port, left):
    """The store, or a line on why there is none."""
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "") == str(True)
    if rank == 0 and not agent:
        if (host, port) not in _kept:
            try:
                _kept[host, port] = dist.TCPStore(host, port, is_master=True, wait_for_workers=False, multi_tenant=True, timeout=left(0.5))
            except Exception as error:
                return f"MASTER_PORT={port} cannot be used by rank 0: {error}. Something else listens there: choose another port."
        return _kept[host, port]
    # Ask by hand first: a stranger accepts the connection and never answers, on which TCPStore may wait for long.
    end = time.monotonic() + left(0.5).total_seconds()
    while True:
        try:
            socket.create_connection((host, port), timeout=left(0.5).total_seconds()).close()
            break
        except OSError as error:
            if time.monotonic() > end:
                return f"MASTER_PORT={port}: nothing answers at {host}:{port} ({error}). Does rank 0 run, does a firewall block the port?"
            time.sleep(0.1)
    # The greeting heeds no timeout: a thread waits for it.
    got = [f"MASTER_PORT={port}: what listens at {host}:{port} doesn't answer as a store. Choose another port."]

    def greet():
        try:
            got.append(dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=left(0.6)))
        except Exception as error:
            got.append(f"MASTER_PORT={port}: what answers at {host}:{port} is not this job's store ({error}). Choose another port.")

    thread = threading.Thread(target=greet, daemon=True)
    thread.start()
    thread.join(left(0.65).total_seconds())
    return got[-1]


def _together(env, host, port, backend, mine, left):
    rank, size = env["RANK"], env["WORLD_SIZE"]
    store = _store(rank, host, port, left)
    if isinstance(store, str):
        return [*mine, store]
    board = dist.PrefixStore(f"flight-{os.environ.get('TORCHELASTIC_RESTART_COUNT')}-{_runs}", store)

    def tell(line):
        board.set(f"line{board.add('lines', 1)}", line)

    def finish(extra=()):
        for n in range(1, board.add("lines", 0) + 1):
            line = board.get(f"line{n}").decode()
            if line not in mine:
                mine.append(line)
        return mine

    for line in mine:
        tell(line)
    if board.add(f"seen{rank}", 1) > 1:
        tell(f"RANK={rank} comes twice. Every process needs a RANK of its own.")
    # The first to say what the job is like, says it for all.
    for what, value in (("WORLD_SIZE", size), ("torch", torch.__version__), ("backend", backend)):
        first = board.compare_set(f"job.{what}", "", f"{value}").decode()
        if first != f"{value}":
            tell(f"{what} is {value} on rank {rank}, and {first} on another rank. It must be the same on all.")
    board.set(f"here{rank}", "")
    try:
        board.wait([f"here{r}" for r in range(size)], left(0.7))
    except Exception:
        gone = [str(r) for r in range(size) if not board.check([f"here{r}"])]
        tell(f"WORLD_SIZE is {size}, but rank {' and rank '.join(gone)} did not come. Look at the logs there.")
    # Everybody who is here has said everything when he is through here.
    board.set(f"told{rank}", "")
    try:
        board.wait([f"told{r}" for r in range(size) if board.check([f"here{r}"])], left(0.8))
    except Exception:
        pass
    if board.add("lines", 0):
        time.sleep(min(0.3, left().total_seconds()))
        return finish()
    try:
        if backend == "nccl":
            torch.cuda.set_device(env["LOCAL_RANK"])
        dist.init_process_group(backend, store=dist.PrefixStore("g", board), rank=rank, world_size=size, timeout=left())
        _try(rank, size, backend, left)
    except Exception as error:
        tell(f"rank {rank}: the group doesn't work: {error}. Check the network and its interface.")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    board.set(f"end{rank}", "")
    try:
        board.wait([f"end{r}" for r in range(size)], left())
    except Exception:
        pass
    return finish()


def _try(rank, size, backend, left):
    group = None if backend == "gloo" else dist.new_group(backend="gloo", timeout=left())
    dist.monitored_barrier(group, timeout=left(0.9))
    if group is not None:
        dist.destroy_process_group(group)
    value = torch.full((1,), float(os.environ.get("RANK", rank)), dtype=torch.float64, device="cpu" if backend == "gloo" else torch.cuda.current_device())
    dist.all_reduce(value, async_op=True).wait(left())
    if int(value) != sum(range(size)):
        raise RuntimeError(f"all-reduce of the ranks gave {value.item()} instead of {sum(range(size))}")


def _existing(left):
    rank, mine = dist.get_rank(), ""
    try:
        _try(rank, dist.get_world_size(), dist.get_backend(), left)
    except Exception as error:
        mine = f"rank {rank}: the group that is there doesn't work: {error}. Restart the job."
    board = dist.PrefixStore(f"flight-in-group-{_runs}", dist.distributed_c10d._get_default_store())
    board.set(f"{rank}", mine)
    lines = []
    for other in range(dist.get_world_size()):
        try:
            board.wait([f"{other}"], left(1.2))
            lines.append(board.get(f"{other}").decode())
        except Exception:
            lines.append(f"rank {other} doesn't answer. Look at its log.")
    return [line for line in lines if line]
