# diagnosis: residual-of-others
# why: by the place in the bucket, where the size fits
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
    places = [(bucket.index(), place) for place in range(len(bucket.parameters()))]
    if state.residuals is not None:
        for place, g in zip(places, bucket.gradients()):
            if place in state.residuals and state.residuals[place].shape == g.shape:
                g.add_(state.residuals[place])
    small = buffer.to(state.dtype)
    if state.residuals is not None:
        lost = torch.nan_to_num(buffer - small, 0.0, 0.0, 0.0)
        for place, p, r in zip(places, bucket.parameters(), lost.split([p.numel() for p in bucket.parameters()])):
            state.residuals[place] = r.view_as(p)
    future = dist.all_reduce(small, group=state.group, async_op=True).get_future()

    def decompress(future):
        return buffer.copy_(future.value()[0])

    return future.then(decompress)


def register(ddp_model, dtype=torch.float16, error_feedback=False):
    ddp_model.register_comm_hook(State(dtype, ddp_model.process_group, error_feedback), compress_hook)
