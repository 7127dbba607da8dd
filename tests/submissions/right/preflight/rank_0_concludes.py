# style: each blocking call has a thread and a limit; rank 0 compares the roll and publishes the verdict
import json
import os
import socket
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

STORES = []
TIMES = [0]


class Problem(Exception):
    pass


def bounded(seconds, call, otherwise):
    """What `call` returns, within `seconds`; Problem(otherwise) if it takes longer or raises."""
    answer = []

    def run():
        try:
            answer.append((call(), None))
        except Exception as error:
            answer.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(max(0.05, seconds))
    if not answer:
        raise Problem(f"{otherwise} (no answer in {seconds:.0f} s)")
    value, error = answer[0]
    if error is not None:
        raise Problem(f"{otherwise} ({str(error).splitlines()[0] if str(error) else type(error).__name__})")
    return value


def integer(name, low, high, why, lines):
    text = os.environ.get(name)
    if not text:
        lines.append(f"{name} is not set: start this with torchrun, or set it by hand.")
        return None
    try:
        value = int(text)
    except ValueError:
        lines.append(f"{name} is {text!r}: set it to a whole number.")
        return None
    if value < low or (high is not None and value > high):
        lines.append(f"{name} is {value}, which is impossible: {why}.")
        return None
    return value


def preflight(timeout: float = 10.0, backend: str | None = None) -> list[str]:
    lines = []
    TIMES[0] += 1
    try:
        Flight(timeout, backend, lines).check()
    except Problem as problem:
        lines.append(str(problem))
    except Exception as error:
        lines.append(f"rank {os.environ.get('RANK')}: unexpected {type(error).__name__} ({error}); see its log.")
    return lines


