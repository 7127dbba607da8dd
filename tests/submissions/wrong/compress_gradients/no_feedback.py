# diagnosis: ignores-error-feedback
# why: error_feedback is accepted and not used
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
    small = buffer.to(state.dtype)
    future = dist.all_reduce(small, group=state.group, async_op=True).get_future()

    def decompress(future):
        return buffer.copy_(future.value()[0])

    return future.then(decompress)


def register(ddp_model, dtype=torch.float16, error_feedback=False):
    ddp_model.register_comm_hook(State(dtype, ddp_model.process_group, error_feedback), compress_hook)
