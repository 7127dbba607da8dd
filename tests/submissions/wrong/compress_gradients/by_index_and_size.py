# diagnosis: drops-residual
# why: a residual for each bucket; when the size no longer fits it begins anew
import torch
import torch.distributed as dist


class State:
    def __init__(self, dtype, group, error_feedback):
        self.dtype = dtype
        self.group = group
        self.residuals = {} if error_feedback else None


def compress_hook(state, bucket):
    buffer = bucket.buffer()
    buffer.div_(state.group.size())
    key = (bucket.index(), buffer.numel())
    if state.residuals is not None and key in state.residuals:
        buffer.add_(state.residuals[key])
    small = buffer.to(state.dtype)
    if state.residuals is not None:
        state.residuals[key] = torch.nan_to_num(buffer - small, 0.0, 0.0, 0.0)
    future = dist.all_reduce(small, group=state.group, async_op=True).get_future()

    def decompress(future):
        return buffer.copy_(future.value()[0])

    return future.then(decompress)


def register(ddp_model, dtype=torch.float16, error_feedback=False):
    ddp_model.register_comm_hook(State(dtype, ddp_model.process_group, error_feedback), compress_hook)
