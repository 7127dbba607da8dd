"""On the ranks: `MiniDDP` wraps models that break simple versions, beside torch's DDP. Nothing is judged here."""

from __future__ import annotations

import contextlib
import copy
import sys
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.grading.on_rank import join, mark, observe

WIDTH = 32


def before() -> None:
    """Mark each wait for a collective, and each request for its future or its state, ahead of the submission's import."""
    for name in ("wait", "get_future", "is_completed", "synchronize", "block_current_stream"):
        if hasattr(dist.Work, name):
            setattr(dist.Work, name, marked(getattr(dist.Work, name), "wait" if name == "wait" else "asks"))


def marked(call, name: str):
    """The same method of a work, with a mark ahead of it unless it is the recorder that asks."""

    def marked_call(self, *args, **kwargs):
        if not sys._getframe(1).f_globals.get("__name__", "").startswith("lockstep."):
            mark(name)
        return call(self, *args, **kwargs)

    return marked_call


class Awkward(nn.Module):
    """Tied, frozen and unused parameters, buffers of several kinds, and one parameter larger than all others together.

    `side` is used when the caller says so, `never` by nobody.
    """

    def __init__(self, initial: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.never = nn.Linear(6, 2)
        self.huge = nn.Linear(6, 300)
        self.back = nn.Linear(300, 6)
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.side = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("offset", torch.zeros(6))
        self.register_buffer("unsaved", torch.zeros(6), persistent=False)
        self.register_buffer("count", torch.tensor(0))
        with torch.no_grad():
            for name, tensor in [*self.named_parameters(), *self.named_buffers()]:
                tensor.copy_(initial[name])

    def forward(self, tokens: torch.Tensor, *, side: bool) -> torch.Tensor:
        """(B,) → (B, 11)."""
        x = self.embedding(tokens) * self.unsaved + self.offset
        x = self.frozen(x + self.back(torch.tanh(self.huge(x))))
        return self.head(x + self.side(x) if side else x)


def state(module: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: tensor.detach().clone() for name, tensor in named}


def gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    """Every gradient that is not None."""
    return {name: p.grad.detach().clone() for name, p in module.named_parameters() if p.grad is not None}


def loss_of(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor, side: bool) -> torch.Tensor:
    """The loss of one batch."""
    return nn.functional.cross_entropy(model(tokens, side=side), targets)


def wraps(submission, initial: dict[str, torch.Tensor], tokens: torch.Tensor, cap: float) -> None:
    """What MiniDDP makes of a module, and what it and the module return for the same batch."""
    device = join()
    model = Awkward(initial).to(device)
    wrapped = submission.MiniDDP(model, bucket_cap_mb=cap)
    observe("itself", wrapped.module is model)
    observe("constructed", state(wrapped.module))
    with torch.no_grad():
        observe("output", wrapped(tokens.to(device), side=True))
        observe("plain", wrapped.module(tokens.to(device), side=True))


def trains(
    submission,
    initial: dict[str, torch.Tensor],
    tokens: torch.Tensor,
    sides: list[bool],
    cap: float,
    micro: int,
    idle: bool,
) -> None:
    """Some steps with MiniDDP and with torch's DDP, from the same start, on the same batches.

    `initial` are other weights on every rank; only rank 0's may count. `tokens[step]` is a batch of this rank;
    `sides[step]` says whether it uses the side branch. The layer that no rank uses is trainable if `idle`. A step has
    `micro` micro-batches, and all but the last are in no_sync.
    """
    device = join()
    model = Awkward(initial).to(device)
    model.never.requires_grad_(idle)
    wrapped = submission.MiniDDP(copy.deepcopy(model), bucket_cap_mb=cap)
    inner = wrapped.module
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = DistributedDataParallel(model, find_unused_parameters=True)
    mine_steps = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    their_steps = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
    found: list[dict[str, dict[str, torch.Tensor]]] = []
    for batch, side in zip(tokens, sides, strict=True):
        pieces = batch.to(device).chunk(micro)
        alone = copy.deepcopy(theirs.module)
        alone.zero_grad()
        for optimizer in (mine_steps, their_steps):
            optimizer.zero_grad()
        for number, piece in enumerate(pieces):
            loss_of(alone, piece, piece.flip(0), side).backward()
            last = number == len(pieces) - 1
            mark("backward")
            # Only the first forward is inside no_sync: what counts is where backward runs.
            loss = loss_of(wrapped, piece, piece.flip(0), side) if number or last else None
            with contextlib.nullcontext() if last else wrapped.no_sync():
                (loss_of(wrapped, piece, piece.flip(0), side) if loss is None else loss).backward()
            mark("backward done" if last else "backward in no_sync done")
        wrapped.finish_gradient_synchronization()
        mark("finished")
        mine = gradients(inner)
        for number, piece in enumerate(pieces):
            if number == len(pieces) - 1:
                loss_of(theirs, piece, piece.flip(0), side).backward()
            else:
                with theirs.no_sync():
                    loss_of(theirs, piece, piece.flip(0), side).backward()
        found.append({"mine": mine, "theirs": gradients(theirs.module), "alone": gradients(alone)})
        for optimizer in (mine_steps, their_steps):
            optimizer.step()
    observe("gradients", found)
    observe("mine", {name: p.detach().clone() for name, p in inner.named_parameters()})
    observe("theirs", {name: p.detach().clone() for name, p in theirs.module.named_parameters()})


class Turning(nn.Sequential):
    """Layers, of which any can be the first; those before it follow the last."""

    def forward(self, x: torch.Tensor, first: int = 0) -> torch.Tensor:
        """(B, WIDTH) → (B, WIDTH)."""
        layers = list(self)
        for layer in layers[first:] + layers[:first]:
            x = layer(x)
        return x


def overlaps(submission, layers: int, per_bucket: int, quiet: int = 0, raises: bool = False) -> None:
    """Backward through equal layers of float64, with a mark whenever a gradient is ready; so many in no_sync go before it.

    Four times: first and last as usual; the second time the layers of the first bucket go first, so that it is complete
    last; the third time in eval(). With `raises`, each no_sync is left by an exception.
    """
    device = join()
    layer = {"bias": False, "device": device, "dtype": torch.float64}
    model = Turning(*(nn.Linear(WIDTH, WIDTH, **layer) for _ in range(layers)))
    ones = torch.ones(1, WIDTH, device=device, dtype=torch.float64)
    for index, parameter in enumerate(model.parameters()):
        parameter.register_post_accumulate_grad_hook(lambda _, index=index: mark(f"ready {index}"))
    wrapped = submission.MiniDDP(model, bucket_cap_mb=per_bucket * WIDTH * WIDTH * 8 / 2**20)
    for _ in range(quiet):
        with contextlib.suppress(InterruptedError), wrapped.no_sync():
            wrapped(ones).sum().backward()
            if raises:
                raise InterruptedError
    for first, training in ((0, True), (layers - per_bucket, True), (0, False), (0, True)):
        wrapped.train(training).zero_grad()
        loss = wrapped(ones, first).sum()
        mark("backward")
        loss.backward()
        mark("backward done")
        wrapped.finish_gradient_synchronization()
        mark("finished")


class Steep(nn.Module):
    """A parameter whose gradient is whatever number it is called with."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, dtype=dtype))

    def forward(self, slope: float) -> torch.Tensor:
        """A scalar."""
        return (self.weight * slope).sum()


def slopes(submission, slope: float, dtype: str) -> None:
    """One forward with this gradient, and two backwards."""
    wrapped = submission.MiniDDP(Steep(getattr(torch, dtype)).to(join()))
    loss = wrapped(slope)
    for backward in ("gradient", "again"):
        wrapped.zero_grad()
        loss.backward(retain_graph=True)
        wrapped.finish_gradient_synchronization()
        observe(backward, wrapped.module.weight.grad)


class Pair(nn.Module):
    """Two parameters. The first has whatever gradient it is called with; with None it has no part in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))

    def forward(self, slope: float | None) -> torch.Tensor:
        """A scalar."""
        total = self.second.sum()
        return total if slope is None else total + (self.first * slope).sum()


