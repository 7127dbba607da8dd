# style: two lists, abba order, statistics from plain Python, gathered as objects
import time
from dataclasses import dataclass

import torch.distributed as dist


@dataclass
class Measurement:
    step: float
    alone: float

    @property
    def exposed(self):
        return self.step - self.alone


def exposed_communication(step, ddp_model, repeats=9, clock=time.perf_counter):
    saved = {n: (p.grad.detach().clone() if p.grad is not None else None) for n, p in ddp_model.module.named_parameters()}
    state = {n: b.detach().clone() for n, b in ddp_model.module.named_buffers()}
    times = {True: [], False: []}

    def once(sync):
        for p in ddp_model.module.parameters():
            if p.grad is not None:
                p.grad.zero_()
        ddp_model.require_backward_grad_sync = sync
        dist.barrier()
        start = clock()
        step()
        end = clock()
        times[sync].append(end - start)

    try:
        for i in range(2 + repeats):
            for sync in ((True, False) if i % 2 else (False, True)):
                once(sync)
    finally:
        ddp_model.require_backward_grad_sync = True
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, (times[True][2:], times[False][2:]))
    best = [min(max(column) for column in zip(*(e[k] for e in every))) for k in (0, 1)]
    for n, p in ddp_model.module.named_parameters():
        p.grad = saved[n]
    for n, b in ddp_model.module.named_buffers():
        b.data.copy_(state[n])
    return Measurement(*best)


def scaling_efficiency(seconds, mode):
    if mode == "weak":
        work = {n: 1.0 for n in seconds}
    elif mode == "strong":
        work = {n: 1.0 / n for n in seconds}
    else:
        raise ValueError(mode)
    if len(seconds) == 0:
        raise ValueError("no runs")
    for n, t in seconds.items():
        if not t > 0:
            raise ValueError(f"{n} ranks took {t} s")
    base = sorted(seconds)[0]
    reference = work[base] / seconds[base]
    return {n: work[n] / t / reference for n, t in seconds.items()}


def predict_step(parameters, ranks, bandwidth, latency, compute, buckets=1):
    if ranks == 1:
        return compute
    one = 2 * (ranks - 1) * (4 * parameters / buckets / ranks / bandwidth + latency)
    free = 0.0
    for i in range(buckets):
        ready = compute / 3 + 2 * compute / 3 * (i + 1) / buckets
        free = max(free, ready) + one
    return free
