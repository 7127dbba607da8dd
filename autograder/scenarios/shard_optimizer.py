"""On the ranks: `ShardedOptimizer` is given parameters and gradients that were drawn. Nothing is judged here."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lockstep.grading.on_rank import join, mark, observe


def steps(
    submission,
    parameters: list[torch.Tensor],
    gradients: list[list[torch.Tensor | None]],
    optimizer: str,
    groups: list[list[int]],
    options: list[dict[str, Any]],
    changes: list[list[dict[str, Any]]],
    **defaults: Any,
) -> None:
    """Some steps. `gradients[step]` has one for each parameter, the same on all ranks, as DDP leaves them.

    A parameter is frozen until it has a gradient, as in a model whose layers are thawed one after the other.
    `groups` are the parameters' numbers by group, with the groups' own `options`; without any, the parameters are given as
    `Module.parameters()` gives them. `changes[step]` is what a schedule sets before that step, for each group.
    """
    device = join()
    made: list[torch.optim.Optimizer] = []
    kept = [0] * (len(parameters) + 1)

    class Kept(getattr(torch.optim, optimizer)):
        """The optimizer that was asked for, which can be found again."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.append(self)
            self.register_step_post_hook(lambda *_: note())  # before the submission can drop any of it

    def note() -> None:
        kept[:] = map(max, kept, state_of(made, own))

    own = [nn.Parameter(tensor.clone().to(device)) for tensor in parameters]
    for parameter, first in zip(own, gradients[0], strict=True):
        parameter.requires_grad_(first is not None)
    given = [{"params": [own[n] for n in group], **more} for group, more in zip(groups, options, strict=True)]
    sharded = submission.ShardedOptimizer(given or (one for one in own), Kept, **defaults)
    observe("rates", [group.get("lr") for group in sharded.param_groups])
    after, left = [], []
    for step, drawn in enumerate(gradients):
        for parameter, gradient in zip(own, drawn, strict=True):
            if gradient is not None:
                parameter.requires_grad_()
                parameter.grad = gradient.clone().to(device)
        if changes:
            for group, change in zip(sharded.param_groups, changes[step], strict=False):  # their number is observed
                group.update(change)
        mark("step")
        sharded.step()
        mark("end")
        after.append([parameter.detach().clone() for parameter in own])
        sharded.zero_grad()
        left.append([number for number, parameter in enumerate(own) if parameter.grad is not None])
        for parameter in own:
            parameter.grad = None  # what was left must not reach the next step
    observe("parameters", after)
    observe("gradients left", left)
    note()
    observe("state", kept)
    observe("optimizers", len(made))


def state_of(made: list[torch.optim.Optimizer], parameters: list[nn.Parameter]) -> list[int]:
    """The bytes of state that this rank has for each parameter, and last, for tensors that are none of them."""
    number = {parameter: index for index, parameter in enumerate(parameters)}
    found = [0] * (len(parameters) + 1)
    for optimizer in made:
        for parameter, state in optimizer.state.items():
            found[number.get(parameter, -1)] += sum(one.nbytes for one in state.values() if torch.is_tensor(one))
    return found
