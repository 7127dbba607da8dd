# diagnosis: residual-of-others
# why: one dictionary of the module, by bucket index: all models of the process share it
import torch
import torch.distributed as dist


RESIDUALS = {}


class State:
    def __init__(self, dtype, group, error_feedback):
        self.dtype = dtype
        self.group = group
        self.error_feedback = error_feedback


def compress_hook(state, bucket):
    buffer = bucket.buffer()
    buffer.div_(state.group.size())
    known = RESIDUALS.get(bucket.index())
    if state.error_feedback and known is not None and known.shape == buffer.shape:
        buffer.add_(known)
    small = buffer.to(state.dtype)
    if state.error_feedback:
        RESIDUALS[bucket.index()] = torch.nan_to_num(buffer - small, 0.0, 0.0, 0.0)
    future = dist.all_reduce(small, group=state.group, async_op=True).get_future()

    def decompress(future):
        return buffer.copy_(future.value()[0])

    return future.then(decompress)


def register(ddp_model, dtype=torch.float16, error_feedback=False):
    ddp_model.register_comm_hook(State(dtype, ddp_model.process_group, error_feedback), compress_hook)
