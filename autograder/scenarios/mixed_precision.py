"""On the ranks: `train_step` is given a model and a loss that note in what precision they run. Nothing is judged here."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from lockstep.grading.on_rank import join, mark, observe

State = dict[str, torch.Tensor]
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def before() -> None:
    """Mark the way into DDP, ahead of the submission's import."""
    forward = DDP.forward

    def marked_forward(self, *args, **kwargs):
        mark("ddp")
        return forward(self, *args, **kwargs)

    DDP.forward = marked_forward


def say(dtype: torch.dtype) -> str:
    """`float16`."""
    return str(dtype).removeprefix("torch.")


class Noting(nn.Module):
    """A small classifier that notes the types of its layers' outputs, and whether backward runs under autocast.

    `middle` computes in float32 whatever surrounds it, as layers do that half precision would harm. A backward under
    autocast computes it in half precision all the same.
    """

    def __init__(self, initial: State) -> None:
        super().__init__()
        self.first = nn.Linear(*reversed(initial["first.weight"].shape))
        self.middle = nn.Linear(*reversed(initial["middle.weight"].shape))
        self.last = nn.Linear(*reversed(initial["last.weight"].shape))
        self.load_state_dict(initial)
        self.types: dict[str, str] = {}
        self.autocast_in_backward = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, features) → (B, classes)."""
        first = self.first(x)
        with torch.autocast(x.device.type, enabled=False):
            middle = self.middle(torch.tanh(first.to(self.middle.weight.dtype)))
        last = self.last(torch.tanh(middle))
        self.types |= {"first": say(first.dtype), "middle": say(middle.dtype), "last": say(last.dtype)}
        if middle.requires_grad:
            middle.register_hook(self._note_backward)
        return last

    def _note_backward(self, gradient: torch.Tensor) -> None:
        self.autocast_in_backward = torch.is_autocast_enabled(gradient.device.type)


class Loss:
    """Cross-entropy with label smoothing, twice `root` times as large. It notes its type, its targets', and the gradient that arrives."""

    def __init__(self, size: float) -> None:
        self.root = size**0.5
        self.type = self.targets = ""
        self.factor: float | None = None

    def __call__(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """(B, classes) and (B,) or (B, classes) → a scalar."""
        loss = nn.functional.cross_entropy(logits, targets, label_smoothing=0.3) * self.root * self.root
        self.type, self.targets = say(loss.dtype), say(targets.dtype)
        if loss.requires_grad:
            loss.register_hook(self._note)
        return loss

    def _note(self, gradient: torch.Tensor) -> None:
        self.factor = float(gradient)


def parameters(model: nn.Module) -> State:
    """A copy of every parameter."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def field(result, name: str) -> dict:
    """One field of what came back: its type and its value."""
    value = getattr(result, name, None)
    plain = float(value) if isinstance(value, (bool, int, float, torch.Tensor)) else None
    return {"there": hasattr(result, name), "type": type(value).__name__, "value": plain}


def steps(
    submission,
    initial: State,
    dtype: str,
    scale: float,
    stale: float,
    x: torch.Tensor,
    y: torch.Tensor,
    sizes: torch.Tensor,
    max_norms: list[float],
    first_group: int,
) -> None:
    """Some steps. `x[step]` and `y[step]` are this rank's batches, `sizes[step]` says how large the loss is.

    A `scale` of 0 means that the scaler is not enabled; otherwise it begins with this and doubles it after two good
    steps. Before the first step every gradient holds the number `stale`. The optimizer has two groups of parameters.
    """
    device = join()
    inner = Noting(initial).to(device)
    wrapped = DDP(inner)
    every = list(wrapped.parameters())
    optimizer = torch.optim.SGD(
        [{"params": every[:first_group]}, {"params": every[first_group:]}], lr=0.1, momentum=0.01
    )
    scaler = torch.amp.GradScaler(device.type, init_scale=scale or 1.0, growth_interval=2, enabled=bool(scale))
    used: list[State] = []
    optimizer.register_step_pre_hook(
        lambda *_: used.append({n: p.grad.detach().clone() for n, p in inner.named_parameters() if p.grad is not None})
    )
    for parameter in inner.parameters():
        parameter.grad = torch.full_like(parameter, stale)
    found = []
    for number, max_norm in enumerate(max_norms):
        observe("step", number)
        used.clear()
        loss_fn = Loss(float(sizes[number]))
        start, before_scale = parameters(inner), scaler.get_scale()
        batch = (x[number].to(device), y[number].to(device))
        mark("call")
        result = submission.train_step(
            wrapped, *batch, loss_fn, optimizer, scaler, dtype=DTYPES[dtype], max_norm=max_norm
        )
        mark("done")
        found.append({
            "start": start, "used": list(used), "end": parameters(inner),
            "types": {**inner.types, "loss": loss_fn.type, "targets": loss_fn.targets},
            "parameters": sorted({say(p.dtype) for p in inner.parameters()}),
            "state": sorted({say(t.dtype) for state in optimizer.state.values() for t in state.values() if t is not None}),
            "autocast_in_backward": inner.autocast_in_backward,
            "factor": loss_fn.factor,
            "scale_before": before_scale, "scale": scaler.get_scale(),
            "result": type(result).__name__,
            "loss": field(result, "loss"), "grad_norm": field(result, "grad_norm"), "skipped": field(result, "skipped"),
        })  # fmt: skip
        observe("steps", found)
