"""Inside a rank that is asked to watch its replica: one fingerprint a tensor after every `optimizer.step()`.

The ranks do not talk to each other for it. Each tells the supervisor what it has, and the supervisor compares
(`comparison`): no collective is added, so the run's own order of collectives stays as it is. A fingerprint is the CRC-32
of a tensor's bytes, so the cost is one pass over parameters and buffers a step. Gradients only help to say why: of them a
few values are looked at. A handful of a parameter's values goes along too, to say how far apart replicas are. Where a
parameter belongs is asked of the modules whose forward has run.
"""

from __future__ import annotations

import weakref
import zlib
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .messages import NotFinite, Replica

if TYPE_CHECKING:
    from .recorder import Recorder

SAMPLED = 8
SAMPLED_GRADIENTS = 64
SETTINGS = ("lr", "momentum", "weight_decay", "betas", "eps", "dampening", "nesterov", "maximize")


class ReplicaWatch:
    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.modules: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self.optimizers: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Followed] = weakref.WeakKeyDictionary()
        self.brought: list[tuple[int, int]] = []
        self.wrapped_forward = False
        self.brought_value = ""
        self.told_of_value = False

    def start(self) -> None:
        """Follow every optimizer and module of this process, and what DDP reduces, from now on."""
        self.recorder.reduced = self._reduced
        register_module_forward_pre_hook(self._forward)
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)

    def _reduced(self, tensors: list[torch.Tensor]) -> None:
        """DDP is about to average these gradients: note what this rank brings, and how many bytes."""
        self.brought_value = self.brought_value or next(filter(None, map(not_finite, tensors)), "")
        print_ = zlib.crc32(repr([sketch(tensor) for tensor in tensors]).encode())
        any_ = any(bool(tensor.any()) for tensor in tensors)  # gradients of zero are equal everywhere and say nothing
        self.brought.append((print_ if any_ else 0, sum(tensor.numel() * tensor.element_size() for tensor in tensors)))

    def _forward(self, module: torch.nn.Module, inputs: Any) -> None:
        self.modules.add(module)
        self.wrapped_forward |= isinstance(module, DistributedDataParallel)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        followed = self.optimizers.get(optimizer)
        if followed is None:
            followed = self.optimizers[optimizer] = _Followed(len(self.optimizers), optimizer, list(self.modules))
            self._tell(followed, followed.prints(), names=followed.names)
            self._look_for_values(followed)
        followed.changed = followed.changes()
        followed.values = [_value_or_none(parameter.grad) for parameter in followed.parameters]
        followed.gradients = [_print_or_none(parameter.grad) for parameter in followed.parameters]

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        followed = self.optimizers.get(optimizer)
        if followed is None:
            return
        followed.step += 1
        self._look_for_values(followed)
        self._tell(
            followed,
            followed.prints(),
            gradients=followed.gradients,
            buffers={name: fingerprint(buffer) for name, buffer in followed.buffers.items()},
            sampled=[_sample(parameter) for parameter in followed.parameters],
            settings=[{key: repr(group[key]) for key in SETTINGS if key in group} for group in optimizer.param_groups],
            brought=self.brought,
            wrapped_forward=self.wrapped_forward,
            changed=followed.changed,
        )
        followed.seen = followed.states()
        self.brought, self.wrapped_forward, self.brought_value = [], False, ""

    def _look_for_values(self, followed: _Followed) -> None:
        """Tell of the first parameter that has come to hold what is no finite number.

        Before the first step infinities are left alone: a mask may be made of them. A gradient alone is left alone too: an
        optimizer may skip it (a fused one with a gradient scaler does).
        """
        if self.told_of_value:
            return
        for number, parameter in enumerate(followed.parameters):
            value = not_finite(parameter)
            if value and not followed.step:
                followed.infinite.add(number)
            if value == "NaN" or (value and number not in followed.infinite):
                self.told_of_value = True
                frame = self.recorder.caller().frame
                gradient = followed.values[number] if followed.values else ""
                self.recorder.send(NotFinite(
                    followed.step, followed.names[number], value, gradient, self.brought_value, bool(self.brought), frame
                ))  # fmt: skip
                return

    def _tell(self, followed: _Followed, prints: list[int], **found: Any) -> None:
        frame = self.recorder.caller().frame
        self.recorder.send(Replica(followed.index, followed.step, prints, frame, **found))


