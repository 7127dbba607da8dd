"""On the ranks: DDP models whose gradients were chosen, with the submission's hook and without. Nothing is judged here."""

from __future__ import annotations

import gc
import threading

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.grading.on_rank import join, mark, observe, rank, world_size

Gradients = dict[str, torch.Tensor]


def before() -> None:
    """Mark each wait, for a collective or a future, that does not come from a future's own callback."""
    callback = threading.local()
    future = torch._C.Future  # what a collective's get_future() returns, and the base of torch.futures.Future
    wait, wait_future = dist.Work.wait, future.wait

    def marked_wait(self, *args, **kwargs):
        mark("wait")
        return wait(self, *args, **kwargs)

    def marked_wait_future(self):
        if not getattr(callback, "running", False):
            mark("wait")
        return wait_future(self)

    def calls_back(method):
        def marked(self, function):
            def call(done):
                callback.running = True
                try:
                    return function(done)
                finally:
                    callback.running = False

            return method(self, call)

        return marked

    dist.Work.wait = marked_wait
    future.wait = marked_wait_future
    future.then = calls_back(future.then)
    future.add_done_callback = calls_back(future.add_done_callback)


class Given(nn.Module):
    """Parameters whose gradients are handed to it.

    They are used in another order than that in which they are registered, so that DDP's buckets are others after the
    first step. A parameter named `b` lies transposed in memory, as channels_last leaves it, and so does its gradient.
    """

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            zeros = torch.zeros(shape[::-1]).t() if name == "b" else torch.zeros(shape)
            self.register_parameter(name, nn.Parameter(zeros))

    def forward(self, gradients: Gradients) -> torch.Tensor:
        """A scalar whose gradient by each parameter is what was given."""
        named = dict(self.named_parameters())
        names = sorted(gradients)
        total = torch.zeros((), device=named[names[0]].device)
        for name in names[1::2] + names[::2]:
            total = total + (named[name] * gradients[name]).sum()
        return total


def register(submission, ddp_model: DistributedDataParallel, dtype: str = "", error_feedback: bool = False) -> None:
    """Call the submission, with no more arguments than were asked for."""
    options = {"dtype": getattr(torch, dtype)} if dtype else {}
    if error_feedback:
        options["error_feedback"] = True
        observe("error feedback", True)
    submission.register(ddp_model, **options)


def wrap(shapes: dict[str, tuple[int, ...]], device: torch.device, cap: float, group=None) -> DistributedDataParallel:
    """A new model in DDP, which marks each gradient that is ready."""
    model = Given(shapes).to(device)
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: mark(f"ready {name}"))
    return DistributedDataParallel(model, bucket_cap_mb=cap, process_group=group)


def one_step(ddp_model: DistributedDataParallel, gradients: Gradients, title: str) -> Gradients:
    """Forward and backward, with a mark at either end of backward; the gradients afterwards."""
    ddp_model.zero_grad()
    loss = ddp_model(gradients)
    mark(title)
    loss.backward()
    mark("end")
    return {name: parameter.grad.detach().clone() for name, parameter in ddp_model.module.named_parameters()}


def reduces(submission, gradients: list[Gradients], cap: float, **options) -> None:
    """Some steps with plain DDP, then the same with the hook. `gradients[step]` is what this rank has.

    A third model is registered last, with the other dtype and error feedback: it has nothing to do with the others. With
    error feedback the first step is taken once more at the end, by the same module in a new wrapper.
    """
    device = join()
    own = [{name: gradient.to(device) for name, gradient in step.items()} for step in gradients]
    shapes = {name: tuple(gradient.shape) for name, gradient in own[0].items()}
    plain, compressed, other = (wrap(shapes, device, cap) for _ in range(3))
    register(submission, compressed, **options)
    submission.register(
        other, torch.float16 if options.get("dtype") == "bfloat16" else torch.bfloat16, error_feedback=True
    )
    observe("plain", [one_step(plain, step, "plain") for step in own])
    observe("seen", [one_step(compressed, step, "compressed") for step in own])
    if options.get("error_feedback"):
        module = compressed.module
        del compressed
        gc.collect()
        again = DistributedDataParallel(module, bucket_cap_mb=cap)
        register(submission, again, **options)
        observe("seen again", one_step(again, own[0], "again"))


def two_models(submission, gradients: list[list[Gradients]], cap: float, **options) -> None:
    """Two models in turn, each with a hook of its own. `gradients[model][step]` is what this rank has."""
    device = join()
    own = [[{name: gradient.to(device) for name, gradient in step.items()} for step in steps] for steps in gradients]
    shapes = {name: tuple(gradient.shape) for name, gradient in own[0][0].items()}
    models = [wrap(shapes, device, cap) for _ in own]
    for model in models:
        register(submission, model, **options)
    seen: list[list[Gradients]] = [[] for _ in own]
    for step in range(len(own[0])):
        for model, steps, found in zip(models, own, seen, strict=True):
            found.append(one_step(model, steps[step], "compressed"))
    observe("seen", seen)


def in_groups(submission, gradients: Gradients, size: int, **options) -> None:
    """One step of two models that are replicated within groups of `size` ranks, the second with error feedback."""
    device = join()
    count = world_size() // size
    groups = [dist.new_group(list(range(first, world_size(), count))) for first in range(count)]
    own = {name: gradient.to(device) for name, gradient in gradients.items()}
    shapes = {name: tuple(gradient.shape) for name, gradient in own.items()}
    seen = []
    for error_feedback in (False, True):
        model = wrap(shapes, device, 1.0, groups[rank() % count])
        register(submission, model, error_feedback=error_feedback, **options)
        seen.append(one_step(model, own, "compressed"))
    observe("seen", seen)


def trains(
    submission, pixels: torch.Tensor, classes: torch.Tensor, steps: int, scale: float, nan_step: int, **options
) -> None:
    """Train a small network on these images, this rank's part. In one step all of its pixels are NaN.

    With a scale the loss is multiplied by it, and a gradient scaler skips what overflows.
    """
    device = join()
    pixels, classes = pixels.to(device), classes.to(device)
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).to(device)
    ddp_model = DistributedDataParallel(model, bucket_cap_mb=0.004)
    register(submission, ddp_model, **options)
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.2, momentum=0.9)
    scaler = torch.amp.GradScaler(device.type, init_scale=scale or 1.0, enabled=bool(scale))
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(ddp_model(pixels * (torch.nan if step == nan_step else 1.0)), classes)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    observe("compressed", {"losses": losses, "scale": scaler.get_scale(), "weight": model[0].weight.detach()})
