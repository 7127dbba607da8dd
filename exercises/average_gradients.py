"""Exercise average_gradients: do by hand, after backward, what DDP does for you during it.

Chapter 1, "The mean". To see it at work on two ranks:

    torchrun --nproc-per-node=2 exercises/average_gradients.py
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn


def average_gradients(model: nn.Module) -> None:
    """Replace the gradient of every parameter by its mean over all ranks. Every rank calls it after backward.

    The process group already exists. The mean is over all ranks of the group, whatever WORLD_SIZE says. Divide before or
    after you add. If a rank's batch didn't use a parameter, the rank has no gradient for it. It contributes zeros and
    receives the mean like every other rank. Afterwards all ranks hold the same gradients, so all optimizers take the
    same step. Keep nothing between calls: the next batch may use other parameters. Train or eval mode doesn't matter.

    - If *no* rank has a gradient for a parameter, it keeps None. (With zeros, momentum and weight decay would still move
      it.)
    - A frozen parameter (`requires_grad` is False) is left alone, even if its `grad` holds something.
    - A parameter used in two places (tied weights) is averaged once.
    - Every rank calls the same collectives in the same order, whatever its own gradients are.
    - A single rank works too; its gradients don't change.

    Args:
        model: the same model on every rank, with this rank's own gradients in `parameter.grad`.
    """
    raise NotImplementedError("average_gradients: average the gradients over all ranks")


if __name__ == "__main__":
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)
    rank = dist.get_rank()
    torch.manual_seed(0)  # the same weights everywhere
    model = nn.Linear(3, 1, bias=False)
    model(torch.full((1, 3), float(rank + 1))).sum().backward()
    print(f"rank {rank} before: {model.weight.grad.tolist()}", flush=True)
    average_gradients(model)
    print(f"rank {rank} after:  {model.weight.grad.tolist()}", flush=True)
    # gloo's threads sometimes abort a finished process while the interpreter shuts down; os._exit skips the shutdown.
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)
