"""Exercise shard_optimizer: ZeRO stage 1, an optimizer whose state is divided over the ranks.

Chapter 6, "Shard the optimizer". To see it at work on two ranks:

    torchrun --nproc-per-node=2 exercises/shard_optimizer.py
"""

import os
import sys
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn


class ShardedOptimizer:
    """An optimizer whose state is divided: each rank keeps only a part.

        optimizer = ShardedOptimizer(ddp_model.parameters(), torch.optim.AdamW, lr=1e-3)
        loss_of(ddp_model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    Every rank passes the same parameters in the same order. All ranks call its methods together.
    After backward, DDP has left the same gradients on all ranks, so each rank can update its own part.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        optimizer_class: type[torch.optim.Optimizer],
        **defaults: Any,
    ) -> None:
        """Choose an owner for each parameter, and make an `optimizer_class` for the parameters that this rank owns.

        - Each parameter has exactly one owner, and only the owner has state for it.
        - An owner has the whole parameter: optimizers such as Adafactor and Muon look at all of it.
        - The parts are balanced: none has more elements than an even share plus the largest parameter.
        - With fewer parameters than ranks, some ranks own nothing.

        Args:
            params: contiguous parameters of one dtype, or groups of them: dictionaries with a list in `params`. Each
                group keeps its own options.
            optimizer_class: a class of `torch.optim`.
            defaults: its options, such as `lr`.
        """
        raise NotImplementedError("shard_optimizer: choose the owners, make an optimizer for this rank's part")

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The options of each group, on every rank, in the order given. A step uses what was set here, such as `lr`."""
        raise NotImplementedError("shard_optimizer: return the groups")

    @torch.no_grad()
    def step(self) -> None:
        """Update the parameters. Afterwards they are the same on all ranks, bit for bit.

        - They get the values that one `optimizer_class` for all parameters would give them.
        - A parameter whose gradient is None stays as it is.
        - Each parameter is sent at most once, by its owner. Neither gradients nor state are sent.
        """
        raise NotImplementedError("shard_optimizer: update this rank's part, then receive the others")

    def zero_grad(self) -> None:
        """Set the gradients of all parameters to None, those of other ranks' parameters too."""
        raise NotImplementedError("shard_optimizer: forget every gradient")


if __name__ == "__main__":
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)
    rank = dist.get_rank()
    made: list[torch.optim.Optimizer] = []

    class Counted(torch.optim.AdamW):
        """An AdamW that adds itself to `made`."""

        def __init__(self, *args: Any, **options: Any) -> None:
            """As AdamW."""
            super().__init__(*args, **options)
            made.append(self)

    torch.manual_seed(0)  # the same weights everywhere
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 10)))
    optimizer = ShardedOptimizer(model.parameters(), Counted, lr=0.01)
    for _ in range(3):
        model(torch.full((1, 64), float(rank))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    kept = sum(tensor.nbytes for one in made for state in one.state.values() for tensor in state.values())
    total = sum(parameter.double().sum().item() for parameter in model.parameters())
    print(f"rank {rank}: {kept} bytes of state, sum of all parameters {total:.9f}", flush=True)
    # gloo's threads sometimes abort a finished process while the interpreter shuts down; os._exit skips the shutdown.
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)
