"""On the ranks: `find_divergence` is given models that are equal but for what was changed on one rank or another.

Nothing is judged here. What is changed, where and by how much, comes from the check.
"""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.grading.on_rank import join, mark, observe, rank


class Zoo(nn.Module):
    """One of everything that breaks a comparison.

    Half precision, no dimension, no element, a frozen and an unused parameter, tied weights; buffers of integers, small
    ones and such that no float can hold, of bools, with NaN and infinity, one of zeros, and (`build`) one of complex numbers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3)
        self.brief = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
        self.scale = nn.Parameter(torch.ones(()))
        self.empty = nn.Parameter(torch.ones(0, 3))
        self.frozen = nn.Parameter(torch.ones(6), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(2))
        self.decoder = nn.Linear(3, 4, bias=False)
        self.tied = nn.Linear(3, 4, bias=False)
        self.tied.weight = self.decoder.weight
        self.register_buffer("ids", torch.arange(5) + (1 << 60))
        self.register_buffer("places", torch.arange(5))
        self.register_buffer("codes", torch.full((3,), -100, dtype=torch.int8))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("odd", torch.tensor([float("nan"), float("inf"), 1.0]))
        self.register_buffer("zeros", torch.zeros(4))
        self.register_buffer("precise", torch.ones(3, dtype=torch.float64), persistent=False)


PLANE = "plane"  # a buffer of complex numbers, which gloo can't broadcast: the model that DDP wraps has none


def build(seed: int, *, wrapped: bool = False) -> tuple[Zoo, torch.optim.Optimizer]:
    """The same model, gradients and optimizer on every rank, after one step; random numbers of its own from here on."""
    device = join()
    torch.manual_seed(seed)
    model = Zoo()
    if not wrapped:
        model.register_buffer(PLANE, torch.ones(3, dtype=torch.complex64), persistent=False)
    with torch.no_grad():
        model.norm.running_mean.copy_(torch.randn(3))
    model = model.to(device)
    foreign = nn.Parameter(torch.ones(3, device=device))  # the optimizer has it, the model has not
    *most, last = (p for p in model.parameters() if p.requires_grad)
    optimizer = torch.optim.AdamW([{"params": most}, {"params": [last, foreign]}], lr=0.01)
    foreign.grad = torch.ones_like(foreign)
    model.frozen.grad = torch.randn(6).to(device)  # from the time before it was frozen
    for _ in range(2):
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and name != "unused":
                parameter.grad = torch.randn(parameter.shape).to(parameter)
        if not optimizer.state:
            optimizer.step()
    optimizer.state[model.scale].update(turns=7.0, count=1 << 24)  # numbers, as optimizers of one's own have them
    with torch.no_grad():
        model.brief.fill_(1.0)
        for weight in (model.encoder.weight, model.decoder.weight):
            # all different; their sum, and that of their squares, is exact in float32 in any order
            weight.copy_((torch.randperm(1024)[: weight.numel()].view_as(weight) - 512) / 2048)
    torch.manual_seed(seed + 1 + rank())
    return model, optimizer


def change(model: nn.Module, optimizer: torch.optim.Optimizer, what: dict[str, Any]) -> None:
    """Make one change on this rank."""
    parameters = dict(model.named_parameters())
    name = what.get("name", "")
    if what["do"] == "option":
        to = what["to"]  # a list comes from the check, as JSON knows no tuple
        optimizer.param_groups[0][name] = tuple(to) if isinstance(to, list) else to
        return
    if what["do"] == "submodule":
        model.module = model.norm
        del model.norm
        return
    if what["do"] == "stored by columns":
        parameters[name].data = parameters[name].data.t().contiguous().t()
        return
    if what["do"] == "a view of a longer tensor":
        setattr(model, name, torch.cat([torch.ones(2), torch.zeros(4)]).to(getattr(model, name))[2:])
        return
    if what["do"] == "drop gradient":
        parameters[name].grad = None
        return
    if what["do"] == "drop state":
        optimizer.state.pop(parameters[name])
        return
    if what["kind"] == "parameter":
        tensor = parameters[name]
    elif what["kind"] == "buffer":
        tensor = dict(model.named_buffers())[name]
    elif what["kind"] == "gradient":
        tensor = parameters[name].grad
    else:
        parameter, _, entry = name.rpartition(".")
        foreign = optimizer.param_groups[-1]["params"][-1]
        state = optimizer.state[parameters.get(parameter, foreign)]
        if not isinstance(state[entry], torch.Tensor):
            state[entry] += what["by"]
            return
        tensor = state[entry]
    flat = tensor.detach().view(-1)
    one, other = what.get("at", 0), what.get("other", 0)
    match what["do"]:
        case "add":
            flat[one] += what["by"]
        case "swap":
            flat[one], flat[other] = flat[other].clone(), flat[one].clone()
        case "cancel":
            flat[one] += what["by"]
            flat[other] -= what["by"]
        case "cancel by place, too":
            flat[1:4] += torch.tensor([1, -2, 1], device=flat.device)
        case "another NaN":
            flat.view(torch.int32)[0] += 1
        case "negative zero":
            flat[one] = -0.0
        case "nan":
            flat[one] = float("nan")
        case "negate":
            flat[one] = -flat[one]
        case "flip":
            flat[one] = ~flat[one]
        case "turn":
            flat[one] += 0.5j
        case "same bytes, a different type":
            setattr(model, name, tensor.view(torch.int64))
        case "same bytes, a different shape":
            setattr(model, name, tensor.unsqueeze(1))


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """A copy of everything, to see what has changed."""
    values = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters() if p.grad is not None)]
    values += [value for entry in optimizer.state.values() for value in entry.values()]
    return [torch.as_tensor(value).detach().clone() for value in values]


def _generators() -> list[Any]:
    """Where each generator of random numbers is: torch's, Python's and NumPy's."""
    _, keys, *rest = numpy.random.get_state()
    return [torch.get_rng_state().tolist(), random.getstate(), keys.tolist(), rest]


