"""Exercise mini_ddp: DistributedDataParallel itself, in a hundred lines.

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
    """A module whose gradients are the mean over all ranks, exchanged while backward still computes.

        ddp = MiniDDP(model)
        loss_function(ddp(inputs), targets).backward()
        ddp.finish_gradient_synchronization()
        optimizer.step()

    At construction rank 0's parameters (frozen ones too) and buffers (also those that state_dict leaves out) come to all
    ranks. The trainable parameters are put into buckets, the last ones first, because backward begins with them. A hook
    on each parameter (`register_post_accumulate_grad_hook`) sees its gradient arrive; when all of a bucket's are there,
    the bucket's all-reduce is launched and not waited for. All ranks launch their buckets in the same order, whichever
    are complete first.

    A parameter without a gradient on some ranks counts as zero there and gets the mean; one without a gradient on all
    ranks keeps None. Each gradient is divided by the world size before the sum, as DDP does it.

    Whoever wants more: let `parameter.grad` be a view into its bucket (DDP's `gradient_as_bucket_view`). It saves both
    copies and one gradient's memory; `zero_grad(set_to_none=True)` then takes the views away.
    """

    def __init__(self, module: nn.Module, bucket_cap_mb: float = 25) -> None:
        """Wrap a module. Called on all ranks, within a process group, with modules of the same shape.

        Args:
            module: the model, already on its device, of its final type. It is reachable as `self.module`.
            bucket_cap_mb: how many MiB (2**20 bytes) of gradients a bucket holds at most. A parameter larger than that
                has a bucket by itself.
        """
        raise NotImplementedError("mini_ddp: broadcast, make the buckets, register the hooks")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns for these arguments."""
        raise NotImplementedError("mini_ddp: call the module")

    def finish_gradient_synchronization(self) -> None:
        """Wait until every gradient is the mean. Called on all ranks, after each backward that is not in `no_sync()`.

        Buckets that this backward did not complete, because a parameter took no part in the loss, are launched here.
        """
        raise NotImplementedError("mini_ddp: launch what is left, wait for all of it")

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, backward adds to the gradients and exchanges nothing. The next one outside exchanges the sums."""
        raise NotImplementedError("mini_ddp: exchange nothing in here")

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own, without `module.` before its keys: it can be loaded with or without MiniDDP."""
        raise NotImplementedError("mini_ddp: return the state of the plain module")

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load what `state_dict` returned, here or from the plain module."""
        raise NotImplementedError("mini_ddp: load into the module")


if __name__ == "__main__":
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)
    rank = dist.get_rank()
    torch.manual_seed(rank)  # other weights on every rank, until MiniDDP makes them alike
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
    # gloo's threads now and then abort a finished process while the interpreter shuts down: leave without that.
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)
