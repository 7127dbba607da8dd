# style: an object holds the state; times are gathered and the largest taken; DDP's switch is put back
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Measurement:
    step: float
    alone: float

    @property
    def exposed(self):
        return self.step - self.alone


class Stopwatch:
    def __init__(self, step, model, clock):
        self.step, self.model, self.clock = step, model, clock
        self.seconds = {True: [], False: []}

    def __enter__(self):
        self.state = [b.clone() for b in self.model.buffers()]
        self.grads = [p.grad.clone() if p.grad is not None else None for p in self.model.parameters()]
        self.switch = self.model.require_backward_grad_sync
        return self

    def __exit__(self, *error):
        self.model.require_backward_grad_sync = self.switch
        for b, s in zip(self.model.buffers(), self.state):
            b.data.copy_(s)
        for p, g in zip(self.model.parameters(), self.grads):
            p.grad = g

    def run(self, synchronize):
        for p in self.model.parameters():
            p.grad = None
        self.model.require_backward_grad_sync = synchronize
        self.model.process_group.barrier().wait()
        start = self.clock()
        self.step()
        took = self.clock() - start
        everybody = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, took)
        self.seconds[synchronize].append(max(everybody))


def exposed_communication(step, ddp_model, repeats=9, clock=time.perf_counter):
    warm = 3
    with Stopwatch(step, ddp_model, clock) as watch:
        for _ in range(warm + repeats):
            watch.run(True)
            watch.run(False)
    return Measurement(min(watch.seconds[True][warm:]), min(watch.seconds[False][warm:]))


def scaling_efficiency(seconds, mode):
    if mode != "strong" and mode != "weak":
        raise ValueError("strong or weak")
    if len(seconds) == 0 or min(seconds.values()) <= 0.0:
        raise ValueError("bad seconds")
    n0, t0 = min(seconds.items())
    ideal = {n: t0 if mode == "weak" else t0 * n0 / n for n in seconds}
    return {n: ideal[n] / t for n, t in seconds.items()}


def predict_step(parameters, ranks, bandwidth, latency, compute, buckets=1):
    forward, backward = compute / 3, compute * 2 / 3
    steps = 2 * ranks - 2
    bucket_bytes = parameters * 4.0 / buckets
    wire = steps * bucket_bytes / (ranks * bandwidth) + steps * latency
    free_at = 0.0
    for done in torch.linspace(1 / buckets, 1, buckets, dtype=torch.float64).tolist():
        begin = forward + done * backward
        if free_at > begin:
            begin = free_at
        free_at = begin + wire
    return free_at
