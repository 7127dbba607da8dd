"""Chapter 1's network and its training step, with marks for the timeline."""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.ranks import mark


def network(pause: float = 0.0) -> nn.Module:
    """Twelve layers, each with 256 × 256 weights and 256 biases. The weights are the same on every rank. Each layer's
    backward sleeps `pause` seconds, as if it were larger.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(12)])
    for layer in model if pause else ():
        layer.register_forward_hook(_sleeper(pause))
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(_marker(name))
    torch.manual_seed(1 + dist.get_rank())  # from here on each rank draws its own data
    return model


def train_step(model: nn.Module, finish: Callable[[], None] | None = None) -> None:
    """Forward, backward, and then `finish`, if there is one."""
    mark("forward")
    loss = model(torch.randn(256, 256)).square().mean()
    mark("backward")
    loss.backward()
    if finish is not None:
        mark("after backward")
        finish()
    mark("end")


def _marker(name: str) -> Callable[[Tensor], None]:
    """A hook that marks the moment when this parameter's gradient is ready."""

    def hook(parameter: Tensor) -> None:
        mark(f"ready {name}")

    return hook


def _sleeper(pause: float) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
    """A hook on a layer's forward that lets its backward sleep."""

    def hook(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        output.register_hook(lambda gradient: time.sleep(pause))

    return hook
