"""Exercise sharded_linear: FSDP by hand, a linear layer of which each rank keeps only a part.

Chapter 6, "Shard the parameters". To see it at work on two ranks:

    torchrun --nproc-per-node=2 exercises/sharded_linear.py
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn


class ShardedLinear(nn.Module):
    """A linear layer whose weight and bias are divided: each rank keeps only some rows.

        layer = ShardedLinear(nn.Linear(512, 256))
        optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3)
        loss_of(layer(inputs), targets).backward()
        optimizer.step()

    Every rank passes the same `linear`. All ranks call the layer and backward together, each with its own inputs. The
    optimizer on each rank updates that rank's rows. Training gives the same weights as DDP.

    Use a `torch.autograd.Function` to choose what forward saves and what backward computes. Autograd alone would save the
    gathered weight.
    """

    def __init__(self, linear: nn.Linear) -> None:
        """Keep this rank's rows of `linear`.

        - On N ranks, each rank keeps at most 1/N of the rows, rounded up, and nothing else of `linear`. Padding counts as rows.
        - The rows are in `parameters()`, in the dtype of `linear`.
        - N need not divide the number of rows. With fewer rows than ranks, some ranks keep no rows, or only padding.

        Args:
            linear: the layer, with or without a bias, the same on all ranks.
        """
        raise NotImplementedError("sharded_linear: copy the rows of this rank")

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """What `linear` would return for this rank's inputs, in the same dtype.

        - Forward all-gathers the whole weight once, and backward once more; if the inputs require no gradient, backward may
          leave this out. Weight and bias travel together, in their own dtype.
        - Backward averages the gradient over the ranks with one reduce-scatter, in the same dtype, or in float32 if that is
          wider. The backward of a second forward adds to this gradient.
        - No rank holds the whole weight after forward, nor the weight or its whole gradient after backward.
        - Inputs get the gradient of their own rank's loss. If they don't require a gradient, it's not computed.
        - It also works under `torch.no_grad()` and after `eval()`.

        Args:
            inputs: of shape (*, in_features). They and the output's gradient may be non-contiguous. The ranks' numbers of
                inputs may differ. Either all ranks' inputs require a gradient, or none do.
        Returns:
            A tensor of shape (*, out_features).
        """
        raise NotImplementedError("sharded_linear: gather, compute, and have backward gather again")

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """The whole layer on every rank, for saving: what `linear.state_dict()` holds, "weight" and, if any, "bias"."""
        raise NotImplementedError("sharded_linear: gather, and take the padding off")


if __name__ == "__main__":
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)
    rank = dist.get_rank()

    torch.manual_seed(0)  # the same weights everywhere
    layer = ShardedLinear(nn.Linear(64, 11))
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.01)
    for _ in range(3):
        layer(torch.full((2, 64), float(rank))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    kept = sum(parameter.nbytes for parameter in layer.parameters())
    total = sum(tensor.double().sum().item() for tensor in layer.full_state_dict().values())
    print(f"rank {rank}: {kept} bytes of {11 * 65 * 4}, sum of all weights {total:.9f}", flush=True)
    # gloo's threads sometimes abort a finished process while the interpreter shuts down; os._exit skips the shutdown.
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)
