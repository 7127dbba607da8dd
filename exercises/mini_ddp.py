"""Exercise mini_ddp: your own DistributedDataParallel.

Chapter 1, "Build it yourself". To see it at work on two ranks:

    torchrun --nproc-per-node=2 exercises/mini_ddp.py
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn


class MiniDDP(nn.Module):
    """A module whose gradients are the mean over all ranks, exchanged while backward is still computing.

        ddp = MiniDDP(model)
        loss_function(ddp(inputs), targets).backward()
        ddp.finish_gradient_synchronization()
        optimizer.step()

    The constructor copies rank 0's parameters (frozen ones too) and buffers (also those that state_dict leaves out) to
    all ranks. It puts the trainable parameters into buckets, the last parameters first, because backward starts with
    them. A hook on each parameter (`register_post_accumulate_grad_hook`) runs when its gradient is ready. When all
    gradients of a bucket are ready, the hook launches the bucket's all-reduce and doesn't wait for it. All ranks launch
    their buckets in the same order, whichever is complete first.

    A rank without a gradient for a parameter contributes zeros and receives the mean; a parameter that has no gradient
    on any rank keeps None. Each gradient is divided by the world size before the sum, as in DDP.

    If you want more: make `parameter.grad` a view into its bucket (DDP's `gradient_as_bucket_view`). Then each gradient
    is stored once, and none is copied into a bucket or out of it. But `zero_grad(set_to_none=True)` removes the
    views.
    """

    def __init__(self, module: nn.Module, bucket_cap_mb: float = 25) -> None:
        """Wrap a module. Every rank of the process group calls it, with a module of the same shape.

        Args:
            module: the model, already on its device and in its final dtype; all its tensors are contiguous. Keep
                it as `self.module`.
            bucket_cap_mb: the most MiB (2**20 bytes) of gradients that a bucket holds. A parameter that no longer fits
                starts the next bucket. A larger parameter gets its own bucket.
        """
        raise NotImplementedError("mini_ddp: broadcast, make the buckets, register the hooks")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns for these arguments."""
        raise NotImplementedError("mini_ddp: call the module")

    def finish_gradient_synchronization(self) -> None:
        """Wait until every gradient is the mean. Every rank calls it, after each backward outside of `no_sync()`.

        Launch the buckets that this backward left incomplete because a parameter isn't part of the loss.
        """
        raise NotImplementedError("mini_ddp: launch what is left, wait for all of it")

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside it, backward adds to the gradients and exchanges nothing, even if forward ran outside (in DDP, forward
        decides).

        The next backward outside exchanges the sums, even if an exception ended the block. Blocks aren't nested.
        """
        raise NotImplementedError("mini_ddp: exchange nothing in here")

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's state_dict for these arguments, without a `module.` prefix: it can be loaded with or without MiniDDP."""
        raise NotImplementedError("mini_ddp: return the state of the plain module")

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load a state_dict that MiniDDP or the plain module returned. All arguments reach the module's method."""
        raise NotImplementedError("mini_ddp: load into the module")


if __name__ == "__main__":
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)
    rank = dist.get_rank()
    torch.manual_seed(rank)  # different weights on every rank, until MiniDDP makes them equal
    model = MiniDDP(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for step in range(3):
        optimizer.zero_grad()
        inputs = torch.randn(4, 8)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        model.finish_gradient_synchronization()
        optimizer.step()
        total = sum(parameter.sum().item() for parameter in model.parameters())
        print(f"step {step}, rank {rank}: loss {loss.item():.4f}, sum of all parameters {total:.6f}", flush=True)
    # gloo's threads sometimes abort a finished process while the interpreter shuts down; os._exit skips the shutdown.
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)
