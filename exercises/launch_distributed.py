"""Exercise launch_distributed: start the ranks from Python, and bring the trained weights back.

Chapter 2, "Launching from Python". To see it start two ranks:

    python exercises/launch_distributed.py
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from torch.utils.data import TensorDataset
from train_ddp import train_ddp


def launch_distributed(
    world_size: int, model_class: Callable[[], nn.Module], data: TensorDataset, epochs: int
) -> dict[str, torch.Tensor]:
    """Run `train_ddp(rank, world_size, model_class, data, epochs)` in `world_size` new processes on this machine.

    On each rank `train_ddp` needs MASTER_ADDR and MASTER_PORT, reads the other variables of torchrun where they are set,
    and returns the trained model.

    The call waits for all of them and leaves nothing behind: no processes, no files that your code wrote, no environment
    variables. It uses a free port, so several programs can launch at the same time (a port that you found free just
    before is good enough).

    Args:
        world_size: the number of ranks, at least 1.
        model_class: as for train_ddp. The new processes import it, so it must be defined at the top level of a module.
        data: as for train_ddp.
        epochs: as for train_ddp.

    Returns:
        The trained model's state_dict: CPU tensors under their names in the model, without a "module." prefix.

    Raises:
        ValueError: world_size is less than 1.
        RuntimeError (or another exception): a rank failed. Its message contains the error of the rank that failed first
            (you may assume that pickle can carry this error). It is raised soon after the failure, not only when the
            other ranks time out.
    """
    raise NotImplementedError("launch_distributed: start the ranks, wait for them, return the weights")


class SmallNet(nn.Module):
    """64 pixels in, 10 classes out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.layers(pixels)


def digits() -> TensorDataset:
    """1797 handwritten digits: pixels (1797, 64) between 0 and 1, classes (1797,)."""
    from sklearn.datasets import load_digits

    pixels, classes = load_digits(return_X_y=True)
    return TensorDataset(torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(classes))


if __name__ == "__main__":
    pixels, classes = digits().tensors
    weights = launch_distributed(2, SmallNet, TensorDataset(pixels[:1500], classes[:1500]), epochs=20)
    model = SmallNet()
    model.load_state_dict(weights)
    right = (model(pixels[1500:]).argmax(dim=1) == classes[1500:]).float().mean().item()
    print(f"right on {right:.1%} of the digits that it had not seen")
