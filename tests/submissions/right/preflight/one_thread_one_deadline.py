# style: all the work in one thread that is waited for, problems collected as they come
import datetime
import os
import threading
import time

import torch
import torch.distributed as dist

NAMES = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "MASTER_ADDR"]
count = 0
stores = []


class Flight:
    def __init__(self, timeout, backend):
        self.timeout = timeout
        self.seconds = datetime.timedelta(seconds=0.4 * timeout)
        self.backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
        self.lines = []
        self.now = "started"
        self.given = dist.is_initialized()

    def look(self):
        self.value = {}
        for name in NAMES:
            text = os.environ.get(name, "")
            if name == "MASTER_ADDR" or not text:
                self.value[name] = text
                if not text and not self.given:
                    self.lines.append(name + " is not set")
                continue
            try:
                self.value[name] = int(text)
            except ValueError:
                self.lines.append(name + " should be an integer: " + text)
        if self.lines:
            return
        r, w, l, p = (self.value[name] for name in NAMES[:4])
        for bad, line in [
            (w != "" and w < 1, f"WORLD_SIZE is {w}"),
            (r != "" and not 0 <= r < max(w or 1, 1), f"RANK is {r}, with WORLD_SIZE {w}"),
            (l != "" and l < 0, f"LOCAL_RANK is {l}"),
            (p != "" and not 0 < p < 65536, f"MASTER_PORT is {p}"),
        ]:
            if bad:
                self.lines.append(line)
        if self.backend == "nccl":
            gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
            if gpus == 0:
                self.lines.append("nccl was asked for, but CUDA is not available")
            elif l != "" and l >= gpus:
                self.lines.append(f"LOCAL_RANK is {l}, but there are only {gpus} GPUs")

    def meet(self):
        global count
        count += 1
        if self.given:
            store = dist.distributed_c10d._get_default_store()
        else:
            address, port = self.value["MASTER_ADDR"], self.value["MASTER_PORT"]
            self.now = f"could not reach a store at {address}:{port}"
            agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "") == "True"
            first = not agent and self.value["RANK"] == 0
            store = dist.TCPStore(address, port, None, first, self.seconds, wait_for_workers=False, multi_tenant=True)
            stores.append(store)
        self.store = dist.PrefixStore(f"flight-{os.environ.get('TORCHELASTIC_RESTART_COUNT')}-{count}", store)
        self.rank = self.value["RANK"] if self.value["RANK"] != "" else dist.get_rank()
        self.world = dist.get_world_size() if self.given else self.value["WORLD_SIZE"]

    def roll(self):
        self.now = "could not call the roll"
        taken = self.store.add(f"rank {self.rank}", 1)
        if taken > 1:
            self.store.set(f"twice {self.rank}", "yes")
        self.store.set(f"facts {self.rank}", f"WORLD_SIZE {self.world}, torch {torch.__version__}, {self.backend}")
        facts = {}
        end = time.monotonic() + self.timeout * 0.4
        for rank in range(self.world):
            left = max(0.05, end - time.monotonic())
            try:
                self.store.wait([f"facts {rank}"], datetime.timedelta(seconds=left))
                facts[rank] = self.store.get(f"facts {rank}").decode()
            except Exception:
                self.lines.append(f"rank {rank} is missing: was it started, and does it reach the store?")
        for rank in range(self.world):
            if self.store.check([f"twice {rank}"]):
                self.lines.append(f"ranks started twice: {[rank]}")
        if len(set(facts.values())) > 1:
            self.lines.append("the ranks differ: " + "; ".join(f"rank {r}: {fact}" for r, fact in facts.items()))

    def fly(self):
        self.now = "the group did not work"
        if not self.given:
            dist.init_process_group(self.backend, store=self.store, rank=self.rank, world_size=self.world, timeout=self.seconds)
        group = dist.new_group(backend="gloo", timeout=self.seconds)
        dist.monitored_barrier(group, self.seconds, True)
        number = torch.full((3,), self.rank, dtype=torch.long)
        dist.all_reduce(number, group=group)
        seen = [None for _ in range(self.world)]
        dist.all_gather_object(seen, number.tolist(), group)
        right = [self.world * (self.world - 1) // 2] * 3
        for rank, one in enumerate(seen):
            if one != right:
                self.lines.append(f"on rank {rank} the sum of all ranks is {one[0]} and not {right[0]}")
        dist.destroy_process_group(group if self.given else None)

    def run(self):
        try:
            for part in (self.look, self.meet, self.roll, self.fly):
                part()
                if self.lines:
                    return
        except Exception as error:
            self.lines.append(f"{self.now}: {str(error).strip().splitlines()[0]}")
        finally:
            if not self.given and dist.is_initialized():
                dist.destroy_process_group()


def preflight(timeout: float = 10.0, backend: str | None = None) -> list[str]:
    flight = Flight(timeout, backend)
    thread = threading.Thread(target=flight.run, daemon=True)
    thread.start()
    thread.join(timeout)
    if thread.is_alive():
        return [*flight.lines, f"after {timeout} s: {flight.now}"]
    return flight.lines
