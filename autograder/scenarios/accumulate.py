"""On the ranks: `train_step` is given micro-batches, and what it does with them is noted. Nothing is judged here."""

from __future__ import annotations

import weakref

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from lockstep.grading.on_rank import join, mark, observe

State = dict[str, torch.Tensor]
Sizes = list[list[int]]  # for each step, how many samples each micro-batch has


def before() -> None:
    """Mark the ways into DDP, ahead of the submission's import."""
    forward, no_sync = DDP.forward, DDP.no_sync

    def marked_forward(self, *args, **kwargs):
        mark("ddp")
        return forward(self, *args, **kwargs)

    def marked_no_sync(self):
        mark("no_sync")
        return no_sync(self)

    DDP.forward, DDP.no_sync = marked_forward, marked_no_sync


class Activation:
    """A tensor that a forward has saved for its backward; it lives for as long as the graph needs it."""

    def __init__(self, tensor: torch.Tensor, forward: int) -> None:
        self.tensor, self.forward = tensor, forward


class Noting(nn.Module):
    """A small classifier that marks each forward with the number of its samples, and of the earlier ones it still holds."""

    def __init__(self, initial: State, special: bool = False) -> None:
        super().__init__()
        self.saved: weakref.WeakSet[Activation] = weakref.WeakSet()
        self.forwards = 0
        self.first = nn.Linear(*reversed(initial["first.weight"].shape))
        self.second = nn.Linear(*reversed(initial["second.weight"].shape))
        self.load_state_dict(initial)
        if special:
            self.frozen = nn.Parameter(torch.ones(()), requires_grad=False)
            self.tied = nn.Linear(*reversed(initial["second.weight"].shape))
            self.tied.weight, self.tied.bias = self.second.weight, self.second.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, features) → (B, classes)."""
        mark(f"forward {len(x)}")
        mark(f"held {len({one.forward for one in self.saved})}")
        self.forwards += 1
        x = x if x.is_floating_point() else x.to(self.first.weight.dtype)
        with torch.autograd.graph.saved_tensors_hooks(self.save, lambda saved: saved.tensor):
            return self.second(torch.tanh(self.first(x)))

    def save(self, tensor: torch.Tensor) -> Activation:
        """What autograd keeps in place of a tensor that backward will need."""
        saved = Activation(tensor, self.forwards)
        self.saved.add(saved)
        return saved


def smoothed(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean over the samples of a loss that no submission will have guessed. Of targets in columns the first counts."""
    return nn.functional.cross_entropy(logits, targets.view(len(targets), -1)[:, 0], label_smoothing=0.3)


def parameters(model: nn.Module) -> State:
    """A copy of every parameter."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


class Step:
    """One call of the submission: every step of the optimizer within it is noted with the gradients that it used."""

    def __init__(
        self, submission, initial: State, lr: float, dtype: torch.dtype = torch.float32, special: bool = False
    ) -> None:
        self.submission = submission
        self.device = join()
        self.inner = Noting(initial, special).to(self.device, dtype)
        self.wrapped = DDP(self.inner)
        first, *others = self.wrapped.parameters()
        self.optimizer = torch.optim.SGD([{"params": [first]}, {"params": others}], lr=lr)
        self.optimizer.register_step_pre_hook(lambda *_: self.used.append(self.gradients()))
        self.used: list[State] = []

    def gradients(self) -> State:
        """A copy of every gradient that is there."""
        return {n: p.grad.detach().clone() for n, p in self.inner.named_parameters() if p.grad is not None}

    def take(self, micro_batches) -> dict:
        """Call it; returns what was seen."""
        self.used = []
        start = parameters(self.inner)
        mark("call")
        returned = self.submission.train_step(self.wrapped, micro_batches, smoothed, self.optimizer)
        mark("done")
        return {
            "start": start,
            "used": self.used,
            "end": parameters(self.inner),
            "type": type(returned).__name__,
            "is_float": isinstance(returned, float),
            "has_graph": isinstance(returned, torch.Tensor) and returned.requires_grad,
            "loss": float(returned) if isinstance(returned, (int, float, torch.Tensor)) else None,
        }


class Once:
    """An iterable without a length, but not an iterator: it gives the same generator each time it is asked."""

    def __init__(self, pairs: list) -> None:
        self.pairs = (pair for pair in pairs)

    def __iter__(self):
        return self.pairs


def split(data: tuple[torch.Tensor, torch.Tensor], sizes: list[int], device: torch.device) -> list:
    """The first samples of this data as micro-batches of these sizes."""
    count = sum(sizes)
    x, y = (part[:count].to(device).split(sizes) for part in data)
    return list(zip(x, y, strict=True))


def steps(
    submission,
    initial: State,
    lr: float,
    stale: float,
    x: torch.Tensor,
    y: torch.Tensor,
    sizes: Sizes,
    once: bool,
    dtype: str,
    special: bool,
) -> None:
    """Some steps. `x[step]` has this rank's samples, `sizes[step]` its micro-batches; `once`: as what can be read once,
    first a generator. The model is of type `dtype`; `special`: it has a frozen parameter and tied weights, and the `y` of
    each step's last micro-batch a second column, of padding.

    Before the first step every gradient holds the number `stale`.
    """
    observe("held", sizes)
    observe("once", once)
    observe("special", special)
    step = Step(submission, initial, lr, getattr(torch, dtype), special)
    for parameter in step.inner.parameters():
        parameter.grad = torch.full_like(parameter, stale) if parameter.requires_grad else None
    found = []
    for number, own in enumerate(sizes):
        batches = split((x[number], y[number]), own, step.device)
        if special:
            last, targets = batches[-1]
            batches[-1] = last, torch.stack((targets, torch.zeros_like(targets)), 1)
        if once:
            batches = Once(batches) if number else iter(Once(batches))
        found.append(step.take(batches))
        observe("steps", found)


def empty(submission, initial: State, lr: float) -> None:
    """A call without micro-batches, once as a list and once as an iterator."""
    step = Step(submission, initial, lr)
    found = {}
    for kind, nothing in (("list", []), ("iterator", iter(()))):
        error = message = ""
        returned = None
        for parameter in step.inner.parameters():
            parameter.grad = torch.ones_like(parameter)
        start = parameters(step.inner)
        try:
            returned = step.submission.train_step(step.wrapped, nothing, smoothed, step.optimizer)
        except NotImplementedError:
            raise
        except Exception as caught:
            error, message = type(caught).__name__, str(caught)
        changed = [n for n, p in parameters(step.inner).items() if not torch.equal(p, start[n])]
        found[kind] = {"error": error, "message": message, "answer": repr(returned), "changed": changed}
    observe("empty", found)
