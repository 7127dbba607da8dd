"""Exercise compress_gradients: halve the bytes on the wire with a DDP communication hook.

Chapter 4, "Compression". To see it at work on two ranks:

    torchrun --nproc-per-node=2 exercises/compress_gradients.py

It works with any model in DDP, on gloo and on nccl. Take it to your own projects. torch's own `bf16_compress_hook`
refuses to run without nccl, and both it and `fp16_compress_hook` cast before they divide.
"""

import os
import sys
from dataclasses import dataclass  # solution-only
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

# --- solution-only ---


@dataclass
class Compression:
    """What the hook knows and keeps; DDP hands it to every call as `state`.

    `residuals` is what the casts have lost of each parameter's gradient and what is still owed, as this rank's share of
    the mean; None without error feedback.
    """

    dtype: torch.dtype
    group: dist.ProcessGroup
    residuals: dict[nn.Parameter, torch.Tensor] | None


# --- end ---


def compress_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Start the all-reduce of one bucket in the smaller dtype, and return at once.

    DDP calls this during backward, whenever all gradients of a bucket are ready, in the same order on all ranks. This
    all-reduce replaces DDP's own: DDP neither divides before it nor changes the result. Keep the names
    of the two arguments and, if you annotate, the annotations: DDP checks those of `bucket` and of the result.

    Args:
        state: what `register` gave to DDP.
        bucket: `bucket.buffer()` is a flat float32 tensor with the bucket's gradients of this rank;
            `bucket.gradients()` are views into it and `bucket.parameters()` their parameters, in the same order.

    Returns:
        A future of one tensor of the buffer's size, in float32 or the smaller dtype: the mean over the ranks. DDP copies it
        into the gradients.
    """
    # --- solution: start the all-reduce of a compressed bucket ---
    buffer = bucket.buffer()
    buffer /= state.group.size()  # before the cast: neither a large gradient nor the sum leaves the range of float16
    if state.residuals is not None:
        # By parameter: after the first step DDP rebuilds its buckets, and index, size and order are others.
        for parameter, share in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if parameter in state.residuals:
                share += state.residuals[parameter]
    compressed = buffer.to(state.dtype)
    if state.residuals is not None:
        # Where a gradient overflows, this step is lost (a scaler skips it); what is owed must not be infinite for ever.
        lost = torch.nan_to_num(buffer - compressed, nan=0.0, posinf=0.0, neginf=0.0)
        pieces = lost.split([parameter.numel() for parameter in bucket.parameters()])
        for parameter, piece in zip(bucket.parameters(), pieces, strict=True):
            state.residuals[parameter] = piece.view_as(parameter)
    future = dist.all_reduce(compressed, group=state.group, async_op=True).get_future()
    return future.then(lambda done: buffer.copy_(done.value()[0]))
    # --- end ---


def register(
    ddp_model: DistributedDataParallel, dtype: torch.dtype = torch.float16, error_feedback: bool = False
) -> None:
    """Make the gradients of this model cross the wire in a smaller dtype. Called once, before the first backward.

    From then on, backward leaves in every gradient the mean over the ranks of `ddp_model.process_group`, in float32,
    bit for bit the same on all of them, and exact except for the rounding of `dtype`.

    - A step has as many collectives as without the hook, one all-reduce per bucket, with half the bytes.
    - Backward doesn't wait for them: it computes the next bucket's gradients while this one travels.
    - Each rank divides before it casts, so no sum is larger than the largest gradient. A value too large for `dtype`
      becomes inf or NaN, which a gradient scaler looks for.
    - With `error_feedback`, each rank keeps what the cast loses of its gradient and adds it in the next step,
      separately for each parameter, even though DDP rebuilds its buckets after the first step. The error of many steps
      together is then no larger than that of one step. Keep no residual of an element if it, or its
      cast, is inf or NaN.
    - Several models in one process don't affect each other. A module that is wrapped and registered again owes nothing.

    Args:
        ddp_model: the wrapped model; its parameters are float32.
        dtype: torch.float16 (11 bits of precision, up to 65504) or torch.bfloat16 (8 bits, the range of float32).
        error_feedback: whether to keep the residuals of the casts and send them later.
    """
    # --- solution: register the hook with its state ---
    residuals: dict[nn.Parameter, torch.Tensor] | None = {} if error_feedback else None
    ddp_model.register_comm_hook(Compression(dtype, ddp_model.process_group, residuals), compress_hook)
    # --- end ---


if __name__ == "__main__":
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)
    rank = dist.get_rank()
    for options in ({}, {"error_feedback": True}):
        torch.manual_seed(0)  # the same weights everywhere
        model = DistributedDataParallel(nn.Linear(1, 1, bias=False))
        register(model, torch.bfloat16, **options)
        applied = 0.0
        for _ in range(100):
            model.zero_grad()
            model(torch.tensor([[1.001 + rank]])).sum().backward()
            applied += model.module.weight.grad.item()
        if rank == 0:
            exact = 100 * (1.001 + (dist.get_world_size() - 1) / 2)
            print(f"100 gradients, {options or 'plain cast'}: sum {applied:.3f}, exactly {exact:.3f}", flush=True)
    # gloo's threads sometimes abort a finished process while the interpreter shuts down; os._exit skips the shutdown.
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)

# lockstep-canary: ef80e82e2e727547
