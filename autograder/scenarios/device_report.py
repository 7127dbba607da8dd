"""On one rank: `device_report` is shown models and batches whose tensors are on two devices. Nothing is judged here.

The second device is a GPU where there is one. Elsewhere it is "meta": its tensors have a shape, a type and a device,
and no data, so a tensor in the wrong place is as wrong there as on a GPU.
"""

from __future__ import annotations

import dataclasses
from collections import UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.grading.on_rank import observe, raised_at

OTHER = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("meta")

OF_EVERY_MODULE = frozenset(vars(nn.Module()))

Pair = namedtuple("Pair", "left right")


@dataclass
class Sample:
    """A batch as a dataclass."""

    image: torch.Tensor
    label: torch.Tensor
    source: str = "camera"


class Registered(nn.Module):
    """Everything that can be registered: frozen, tied and half-precision parameters, buffers in and out of state_dict."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Embedding(7, 5)
        self.norm = nn.BatchNorm1d(5)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.half = nn.Linear(2, 2, bias=False, dtype=torch.bfloat16)
        self.decoder = nn.Linear(5, 7, bias=False)
        self.decoder.weight = self.encoder.weight
        self.register_buffer("mask", torch.ones(2, dtype=torch.bool), persistent=False)
        self.norm.register_buffer("table", torch.ones(2), persistent=False)

    def forward(self, *_: Any) -> torch.Tensor:
        """Nobody asked for this."""
        observe("forward_called", True)
        raise RuntimeError("the model was called")


class Adapter(nn.Linear):
    """A module with a parameter, a buffer and a child."""

    def __init__(self) -> None:
        super().__init__(2, 2, bias=False)
        self.register_buffer("steps", torch.zeros(1, dtype=torch.int64))
        self.inner = nn.Linear(1, 1, bias=False)


class Holding(Registered):
    """A model that also holds what it has not registered, on this or that device."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(3)
        self.also_mean = self.mean
        self.anchors = [torch.ones(2), ({"wide": torch.ones(4, dtype=torch.float64)},)]
        self.name = "holding"
        self.lstm = nn.LSTM(2, 2)  # keeps its parameters in a second list
        self.norm._extra = torch.zeros(1)  # deeper down
        self.adapters = [Adapter()]  # a plain list: nn.Module does not see it
        self.prompts = [nn.Parameter(torch.zeros(2))]  # nor a parameter in one


class Focal(nn.Module):
    """A loss with a parameter, a buffer and a tensor that it has not registered."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("weight", torch.ones(2))
        self.gamma = torch.full((1,), 2.0)


class Adapted(nn.Module):
    """A frozen model on one device, and one small trained parameter that was left behind."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(2, device=OTHER), requires_grad=False)
        self.second = nn.Parameter(torch.zeros(2, device=OTHER), requires_grad=False)
        self.trained = nn.Parameter(torch.zeros(2))


class Plain(nn.Module):
    """Three parameters, of which the first was left behind by whoever moved them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(2))
        self.second = nn.Parameter(torch.zeros(2, device=OTHER))
        self.third = nn.Parameter(torch.zeros(2, device=OTHER))


def _moved(model: Registered) -> Registered:
    """On the other device, with its weights still tied: `.to("meta")` cannot keep that, `.to("cuda")` does."""
    model = model.to(OTHER)
    model.decoder.weight = model.encoder.weight
    return model


def _all(value: Any) -> list[torch.Tensor]:
    """The tensors of the arguments, to see what becomes of them."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, nn.Module):
        return [*value.state_dict(keep_vars=True).values()]
    if isinstance(value, dict | UserDict):
        return [tensor for item in value.values() for tensor in _all(item)]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _all(item)]
    return [value.image, value.label] if isinstance(value, Sample) else []


def _state(tensors: list[torch.Tensor]) -> list[list[Any]]:
    return [[str(one.device), str(one.dtype), one.requires_grad, id(one)] for one in tensors]


def _members(model: nn.Module) -> dict[str, str]:
    """What the model and its modules hold under each name, by type."""
    members = {}
    for name, part in model.named_modules():
        own = {key: value for key, value in vars(part).items() if key not in OF_EVERY_MODULE}
        for key, value in (own | part._parameters | part._buffers | part._modules).items():
            members[f"{name}.{key}".lstrip(".")] = type(value).__name__
    return members


def _look(submission, label: str, model: nn.Module, *batch: Any, **options: Any) -> Any:
    """Call it once, and say what it found and what it changed."""
    arguments = [model, *batch, options.get("loss")]
    before, members, random = _state(_all(arguments)), _members(model), torch.get_rng_state()
    observe("case", label)
    report = submission.device_report(model, *batch, **options)
    now = _members(model)
    found = {
        "tensors": [[str(one.kind), str(one.path), str(one.device), str(one.dtype)] for one in report.tensors],
        "device": str(report.device),
        "misplaced": [str(one.path) for one in report.misplaced],
        "text": str(report),
        "changed": [
            f"{old[0]} → {new[0]}" for old, new in zip(before, _state(_all(arguments)), strict=False) if old != new
        ],
        "became": [
            [name, members.get(name), now.get(name)] for name in members | now if members.get(name) != now.get(name)
        ],
        "drew": not torch.equal(random, torch.get_rng_state()),
        "mode": model.training,
    }
    observe(label, found)
    return report