def pairs(submission, slopes: list[float | None]) -> None:
    """One backward for each of these gradients, all but the last in no_sync."""
    wrapped = submission.MiniDDP(Pair().to(join()))
    for slope in slopes[:-1]:
        with wrapped.no_sync():
            wrapped(slope).backward()
    wrapped(slopes[-1]).backward()
    wrapped.finish_gradient_synchronization()
    observe("gradient", wrapped.module.first.grad)


def saves(submission) -> None:
    """state_dict and back; a child has the name of the wrapper's own."""
    device = join()
    torch.manual_seed(7)
    model = nn.ModuleDict({"norm": nn.BatchNorm1d(4), "module": nn.Linear(3, 4)}).to(device)
    wrapped = submission.MiniDDP(copy.deepcopy(model))
    observe("plain", list(model.state_dict()))
    observe("wrapped", list(wrapped.state_dict()))
    observe("attached", any(tensor.requires_grad for tensor in wrapped.state_dict(keep_vars=True).values()))
    other = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    some = dict(list(other.items())[:1])
    for what, call in (
        ("error", lambda: wrapped.load_state_dict(other)),
        ("strict", lambda: wrapped.load_state_dict(some, assign=True, strict=False)),
    ):
        error = ""
        try:
            call()
        except (RuntimeError, KeyError) as caught:
            error = str(caught)
        observe(what, error)
    (given,) = some.items()
    observe("assigned", wrapped.module.get_parameter(given[0]).data_ptr() == given[1].data_ptr())
    observe("loaded", all(torch.equal(tensor, other[name]) for name, tensor in wrapped.module.state_dict().items()))
