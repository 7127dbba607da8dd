"""Exercise fsdp_train: train with FSDP2, and resume on a different number of ranks.

Chapter 6, "Train with FSDP2". To see it at work on two ranks:

    torchrun --nproc-per-node=2 exercises/fsdp_train.py
"""

import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import mse_loss


class ShardedTraining:
    """A model whose parameters, gradients and optimizer state are divided among the ranks by `fully_shard`.

        training = ShardedTraining(model, model.layers, mesh, lambda parameters: AdamW(parameters, lr=1e-3))
        loss, norm = training.step(inputs, targets, sum_of_losses, max_norm=1.0)
        training.save("checkpoints/100", 100)

    All ranks call every method together.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Iterable[nn.Module],
        mesh: DeviceMesh,
        make_optimizer: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer],
        *,
        compute_dtype: torch.dtype | None = None,
        reshard_after_forward: bool = True,
    ) -> None:
        """Shard `model` in place and make its optimizer.

        - Each of `layers` is gathered by one all-gather just before it computes. One more, in forward, gathers all other
          parameters; backward may gather these again.
        - A rank keeps its rows of each parameter, and the optimizer keeps state for these rows only.
        - With `compute_dtype`, the whole model is gathered and computes in this dtype. Even then, the outputs of `model`, a
          rank's rows and the sums of the gradients are float32.
        - Modules outside `layers` may share parameters (tied weights). Frozen parameters never change.

        Args:
            model: in float32, the same on all ranks.
            layers: the modules of `model` that are gathered one at a time. May be an iterator.
            mesh: of all ranks. If it has two dimensions, replicate over the first and shard over the second.
            make_optimizer: called with the parameters, returns their optimizer.
            compute_dtype: None for the model's own.
            reshard_after_forward: True to free each layer after forward and gather it again in backward; False to keep
                it until backward, which then gathers none of `layers`.
        """
        raise NotImplementedError("fsdp_train: shard the layers, then the model, and only then make the optimizer")

    def step(
        self,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        sum_of_losses: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        max_norm: float,
    ) -> tuple[float, float]:
        """One step of the optimizer.

        - The loss is the mean over the samples of all ranks. The ranks may have different numbers of samples; some may
          have none.
        - Up to rounding, the parameters are those of one process with the batches of all ranks joined.
        - If the norm of the gradient exceeds `max_norm`, the gradient is scaled down to `max_norm`. The norm is that of
          all ranks' rows together.
        - Gradients don't carry over to the next step.

        Args:
            inputs: this rank's batch, for `model`.
            targets: one for each sample.
            sum_of_losses: called with the outputs and the targets. It returns the sum of the samples' losses, not the mean.
            max_norm: the largest norm of the gradient.
        Returns:
            The loss before the step and the norm before clipping. They are the same on all ranks.
        """
        raise NotImplementedError("fsdp_train: give each sample the same weight, clip by the norm over all ranks, step")

    def save(self, folder: str | Path, step: int) -> None:
        """Write model, optimizer and `step` into `folder` with `torch.distributed.checkpoint`.

        - Every rank writes its own rows. Each element is written only once.
        - It is called after at least one step. (Before the first, torch's `get_state_dict` would let the optimizer count
          a step that never was.)
        """
        raise NotImplementedError("fsdp_train: the state under the names of the parameters, and the step")

    def load(self, folder: str | Path) -> int:
        """Continue as if training had never stopped, even if the number of ranks or the mesh's shape has changed.

        - Load every parameter, the optimizer's state and its options, such as the learning rate. They replace this
          object's, trained or not.

        Returns:
            The `step` that was saved.
        """
        raise NotImplementedError("fsdp_train: each rank reads what it keeps now")


if __name__ == "__main__":
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)
    rank = dist.get_rank()

    def fresh() -> ShardedTraining:
        """The same model everywhere, before any step."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        return ShardedTraining(model, [model[0]], mesh, lambda those: torch.optim.AdamW(those, lr=0.01))

    def step(training: ShardedTraining) -> str:
        """One step with two samples a rank, in words."""
        inputs = torch.linspace(-1, 1, 16).reshape(2, 8) + rank
        loss, norm = training.step(inputs, inputs[:, :1], lambda a, b: mse_loss(a, b, reduction="sum"), max_norm=1.0)
        return f"loss {loss:.6f}, norm {norm:.6f}"

    shared = [tempfile.mkdtemp()]
    dist.broadcast_object_list(shared)
    training = fresh()
    step(training)
    training.save(shared[0], 1)
    print(f"rank {rank}: step 2: {step(training)}", flush=True)
    resumed = fresh()
    after = resumed.load(shared[0])
    print(f"rank {rank}: resumed after step {after}: {step(resumed)}", flush=True)
    # gloo's threads sometimes abort a finished process while the interpreter shuts down; os._exit skips the shutdown.
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)
