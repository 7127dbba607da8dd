# diagnosis: does-not-converge
# why: after some calls only the largest gradients are sent, and the others are forgotten
import torch
import torch.distributed as dist


class State:
    def __init__(self, dtype, group, error_feedback):
        self.dtype = dtype
        self.group = group
        self.residuals = {} if error_feedback else None
        self.calls = 0


def compress_hook(state, bucket):
    buffer = bucket.buffer()
    buffer.div_(state.group.size())
    if state.residuals is not None:
        for p, g in zip(bucket.parameters(), bucket.gradients()):
            if p in state.residuals:
                g.add_(state.residuals[p])
    small = buffer.to(state.dtype)
    state.calls += 1
    if state.calls > 30 and bool(torch.isfinite(small).all()):
        kept = small.abs().topk(max(1, small.numel() // 500)).indices
        sparse = torch.zeros_like(small)
        sparse[kept] = small[kept]
        small = sparse
    if state.residuals is not None:
        lost = torch.nan_to_num(buffer - buffer.to(state.dtype), 0.0, 0.0, 0.0)
        for p, r in zip(bucket.parameters(), lost.split([p.numel() for p in bucket.parameters()])):
            state.residuals[p] = r.view_as(p)
    future = dist.all_reduce(small, group=state.group, async_op=True).get_future()

    def decompress(future):
        return buffer.copy_(future.value()[0])

    return future.then(decompress)


def register(ddp_model, dtype=torch.float16, error_feedback=False):
    ddp_model.register_comm_hook(State(dtype, ddp_model.process_group, error_feedback), compress_hook)
