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


# --- solution-only ---
class Bucket:
    """Some gradients that travel together: copied side by side, with one flag each that says whether it is there."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.ready: set[nn.Parameter] = set()
        length = sum(parameter.numel() for parameter in parameters)
        like = parameters[0]
        self.flat = torch.zeros(length + len(parameters), dtype=like.dtype, device=like.device)
        *pieces, self.flags = self.flat.split([*(parameter.numel() for parameter in parameters), len(parameters)])
        self.pieces = [piece.view_as(parameter) for piece, parameter in zip(pieces, parameters, strict=True)]
        self.work: dist.Work | None = None

    @torch.no_grad()
    def launch(self) -> None:
        """Fill in the shares of the mean and start the sum, without waiting for it."""
        world_size = dist.get_world_size()
        for index, (parameter, piece) in enumerate(zip(self.parameters, self.pieces, strict=True)):
            self.flags[index] = parameter.grad is not None
            if parameter.grad is None:
                piece.zero_()
            else:
                torch.mul(parameter.grad, 1 / world_size, out=piece)  # before the sum, which could overflow
        self.work = dist.all_reduce(self.flat, async_op=True)

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for the sum, bring it into the gradients, and be ready for the next backward."""
        assert self.work is not None
        self.work.wait()
        present = self.flags.tolist()
        for parameter, piece, count in zip(self.parameters, self.pieces, present, strict=True):
            if count and parameter.grad is None:
                parameter.grad = piece.clone()
            elif count:
                parameter.grad.copy_(piece)
        self.work = None
        self.ready.clear()


def make_buckets(parameters: list[nn.Parameter], cap: int) -> list[Bucket]:
    """Fill buckets of at most `cap` bytes, and of one type and device each, in the order given."""
    buckets: list[Bucket] = []
    current: list[nn.Parameter] = []
    held = 0
    for parameter in parameters:
        nbytes = parameter.numel() * parameter.element_size()
        alike = not current or (parameter.dtype, parameter.device) == (current[0].dtype, current[0].device)
        if current and (held + nbytes > cap or not alike):
            buckets.append(Bucket(current))
            current, held = [], 0
        current.append(parameter)
        held += nbytes
    return [*buckets, Bucket(current)] if current else buckets


# --- end ---


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
        # --- solution: broadcast, make the buckets, register the hooks ---
        super().__init__()
        self.module = module
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.detach(), src=0)

        self._synchronize = True
        self._launched = 0  # so many buckets, from the front of the list
        trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._buckets = make_buckets(trainable[::-1], int(bucket_cap_mb * 2**20))
        self._bucket_of = {parameter: bucket for bucket in self._buckets for parameter in bucket.parameters}
        for parameter in trainable:
            parameter.register_post_accumulate_grad_hook(self._gradient_is_ready)
        # --- end ---

    # --- solution-only ---
    def _gradient_is_ready(self, parameter: nn.Parameter) -> None:
        """The hook: backward calls it for each parameter, as soon as its gradient is complete."""
        if not self._synchronize:
            return
        bucket = self._bucket_of[parameter]
        bucket.ready.add(parameter)
        # In order: a bucket that is complete waits for those before it. Which one is complete first can differ between
        # ranks, and the n-th all-reduce of one rank meets the n-th of the others.
        while self._launched < len(self._buckets):
            upcoming = self._buckets[self._launched]
            if len(upcoming.ready) < len(upcoming.parameters):
                break
            upcoming.launch()
            self._launched += 1

    # --- end ---

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns for these arguments."""
        # --- solution: call the module ---
        return self.module(*args, **kwargs)
        # --- end ---

    def finish_gradient_synchronization(self) -> None:
        """Wait until every gradient is the mean. Every rank calls it, after each backward outside of `no_sync()`.

        Launch the buckets that this backward left incomplete because a parameter isn't part of the loss.
        """
        # --- solution: launch what is left, wait for all of it ---
        for bucket in self._buckets[self._launched :]:
            bucket.launch()
        for bucket in self._buckets:
            bucket.finish()
        self._launched = 0
        # --- end ---

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside it, backward adds to the gradients and exchanges nothing, even if forward ran outside (in DDP, forward
        decides).

        The next backward outside exchanges the sums, even if an exception ended the block. Blocks aren't nested.
        """
        # --- solution: exchange nothing in here ---
        before, self._synchronize = self._synchronize, False
        try:
            yield
        finally:
            self._synchronize = before
        # --- end ---

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's state_dict for these arguments, without a `module.` prefix: it can be loaded with or without MiniDDP."""
        # --- solution: return the state of the plain module ---
        return self.module.state_dict(*args, **kwargs)
        # --- end ---

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load a state_dict that MiniDDP or the plain module returned. All arguments reach the module's method."""
        # --- solution: load into the module ---
        return self.module.load_state_dict(*args, **kwargs)
        # --- end ---


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

# lockstep-canary: 745b58abb92885c3
