# diagnosis: counts-warm-up
# why: the first steps count
import contextlib
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


def exposed_communication(step, ddp_model, repeats=9, clock=time.perf_counter):
    params = list(ddp_model.parameters())
    grads = [None if p.grad is None else p.grad.clone() for p in params]
    buffers = [b.clone() for b in ddp_model.buffers()]

    def clear():
        for p in params:
            p.grad = None

    def timed(context):
        clear()
        with context:
            dist.barrier()
            start = clock()
            step()
            return clock() - start

    synced, alone = [], []
    for _ in range(repeats):
        synced.append(timed(contextlib.nullcontext()))
        alone.append(timed(ddp_model.no_sync()))
    times = torch.tensor([min(synced), min(alone)], dtype=torch.float64)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    for p, g in zip(params, grads):
        p.grad = g
    for b, old in zip(ddp_model.buffers(), buffers):
        b.copy_(old)
    return Measurement(times[0].item(), times[1].item())


def scaling_efficiency(seconds, mode):
    if mode not in ("strong", "weak"):
        raise ValueError(mode)
    if not seconds or any(t <= 0 for t in seconds.values()):
        raise ValueError(seconds)
    base = min(seconds)
    found = {}
    for n, t in seconds.items():
        ratio = seconds[base] / t
        found[n] = ratio * base / n if mode == "strong" else ratio
    return found


def predict_step(parameters, ranks, bandwidth, latency, compute, buckets=1):
    nbytes = 4 * parameters / buckets
    one = 2 * (ranks - 1) / ranks * nbytes / bandwidth + 2 * (ranks - 1) * latency
    forward = compute / 3
    backward = compute - forward
    t = forward
    for i in range(buckets):
        ready = forward + backward * (i + 1) / buckets
        t = max(t, ready) + one
    return t
