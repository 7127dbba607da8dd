# style: one hook without memory, and one around it that adds and keeps what is lost
from functools import partial

import torch
import torch.distributed as dist


def reduce_half(state, bucket, shares=None):
    buffer = bucket.buffer()
    if shares is None:
        shares = buffer / state["world"]
    packed = shares.to(state["dtype"])
    reduced = dist.all_reduce(packed, group=state["group"], async_op=True).get_future()
    return reduced.then(partial(give_back, buffer))


def give_back(buffer, reduced):
    buffer.copy_(reduced.value()[0])
    return buffer


def reduce_half_and_remember(state, bucket):
    memory = state["memory"]
    owed = torch.cat([memory.get(p, torch.zeros_like(p)).flatten() for p in bucket.parameters()])
    shares = bucket.buffer() / state["world"] + owed
    missing = shares - shares.to(state["dtype"]).to(shares.dtype)
    missing = missing.masked_fill(~missing.isfinite(), 0.0)
    offset = 0
    for p in bucket.parameters():
        memory[p] = missing[offset : offset + p.numel()].view(p.shape)
        offset += p.numel()
    return reduce_half(state, bucket, shares)


def register(ddp_model, dtype=torch.float16, error_feedback=False):
    group = ddp_model.process_group
    state = {"dtype": dtype, "group": group, "world": group.size(), "memory": {}}
    ddp_model.register_comm_hook(state, reduce_half_and_remember if error_feedback else reduce_half)
