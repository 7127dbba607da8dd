"""Exercise compress_gradients: half the bytes on the wire, by a communication hook of DDP.

Chapter 4, "Compression". To see it at work on two ranks:

    torchrun --nproc-per-node=2 exercises/compress_gradients.py

It works with any model in DDP, on gloo and on nccl, and is made to be taken along. torch's own `bf16_compress_hook`
refuses to run without nccl, and both of its hooks cast before they divide.
"""

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel


def compress_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Start the all-reduce of one bucket in the smaller type, and return at once.

    DDP calls this inside backward, whenever all gradients of a bucket are ready, and in the same order on all ranks.
    In place of DDP's own all-reduce there is then this one: nothing has been divided yet, and nothing is added here.
    The names of the two arguments are DDP's, and so are their annotations, where there are any.

    Args:
        state: what `register` has given to DDP.
        bucket: `bucket.buffer()` is a flat float32 tensor with the bucket's gradients of this rank;
            `bucket.gradients()` are views into it and `bucket.parameters()` their parameters, in the same order.

    Returns:
        A future of one tensor of the buffer's size: the mean over the ranks. DDP copies it into the gradients.
    """
    raise NotImplementedError("compress_gradients: start the all-reduce of a compressed bucket")


def register(
    ddp_model: DistributedDataParallel, dtype: torch.dtype = torch.float16, error_feedback: bool = False
) -> None:
    """Have the gradients of this model cross the wire in a smaller type. Called once, before the first backward.

    Afterwards backward leaves in every gradient the mean over the ranks of `ddp_model.process_group`, in float32, equal
    on all of them to the last bit, and right but for the rounding of `dtype`.

    - A step has as many collectives as without the hook: one all-reduce for each bucket, of half the bytes.
    - Backward does not wait for them: the next bucket's gradients are computed while this one travels.
    - Each rank divides before it casts, so that no sum is larger than the largest gradient. What `dtype` still cannot
      hold comes out infinite or NaN, where a gradient scaler looks for it.
    - With `error_feedback`, what the cast loses of a rank's gradient is added to that gradient in the next step,
      parameter by parameter, also across the first step, after which DDP rebuilds its buckets. So over many steps the
      casts lose no more than over one. What an infinite gradient or NaN would leave is dropped.
    - Several models in one process have nothing to do with each other.

    Args:
        ddp_model: the wrapped model; its parameters are float32.
        dtype: torch.float16 (11 bits of precision, up to 65504) or torch.bfloat16 (8 bits, the range of float32).
        error_feedback: whether the residuals of the casts are kept and sent later.
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
    # gloo's threads now and then abort a finished process while the interpreter shuts down: leave without that.
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)