def registered(submission) -> None:
    """A model alone, all of it on the CPU."""
    observe("other", str(OTHER))
    model = Registered()
    model.module = nn.Linear(2, 2, bias=False)  # the name that DDP gives the model within
    report = _look(submission, "registered", model)
    if dataclasses.is_dataclass(report) and all(dataclasses.is_dataclass(one) for one in report.tensors):
        gpu = [dataclasses.replace(one, device=torch.device("cuda", 1)) for one in report.tensors]
        observe("on a GPU", str(dataclasses.replace(report, tensors=gpu, device=torch.device("cuda"))))


def moved(submission) -> None:
    """The same model, one buffer of it left behind; and a model on the CPU that should be on a GPU with a number."""
    observe("other", str(OTHER))
    model = _moved(Registered())
    model.norm.running_var = torch.ones(5)
    _look(submission, "moved", model)
    try:
        _look(submission, "numbered", nn.Linear(2, 2), device="cuda:1")
    except Exception as error:
        observe("numbered", None)
        observe("raised", raised_at(submission, error)[0])


def batches(submission) -> None:
    """Data in every nest that loaders make."""
    observe("other", str(OTHER))
    there = {"device": OTHER}
    labels = torch.zeros(2, dtype=torch.int64)
    _look(submission, "flat", nn.Linear(2, 2, **there), torch.zeros(2, 2, **there), labels, labels.detach())
    nested = {
        "ids": torch.zeros(2, dtype=torch.int64, **there),
        "boxes": [torch.zeros(1, **there), (torch.zeros(1, dtype=torch.float16), None, "text", 3)],
        "empty": {},
        7: UserDict(mask=torch.zeros(2, dtype=torch.bool, **there)),
    }
    pair = Pair(torch.zeros(2, **there), [torch.zeros(2)])
    sample = Sample(pair.left, torch.zeros(2, dtype=torch.int64))  # the target is the input
    _look(submission, "dictionary", nn.Linear(2, 2, **there), nested)
    _look(submission, "records", nn.Linear(2, 2, **there), pair, sample)


def attributes(submission) -> None:
    """A model that was moved, with what no `.to()` moves."""
    observe("other", str(OTHER))
    _look(submission, "attributes", _moved(Holding()))


def wrapped(submission) -> None:
    """The same model inside DDP, on the CPU."""
    observe("other", str(OTHER))
    dist.init_process_group("gloo")
    _look(submission, "wrapped", DistributedDataParallel(Holding()))


def ordered(submission) -> None:
    """A model, a loss and a batch with tensors of every kind, on the CPU."""
    observe("other", str(OTHER))
    _look(submission, "ordered", Holding(), torch.zeros(2), {"y": torch.zeros(2)}, loss=Focal())


def losses(submission) -> None:
    """A function, a plain loss and two that hold tensors, left on the CPU."""
    observe("other", str(OTHER))
    model = nn.Linear(2, 2, device=OTHER)
    data = torch.zeros(2, 2, device=OTHER)
    _look(submission, "weighted", model, data, loss=nn.CrossEntropyLoss(weight=torch.ones(2)))
    focal = Focal()
    focal.head = model.weight
    _look(submission, "focal", model, data, loss=focal)
    _look(submission, "plain", model, data, loss=nn.CrossEntropyLoss())
    _look(submission, "function", model, data, loss=nn.functional.cross_entropy)


def empty(submission) -> None:
    """Nothing is a tensor."""
    observe("other", str(OTHER))
    _look(submission, "empty", nn.ReLU(), ["text"], device="cpu")


def expectations(submission) -> None:
    """Where should it be? Where most of the model is, unless somebody says it."""
    observe("other", str(OTHER))
    _look(submission, "most", Plain(), torch.zeros(2, device=OTHER))
    _look(submission, "frozen", Adapted(), torch.zeros(2, device=OTHER))
    norm = nn.BatchNorm1d(2, device=OTHER)
    for name, buffer in nn.BatchNorm1d(2).named_buffers():
        setattr(norm, name, buffer)
    _look(submission, "data", norm, torch.zeros(2, 2), torch.zeros(2))
    _look(submission, "loss", nn.Linear(2, 2, device=OTHER), loss=nn.LSTM(2, 2))
    _look(submission, "said", nn.Linear(2, 2), torch.zeros(2, 2), device=OTHER)
    _look(submission, "said_as_text", nn.Linear(2, 2), torch.zeros(2, 2), device="cpu")
