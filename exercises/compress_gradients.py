"""Exercise compress_gradients: halve the bytes on the wire with a DDP communication hook.

Chapter 4, "Compression". To see it at work on two ranks:

    torchrun --nproc-per-node=2 exercises/compress_gradients.py

It works with any model in DDP, on gloo and on nccl. Take it to your own projects. torch's own `bf16_compress_hook`
refuses to run without nccl, and both it and `fp16_compress_hook` cast before they divide.
"""

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel


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
    raise NotImplementedError("compress_gradients: start the all-reduce of a compressed bucket")


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
    raise NotImplementedError("compress_gradients: register the hook with its state")


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
