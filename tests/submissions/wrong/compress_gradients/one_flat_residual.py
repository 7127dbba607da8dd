# diagnosis: residual-of-others
# why: one residual for the whole model, in the order of the buckets, which changes
import torch
import torch.distributed as dist


class State:
    def __init__(self, dtype, group, error_feedback):
        self.dtype = dtype
        self.group = group
        self.error_feedback = error_feedback
        self.flat = None
        self.offset = 0


def compress_hook(state, bucket):
    buffer = bucket.buffer()
    buffer.div_(state.group.size())
    if state.error_feedback:
        if bucket.index() == 0:
            state.offset = 0
        if state.flat is None:
            state.flat = torch.zeros_like(buffer)
        residual = state.flat[state.offset : state.offset + buffer.numel()]
        state.offset += buffer.numel()
        buffer.add_(residual)
    small = buffer.to(state.dtype)
    if state.error_feedback:
        residual.copy_(torch.nan_to_num(buffer - small, 0.0, 0.0, 0.0))
    future = dist.all_reduce(small, group=state.group, async_op=True).get_future()

    def decompress(future):
        return buffer.copy_(future.value()[0])

    return future.then(decompress)


def register(ddp_model, dtype=torch.float16, error_feedback=False):
    ddp_model.register_comm_hook(State(dtype, ddp_model.process_group, error_feedback), compress_hook)
