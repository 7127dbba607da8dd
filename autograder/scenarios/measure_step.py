"""On the ranks: a clock that only this file moves, and steps whose time is scripted. Nothing is judged here."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.grading.on_rank import join, mark, observe, rank

CLEARING, MEETING = 0.5, 0.25  # seconds of the scripted clock that zero_grad and a barrier take


class Clock:
    """Seconds that pass only when somebody lets them."""

    now = 2e7  # of a machine that has been up for long: in float32 such a reading is off by a second
    reads = 0

    def __call__(self) -> float:
        """Read it."""
        self.reads += 1
        return self.now


CLOCK = Clock()


def before() -> None:
    """Let a barrier take time, ahead of the submission's import."""
    barrier = dist.barrier

    def slow_barrier(*args, **kwargs):
        CLOCK.now += MEETING
        return barrier(*args, **kwargs)

    dist.barrier = slow_barrier


class Counting(nn.Module):
    """A layer, a parameter that is not used, and buffers that count how often the model was called in training."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.unused = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("calls", torch.full((), 5.0))
        self.register_buffer("batches", torch.full((), 5))  # whole numbers, like BatchNorm's num_batches_tracked
        self.register_buffer("unsaved", torch.full((), 5.0), persistent=False)
        self.register_buffer("replaced", torch.full((), 5.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, 4) → (B, 3)."""
        if self.training:
            self.calls += 1
            self.batches += 1
            self.unsaved += 1
            self.replaced = self.replaced + 1  # a new tensor, as in `average = 0.9 * average + …`
        return self.layer(x)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """It takes time, like the real one."""
        CLOCK.now += CLEARING
        super().zero_grad(set_to_none)


def measures(
    submission, times: list[dict[str, list[float]]], warm: list[dict[str, list[float]]], options: dict[str, int]
) -> None:
    """Call `exposed_communication` with steps that take scripted times.

    `times[rank]["step"]` are the seconds of the steps with synchronization, in turn, and when they are used up again
    from the first; `times[rank]["alone"]` are those without. `warm[rank]` come before them. `options` has `repeats`, and
    then it is called a second time, or leaves it out.
    """
    device = join()
    scripted = {
        kind: itertools.chain(warm[rank()][kind], itertools.cycle(times[rank()][kind])) for kind in ("step", "alone")
    }
    counts = {"step": 0, "alone": 0}
    torch.manual_seed(3)
    model = Counting().to(device)
    ddp_model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    ddp_model.zero_grad = model.zero_grad
    batch = torch.ones(2, 4, device=device)
    ddp_model.eval()
    for _ in range(2):  # from here on, gradients lie in DDP's bucket, which later steps overwrite
        ddp_model(batch).sum().backward()
    ddp_model.train()
    model.layer.weight.grad = None
    model.layer.bias.grad.fill_(7)
    model.unused.grad = torch.full((2,), 7.0)  # it was trained before it was frozen
    dirty: list[bool] = []

    def step() -> None:
        kind = "step" if ddp_model.require_backward_grad_sync else "alone"
        mark(kind)
        dirty.append(any(p.grad is not None and bool(p.grad.any()) for p in model.layer.parameters()))
        ddp_model(batch * (rank() + 1)).sum().backward()
        CLOCK.now += next(scripted[kind])
        counts[kind] += 1
        mark("done")

    result = submission.exposed_communication(step, ddp_model, clock=CLOCK, **options)
    for name in ("step", "alone"):
        observe(name, float(getattr(result, name)))
    observe("counts", counts)
    observe("reads", CLOCK.reads)
    observe("dirty", dirty)
    observe("gradients", {name: p.grad for name, p in model.named_parameters()})
    observe("buffers", dict(model.named_buffers()))
    observe("synchronizes", bool(ddp_model.require_backward_grad_sync))
    if options:
        counts.update(step=0, alone=0)
        submission.exposed_communication(step, ddp_model, clock=CLOCK, **options)
        observe("counts again", counts)


def scales(submission, runs: list[list[list[float]]], modes: list[str]) -> None:
    """Call `scaling_efficiency` with each run; a run is pairs of ranks and seconds."""
    found, errors = [], []
    for pairs, mode in zip(runs, modes, strict=True):
        try:
            result = submission.scaling_efficiency({int(ranks): seconds for ranks, seconds in pairs}, mode)
            found.append([[int(ranks), float(efficiency)] for ranks, efficiency in result.items()])
            errors.append("")
        except (ValueError, KeyError, ZeroDivisionError) as error:
            found.append([])
            errors.append(f"{type(error).__name__}: {error}")
    observe("found", found)
    observe("errors", errors)


def predicts(submission, cases: list[dict[str, float]]) -> None:
    """Call `predict_step` with each case."""
    observe("found", [float(submission.predict_step(**case)) for case in cases])
