"""On the ranks: `average_gradients` is given a model whose gradients were chosen. Nothing is judged here."""

from __future__ import annotations

import os

import torch
from torch import nn

from lockstep.grading.on_rank import join, observe, rank


class Branches(nn.Module):
    """A model that is made to break what does not think of it.

    `decoder` shares its weight with `encoder`; `frozen` takes no gradient; `scale` has no dimension; `left` and `right`
    stand for branches that not every batch goes through, and have a parameter without elements.
    """

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Embedding(7, 5)
        self.frozen = nn.Parameter(torch.ones(4, 5), requires_grad=False)
        self.decoder = nn.Linear(5, 7, bias=False)
        self.decoder.weight = self.encoder.weight
        self.left = nn.Linear(5, 3)
        self.right = nn.Linear(5, 3)
        for branch in (self.left, self.right):
            branch.spare = nn.Parameter(torch.empty(0, 5))
        self.scale = nn.Parameter(torch.ones(()))


def averages(
    submission,
    gradients: dict[str, torch.Tensor],
    freeze: list[str],
    dtype: str,
    doubles: list[str],
    earlier: list[str],
    thawed: list[str],
    variables: dict[str, str],
    training: bool,
) -> None:
    """Call it once. `gradients[name]` is what this rank has, and no other knows; what is not in there is None.

    The parameters in `freeze` have been frozen since. The model and its gradients are of type `dtype`, those in `doubles`
    of float64. With `earlier` there is a call before that, in which every rank has gradients for these, and those in
    `thawed` are frozen.
    """
    device = join()
    os.environ.update(variables)
    observe("held", sorted(gradients))
    torch.manual_seed(rank())  # other weights on every rank: they are none of this function's business
    model = Branches().to(device, getattr(torch, dtype)).train(training)
    if dtype == "float64":  # stored by columns, as a channels_last layer's weight is: so is its gradient
        for layer in (model.left, model.right):
            layer.weight.data = layer.weight.data.t().contiguous().t()
    for name in doubles:
        model.get_parameter(name).data = model.get_parameter(name).data.double()
    if earlier:
        for name in earlier:
            model.get_parameter(name).grad = torch.ones_like(model.get_parameter(name))
        for name in thawed:
            model.get_parameter(name).requires_grad = False
        submission.average_gradients(model)
        for name in thawed:
            model.get_parameter(name).requires_grad = True
        observe("again", True)
    for name, parameter in model.named_parameters():
        own = gradients.get(name)
        parameter.grad = None if own is None else torch.empty_like(parameter).copy_(own).detach()
        if name in freeze:
            parameter.requires_grad = False
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    submission.average_gradients(model)
    after = dict(model.named_parameters())
    observe("gradients", {name: p.grad.detach().clone() for name, p in after.items() if p.grad is not None})
    observe("changed", [name for name, old in before.items() if not torch.equal(old, after[name].detach())])