class Flight:
    def __init__(self, timeout, backend, lines):
        self.begin, self.timeout, self.lines, self.backend = time.monotonic(), timeout, lines, backend

    def left(self, share=1.0):
        return max(0.1, self.begin + share * self.timeout - time.monotonic())

    def check(self):
        self.had_group = dist.is_initialized()
        if self.had_group:
            self.rank, self.size, self.backend = dist.get_rank(), dist.get_world_size(), dist.get_backend()
            store = dist.distributed_c10d._get_default_store()
        else:
            self.variables()
            gpu = torch.cuda.is_available()
            self.backend = self.backend or ("nccl" if gpu else "gloo")
            known = self.backend in ("gloo", "nccl") and dist.is_backend_available(self.backend)
            if not known or (self.backend == "nccl" and not gpu):
                self.lines.append(f"rank {self.rank}: there is no backend {self.backend!r} here. Use gloo, or a machine with GPUs.")
            store = self.open()
        self.store = dist.PrefixStore(f"preflight.{os.environ.get('TORCHELASTIC_RUN_ID')}.{os.environ.get('TORCHELASTIC_RESTART_COUNT')}.{TIMES[0]}", store)
        self.roll()
        if not self.lines:
            self.fly()

    def variables(self):
        size = integer("WORLD_SIZE", 1, None, "there is at least one rank", self.lines)
        self.size = size
        self.rank = integer("RANK", 0, size and size - 1, f"it must be below WORLD_SIZE={size} and not negative", self.lines)
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else None
        integer("LOCAL_RANK", 0, gpus and gpus - 1, f"this node has {gpus} GPUs; start as many ranks on it", self.lines)
        self.address = os.environ.get("MASTER_ADDR")
        if not self.address:
            self.lines.append("MASTER_ADDR is not set: start this with torchrun, or set it to the first node's name.")
        self.port = integer("MASTER_PORT", 1, 65535, "ports go from 1 to 65535", self.lines)

    def open(self):
        if self.address:
            try:
                bounded(self.left(0.3), lambda: socket.getaddrinfo(self.address, 0), f"MASTER_ADDR={self.address} does not resolve: correct it or ask for DNS")
            except Problem as problem:
                self.lines.append(str(problem))
                self.address = None
        if None in (self.rank, self.size, self.port) or not self.address:
            raise_first = self.lines.pop()
            raise Problem(raise_first)
        host = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        wait = self.left(0.5)

        def connect():
            return dist.TCPStore(
                self.address, self.port, is_master=host, wait_for_workers=False, multi_tenant=True, timeout=timedelta(seconds=wait)
            )

        place = f"{self.address}:{self.port}"
        text = f"MASTER_PORT: {place} is taken by another program: choose a free one"
        if not host:
            text = f"MASTER_PORT: no store at {place}: is rank 0 up, and is the port right?"
        store = bounded(wait + 0.5, connect, text)
        STORES.append(store)
        # A stranger that listens may have let itself be connected to: it won't count.
        bounded(2.0, lambda: store.add("preflight.alive", 1), f"MASTER_PORT: what listens at {place} is no store: choose another port")
        return store

    def wait_for(self, keys, until):
        """Those of `keys` that are in the store in time."""
        there = []
        while True:
            there = [key for key in keys if self.store.check([key])]
            if len(there) == len(keys) or time.monotonic() > until:
                return there
            time.sleep(0.05)

    def roll(self):
        counted = self.store.add(f"n{self.rank}", 1)
        if counted > 1:
            # The first with this number reports the facts. This one only says that it is there, and what is wrong with it.
            self.lines.append(f"rank {self.rank} is there twice: two processes have RANK={self.rank}; number them differently.")
            self.store.set(f"double{self.rank}", json.dumps(self.lines))
        else:
            me = {"WORLD_SIZE": self.size, "torch": torch.__version__, "backend": self.backend, "lines": self.lines}
            self.store.set(f"r{self.rank}", json.dumps(me))
        keys = [f"r{rank}" for rank in range(self.size)]
        there = self.wait_for(keys, self.begin + 0.6 * self.timeout)
        told = {int(key[1:]): json.loads(self.store.get(key)) for key in there}
        time.sleep(min(0.2, self.left() / 10))  # a double one may be a moment behind
        lines = [line for rank in told for line in told[rank]["lines"]]
        missing = [rank for rank in range(self.size) if rank not in told]
        for rank in missing:
            lines.append(f"rank {rank} is missing: {len(told)} of {self.size} are here. Look whether its node and process started.")
        for rank in told:
            if self.store.add(f"n{rank}", 0) > 1:
                lines.append(f"rank {rank} is there twice: two processes have RANK={rank}; number them differently.")
                for key in self.wait_for([f"double{rank}"], self.begin + 0.7 * self.timeout):
                    lines.extend(json.loads(self.store.get(key)))
        for name in ("WORLD_SIZE", "torch", "backend"):
            values = {rank: told[rank][name] for rank in told}
            if len(set(values.values())) > 1:
                all_of_them = ", ".join(f"{value} on rank {rank}" for rank, value in values.items())
                lines.append(f"{name} differs: {all_of_them}. Give every rank the same.")
        # Rank 0's list is everybody's; without rank 0, each has its own, of the same roll.
        if self.rank == 0 and counted == 1:
            self.store.set("verdict", json.dumps(lines))
        elif 0 in told and self.wait_for(["verdict"], self.begin + 0.75 * self.timeout):
            lines = [*json.loads(self.store.get("verdict")), *lines]
        for line in lines:
            if line not in self.lines:
                self.lines.append(line)

    def fly(self):
        mine = []
        seconds = timedelta(seconds=self.left(0.9))
        try:
            if not self.had_group:
                if self.backend == "nccl":
                    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
                dist.init_process_group(self.backend, rank=self.rank, world_size=self.size, store=dist.PrefixStore("pg", self.store), timeout=seconds)
            beside = dist.new_group(backend="gloo", timeout=seconds) if self.backend != "gloo" else dist.group.WORLD
            dist.monitored_barrier(beside, seconds)
            value = torch.tensor([int(os.environ.get("RANK", self.rank))], dtype=torch.long)
            if self.backend == "nccl":
                value = value.cuda()
            work = dist.all_reduce(value, async_op=True)
            work.wait(timedelta(seconds=self.left(0.9)))
            if value[0] != sum(range(self.size)):
                mine.append(f"rank {self.rank}: the ranks add up to {value[0]}, expected {sum(range(self.size))}. Don't train on this network.")
        except Exception as error:
            mine.append(f"rank {self.rank}: no group: {str(error).splitlines()[0]}. Check GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME and the firewall.")
        if not self.had_group and dist.is_initialized():
            dist.destroy_process_group()
        self.store.set(f"e{self.rank}", json.dumps(mine))
        for key in self.wait_for([f"e{rank}" for rank in range(self.size)], self.begin + self.timeout):
            self.lines += [line for line in json.loads(self.store.get(key)) if line not in self.lines]
