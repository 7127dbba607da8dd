"""Exercise sharded_linear: FSDP by hand, a linear layer of which each rank keeps only a part.

Chapter 6, "Shard the parameters". To see it at work on two ranks:

    torchrun --nproc-per-node=2 exercises/sharded_linear.py
"""

import os
import sys
from typing import Any  # solution-only

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F  # solution-only


# --- solution-only ---
def gather(rows: torch.Tensor) -> torch.Tensor:
    """The rows of all ranks, one after the other, padding included."""
    whole = rows.new_empty(dist.get_world_size() * len(rows), *rows.shape[1:])
    dist.all_gather(list(whole.split(len(rows))), rows)
    return whole


class GatheredLinear(torch.autograd.Function):
    """A linear layer from this rank's rows, which are gathered in forward and again in backward."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, rows: torch.Tensor, out_features: int) -> torch.Tensor:
        """Gather, compute, and forget the whole weight: it is not saved for backward."""
        ctx.save_for_backward(inputs, rows)
        whole, in_features = gather(rows)[:out_features], inputs.shape[-1]
        return F.linear(inputs, whole[:, :in_features], whole[:, -1] if rows.shape[1] > in_features else None)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor, None]:
        """Gather again for the inputs' gradient, then reduce-scatter the rows'."""
        (gradient,) = gradients
        inputs, rows = ctx.saved_tensors
        whole, out_features = gather(rows), gradient.shape[-1]
        of_inputs = gradient @ whole[:out_features, : inputs.shape[-1]] if ctx.needs_input_grad[0] else None

        # The space of the gathered rows is free now. The gradient of the padding is zero.
        whole.zero_()
        each_output = gradient.reshape(-1, out_features)
        whole[:out_features, : inputs.shape[-1]] = each_output.T @ inputs.reshape(-1, inputs.shape[-1])
        if rows.shape[1] > inputs.shape[-1]:
            whole[:out_features, -1] = each_output.sum(0)
        of_rows = torch.empty_like(rows)
        dist.reduce_scatter(of_rows, list(whole.split(len(rows))))
        return of_inputs, of_rows / dist.get_world_size(), None


# --- end ---


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
        # --- solution: copy the rows of this rank ---
        super().__init__()
        self.out_features, self.has_bias = linear.out_features, linear.bias is not None
        with torch.no_grad():
            # The bias as one more column, so that one collective moves both.
            whole = torch.cat([linear.weight, linear.bias[:, None]], dim=1) if self.has_bias else linear.weight
            each = -(-self.out_features // dist.get_world_size())
            own = whole[each * dist.get_rank() :][:each]
            # `pad` makes a copy, unless there is nothing to pad. A slice would keep the whole weight in memory.
            self.rows = nn.Parameter(F.pad(own, (0, 0, 0, each - len(own))).clone())
        # --- end ---

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
        # --- solution: gather, compute, and have backward gather again ---
        output: torch.Tensor = GatheredLinear.apply(inputs, self.rows, self.out_features)
        return output
        # --- end ---

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """The whole layer on every rank, for saving: what `linear.state_dict()` holds, "weight" and, if any, "bias"."""
        # --- solution: gather, and take the padding off ---
        whole = gather(self.rows)[: self.out_features]
        return {"weight": whole[:, :-1], "bias": whole[:, -1]} if self.has_bias else {"weight": whole}
        # --- end ---


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

# lockstep-canary: 1e928760f6d66402
