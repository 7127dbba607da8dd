# style: steps of both kinds forth and back, more of them to warm up; times in a table that is reduced at the end
import time
from contextlib import ExitStack
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass
class Measurement:
    step: float
    alone: float

    @property
    def exposed(self) -> float:
        return self.step - self.alone


def one(step, ddp_model, clock, synchronize):
    ddp_model.zero_grad(set_to_none=False)
    with ExitStack() as stack:
        if not synchronize:
            stack.enter_context(ddp_model.no_sync())
        meet = torch.zeros(1)
        dist.all_reduce(meet)
        before = clock()
        step()
        return clock() - before


def exposed_communication(step, ddp_model, repeats=9, clock=time.perf_counter):
    kept = {name: buffer.detach().clone() for name, buffer in ddp_model.named_buffers()}
    gradients = {p: p.grad.clone() for p in ddp_model.parameters() if p.grad is not None}
    for p in gradients:
        p.grad = None
    for _ in range(5):
        for kind in (False, True):
            one(step, ddp_model, clock, kind)
    table = torch.empty(repeats, 2, dtype=torch.float64)
    for row in range(repeats):
        order = (True, False) if row % 2 else (False, True)
        for kind in order:
            table[row, int(not kind)] = one(step, ddp_model, clock, kind)
    dist.all_reduce(table, op=dist.ReduceOp.MAX)
    for p in ddp_model.parameters():
        p.grad = gradients.get(p)
    with torch.no_grad():
        for name, buffer in ddp_model.named_buffers():
            buffer.copy_(kept[name])
    best = table.min(dim=0).values
    return Measurement(step=float(best[0]), alone=float(best[1]))


def scaling_efficiency(seconds, mode):
    if not seconds:
        raise ValueError("no run")
    for n, t in seconds.items():
        if not t > 0:
            raise ValueError(f"{t} seconds on {n} ranks")
    work = {"strong": lambda n: 1.0, "weak": lambda n: float(n)}.get(mode)
    if work is None:
        raise ValueError(f"no such mode: {mode}")
    per_rank = {n: work(n) / t / n for n, t in seconds.items()}
    base = per_rank[sorted(per_rank)[0]]
    return {n: speed / base for n, speed in per_rank.items()}


def predict_step(parameters, ranks, bandwidth, latency, compute, buckets=1):
    if ranks == 1:
        return compute
    chunk = parameters * 4 / ranks / buckets
    travel = 2 * (ranks - 1) * (chunk / bandwidth + latency)
    backward = 2 * compute / 3
    # The slower of the two stages repeats; the other shows once.
    return compute / 3 + backward / buckets + max(backward / buckets, travel) * (buckets - 1) + travel
