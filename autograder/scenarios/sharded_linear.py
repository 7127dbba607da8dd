"""On the ranks: `ShardedLinear` is given a layer and inputs that were drawn. Nothing is judged here."""

from __future__ import annotations

import gc
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from lockstep.grading.on_rank import join, mark, observe

Batch = tuple[torch.Tensor, torch.Tensor]
"""Inputs, and the gradient of the loss with respect to the output."""


def steps(submission, state: dict[str, torch.Tensor], batches: list[list[Batch]], lr: float, momentum: float) -> None:
    """Some steps of SGD. `batches[step]` are this rank's, whose gradients are added up before that step."""
    device = join()
    layer = submission.ShardedLinear(linear_of(state, device))
    own = [local(parameter) for parameter in layer.parameters()]
    observe("parameters", [(tuple(one.shape), str(one.dtype)) for one in own])
    states, outputs, gradients = [full(layer)], [], []
    optimizer = torch.optim.SGD(layer.parameters(), lr=lr, momentum=momentum)
    for given in batches:
        for values, direction in given:
            inputs = values.clone().to(device).requires_grad_()
            mark("forward")
            output = layer(inputs)
            mark("backward")
            # An output of another shape is judged, and so is no reason to stop.
            fits = output.shape == direction.shape
            output.backward(direction.to(device) if fits else torch.zeros_like(output))
            mark("end")
            outputs.append(output.detach().cpu())
            gradients.append(inputs.grad)
        optimizer.step()
        optimizer.zero_grad()
        states.append(full(layer))
    mark("forward")
    with torch.no_grad():
        outputs.append(layer(batches[0][0][0].to(device)).cpu())
    mark("no backward")
    observe("states", states)
    observe("outputs", outputs)
    observe("gradients", gradients)


def both(submission, state: dict[str, torch.Tensor], batches: list[Batch], lr: float) -> None:
    """One step of SGD for the outputs of three calls: backward of the second, and then of the third and the first."""
    device = join()
    layer = submission.ShardedLinear(linear_of(state, device))
    optimizer = torch.optim.SGD(layer.parameters(), lr=lr)
    outputs = [layer(inputs.to(device)) for inputs, _ in batches]
    directions = [direction.to(device) for _, direction in batches]
    outputs.pop(1).backward(directions.pop(1))
    torch.autograd.backward(outputs, directions)
    optimizer.step()
    observe("state", full(layer))


def once(submission, state: dict[str, torch.Tensor], shape: list[int], strided: bool) -> None:
    """Forward, backward and a step of SGD with inputs of one shape. The last two dimensions, and those of the output's
    gradient, are swapped in memory if `strided`.
    """
    device = join()
    layer = submission.ShardedLinear(linear_of(state, device))
    values = torch.linspace(-1, 1, torch.Size(shape).numel(), device=device).reshape(shape)
    inputs = (values.mT.contiguous().mT if strided else values).requires_grad_()
    output = layer(inputs)
    direction = torch.cos(torch.arange(float(output.numel()), device=device)).reshape(output.shape)
    output.backward(direction.mT.contiguous().mT if strided else direction)
    torch.optim.SGD(layer.parameters(), lr=1.0).step()
    observe("seen", [output.detach(), inputs.grad, full(layer)])


def held(submission, state: dict[str, torch.Tensor], batch: Batch, cases: list[list[bool]]) -> None:
    """What a layer leaves in memory, once for each case: whether it has a bias, and whether it is in training mode."""
    device = join()
    gc.collect()
    gc.freeze()  # what is there now need not be looked through again
    bare = {"weight": state["weight"]}
    observe(
        "held", [left(submission, state if biased else bare, batch, training, device) for biased, training in cases]
    )


def left(
    submission, state: dict[str, torch.Tensor], batch: Batch, training: bool, device: torch.device
) -> dict[str, int]:
    """How many bytes of what the submission made, or was given, are still in memory at the ends of its calls."""
    storages = Storages()
    linear = linear_of(state, device)
    storages.note(list(linear.parameters()))
    with storages:
        layer = submission.ShardedLinear(linear)
    del linear
    layer.train(training)
    bytes_at = {"made": storages.alive()}
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    inputs, direction = batch[0].clone().to(device).requires_grad_(), batch[1].to(device)
    with storages:
        output = layer(inputs)
    bytes_at["forward"] = storages.alive()
    with storages:
        output.backward(direction)
    del output
    bytes_at["backward"] = storages.alive()
    gradients = [local(one.grad).untyped_storage() for one in layer.parameters() if one.grad is not None]
    bytes_at["gradient"] = max((one.nbytes() for one in gradients), default=0)
    del gradients
    before = full(layer)
    optimizer.step()
    optimizer.zero_grad()
    bytes_at["step"] = storages.alive()
    bytes_at["changed"] = int(not torch.equal(full(layer)["weight"], before["weight"]))
    with storages, torch.no_grad():
        layer(inputs)
    bytes_at["no_grad"] = storages.alive()
    return bytes_at


def work(submission, state: dict[str, torch.Tensor], batch: Batch) -> None:
    """The floating-point operations of backward: of inputs that need a gradient, and of inputs that don't. And the
    output's gradient after it, which may be another branch's too.
    """
    device = join()
    layer = submission.ShardedLinear(linear_of(state, device))
    direction = batch[1].clone().to(device)
    counted = []
    for needed in (True, False):
        output = layer(batch[0].clone().to(device).requires_grad_(needed))
        with FlopCounterMode(display=False) as counter:
            output.backward(direction)
        counted.append(counter.get_total_flops())
    observe("operations", counted)
    observe("direction", direction)


def linear_of(state: dict[str, torch.Tensor], device: torch.device) -> nn.Linear:
    """The layer that all ranks are given."""
    rows, columns = state["weight"].shape
    layer = nn.Linear(columns, rows, bias="bias" in state, device=device, dtype=state["weight"].dtype)
    layer.load_state_dict(state)
    return layer


def full(layer: Any) -> dict[str, torch.Tensor]:
    """A copy of what `full_state_dict` returns now."""
    found = layer.full_state_dict().items()
    return {name: one.detach().clone().cpu() if isinstance(one, torch.Tensor) else one for name, one in found}


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor; those of FSDP2 have `to_local`."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


class Storages(TorchDispatchMode):
    """Knows each storage that operations made while it was on, and keeps none of them alive."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do what was asked, and note the storages of what comes out of it."""
        result = func(*args, **(kwargs or {}))
        self.note(tree_leaves(result))
        return result

    def note(self, values: list[Any]) -> None:
        """Know the storages of these tensors from now on."""
        for value in values:
            if isinstance(value, torch.Tensor):
                reference = StorageWeakRef(local(value).untyped_storage())
                self._known.setdefault(reference.cdata, reference)

    def alive(self) -> int:
        """The bytes of the storages that are still held by the submission, or by what it made."""
        # What records the collectives keeps a Work, and so its tensors, until the next collective.
        dist.barrier()
        least = self._now()
        # A thread of gloo's may hold those of the operation that it has just completed for a moment.
        for seconds in (0.001, 0.004, 0.016):
            time.sleep(seconds)
            least = min(least, self._now())
        return least

    def _now(self) -> int:
        gc.collect()
        alive = (torch.UntypedStorage._new_with_weak_ptr(cdata) for cdata in self._known)
        return sum(storage.nbytes() for storage in alive if storage is not None)
