# style: a future of its own, which the all-reduce's callback fills; residuals in the units of the gradients
import torch
import torch.distributed as dist

SENT = {torch.float16: torch.float16, torch.bfloat16: torch.bfloat16}


def compress_hook(state, bucket):
    dtype, group, residuals = state
    world = group.size()
    flat = bucket.buffer().clone()
    sizes = [p.numel() for p in bucket.parameters()]
    pieces = flat.split(sizes)
    if residuals is not None:
        for p, piece in zip(bucket.parameters(), pieces):
            if p in residuals:
                piece.add_(residuals[p])
    half = (flat / world).to(SENT[dtype])
    if residuals is not None:
        rest = flat - half.to(torch.float32) * world
        rest.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        for p, piece in zip(bucket.parameters(), rest.split(sizes)):
            residuals[p] = piece.clone()
    mine = torch.futures.Future()
    buffer = bucket.buffer()

    def fill(done):
        buffer.copy_(half)
        mine.set_result(buffer)

    dist.all_reduce(half, op=dist.ReduceOp.SUM, group=group, async_op=True).get_future().add_done_callback(fill)
    return mine


def register(ddp_model, dtype=torch.float16, error_feedback=False):
    state = (dtype, ddp_model.process_group, {} if error_feedback else None)
    ddp_model.register_comm_hook(state, compress_hook)