def _same(before: list[torch.Tensor], after: list[torch.Tensor]) -> bool:
    return len(before) == len(after) and all(
        torch.equal(old.nan_to_num(7.0), new.nan_to_num(7.0)) for old, new in zip(before, after, strict=True)
    )


def _plain(differences: Any) -> list[list[Any]]:
    return [[str(d.kind), str(d.name), [int(r) for r in d.ranks], float(d.largest)] for d in differences]


def compares(
    submission,
    case: str,
    seed: int,
    changes: list[dict[str, Any]],
    options: dict[str, Any],
    wrapped: bool,
    stepped: bool,
) -> None:
    """Compare once; this rank's `changes` are made first."""
    model, optimizer = build(seed, wrapped=wrapped)
    whole: nn.Module = DistributedDataParallel(model) if wrapped else model
    for what in changes:
        change(model, optimizer, what)
    before, entries, generators = _state(model, optimizer), len(optimizer.state), _generators()
    observe("case", case)
    mark("begin")
    found = submission.find_divergence(whole, optimizer, **options) if stepped else submission.find_divergence(whole)
    mark("end")
    observe("found", _plain(found))
    observe("changed", not _same(before, _state(model, optimizer)))
    observe("entries", [entries, len(optimizer.state)])
    observe("drew", generators != _generators())


def watches(
    submission, seed: int, every: int, steps: int, changes: dict[str, dict[str, Any]], options: dict[str, Any]
) -> None:
    """Watch some steps; this rank's change of step n is made before the n-th call."""
    model, optimizer = build(seed)
    observe("case", "watch")
    watch = submission.DivergenceWatch(model, optimizer, every=every, **options)
    seen: list[Any] = []
    for step in range(1, steps + 1):
        what = changes.get(str(step))
        if what is not None:
            change(model, optimizer, what)
        mark(f"step {step}")
        found = watch.step()
        seen.append(None if found is None else [int(found.step), int(found.agreed), _plain(found.differences)])
    mark("end")
    observe("seen", seen)