class _Followed:
    """One optimizer: its parameters by name, and the buffers of their modules."""

    def __init__(self, index: int, optimizer: torch.optim.Optimizer, modules: list[torch.nn.Module]) -> None:
        self.index = index
        self.step = 0
        self.gradients: list[int | None] = []
        self.values: list[str] = []  # What the gradients held when the step began: NaN, inf, or nothing but numbers
        self.infinite: set[int] = set()
        self.seen: list[tuple[int, list[float]]] = []
        """What each parameter was at the end of a step: how often it had been written to, and a few of its values."""
        self.changed: list[int] = []
        self.parameters = [
            parameter for group in optimizer.param_groups for parameter in group["params"] if _is_plain(parameter)
        ]
        wanted = {id(parameter) for parameter in self.parameters}
        known: dict[int, str] = {}
        self.buffers: dict[str, torch.Tensor] = {}
        # The outermost module names a parameter in full, so the one that holds the most modules is asked first.
        for module in sorted(modules, key=lambda module: -sum(1 for _ in module.modules())):
            named = {id(parameter): name for name, parameter in module.named_parameters()}
            if wanted & named.keys() - known.keys():
                for key, name in named.items():
                    known.setdefault(key, name.replace("module.", ""))
                for name, buffer in module.named_buffers():
                    if _is_plain(buffer):
                        self.buffers.setdefault(name.replace("module.", ""), buffer)
        self.names = [known.get(id(one), f"parameter {number}") for number, one in enumerate(self.parameters)]

    def states(self) -> list[tuple[int, list[float]]]:
        """See `seen`. Writing to `parameter.data` isn't counted, so values tell of that."""
        return [(parameter._version, _sample(parameter)) for parameter in self.parameters]

    def changes(self) -> list[int]:
        """The parameters that something has changed since the last step."""
        return [
            number
            for number, (now, before) in enumerate(zip(self.states(), self.seen, strict=False))
            if repr(now) != repr(before)
        ]

    def prints(self) -> list[int]:
        return [fingerprint(parameter) for parameter in self.parameters]


def fingerprint(tensor: torch.Tensor) -> int:
    """The CRC-32 of the tensor's values in logical order; equal for equal bits."""
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.numel() == 0:
        return 0
    return zlib.crc32(flat.view(torch.uint8).cpu().numpy().data)


def not_finite(tensor: torch.Tensor) -> str:
    """`NaN` or `inf` when the tensor holds such a value, else nothing."""
    flat = tensor.detach()
    if not (flat.is_floating_point() or flat.is_complex()) or bool(torch.isfinite(flat).all()):
        return ""
    return "NaN" if bool(torch.isnan(flat).any()) else "inf"


def _value_or_none(tensor: torch.Tensor | None) -> str:
    return not_finite(tensor) if tensor is not None and _is_plain(tensor) else ""


def sketch(tensor: torch.Tensor) -> int:
    """The CRC-32 of evenly spaced values of the tensor: cheap, and enough to see that two gradients differ."""
    flat = tensor.detach().reshape(-1)
    return fingerprint(flat[:: max(1, flat.numel() // SAMPLED_GRADIENTS)])


def _print_or_none(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None or tensor.layout is not torch.strided else sketch(tensor)


def _sample(tensor: torch.Tensor) -> list[float]:
    flat = tensor.detach().reshape(-1)
    step = max(1, flat.numel() // SAMPLED)
    return [float(value) for value in flat[::step][:SAMPLED].double().tolist()]


def _is_plain(tensor: torch.Tensor) -> bool:
    """A dense tensor that this rank holds as a whole: a sharded one is no replica."""
    return tensor.layout is torch.strided and not hasattr(tensor, "placements") and not tensor.is_meta
