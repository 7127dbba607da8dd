"""Exercise accumulate: one optimizer step from many micro-batches, with one synchronization.

Chapter 4, "Accumulation". To see it at work on two ranks:

    torchrun --nproc-per-node=2 exercises/accumulate.py
"""

import os
import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def train_step(
    ddp_model: DDP,
    micro_batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
    loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    optimizer: torch.optim.Optimizer,
) -> float:
    """Take one optimizer step from all micro-batches of all ranks. Every rank calls it with its own data.

    It is the step that a single process would take with all these samples in one large batch: every sample has the same
    weight, whichever rank holds it. Micro-batches may differ in size (the last is often smaller), and ranks may hold
    different numbers of micro-batches and samples. DDP's mean gives every *rank* the same weight; correct for that.

    - The gradients cross the network once per step, however many micro-batches there are. Collectives to which a rank
      contributes up to 64 bytes, such as a sample count, are exempt. Every rank calls the same number of them, whatever
      data it holds, before its first forward or after its last: DDP calls collectives in a forward, too.
    - Run forward and backward for one micro-batch at a time, so that only one micro-batch's activations are in memory.
    - Ignore whatever the parameters' `grad` holds before the call.

    Args:
        ddp_model: a model in DDP, in the default process group, the same on every rank. A parameter may be frozen
            (`requires_grad` is False and `grad` is None), or shared by two layers. Each micro-batch uses every parameter
            that isn't frozen.
        micro_batches: pairs (x, y) on the model's device with at least one sample each; the first dimension of both
            counts samples. Any iterable works, including one that has no length and can be read only once, such as
            `itertools.islice(loader, 8)`.
        loss_fn: takes the model's output and y, returns the *mean* over their samples as a scalar tensor.
        optimizer: holds the model's parameters.

    Returns:
        The loss before the step as a plain float: the mean over all samples of all ranks, the same on every rank.

    Raises:
        ValueError: `micro_batches` is empty. If so, it is empty on every rank. The parameters don't change.
    """
    raise NotImplementedError("accumulate: one step from many micro-batches, with one synchronization")


if __name__ == "__main__":
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)
    rank = dist.get_rank()
    torch.manual_seed(0)  # the same weights everywhere
    model = DDP(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + rank)  # different data on every rank
    data = torch.randn(10 - 3 * (rank % 2), 3)  # rank 0 has 10 samples, rank 1 has 7
    for step in range(5):
        micro_batches = [(x, x.sum(dim=1, keepdim=True)) for x in data.split(4)]
        loss = train_step(model, micro_batches, F.mse_loss, optimizer)
        print(f"rank {rank} step {step}: {len(micro_batches)} micro-batches, loss {loss:.4f}", flush=True)
    # gloo's threads sometimes abort a finished process while the interpreter shuts down; os._exit skips the shutdown.
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)
