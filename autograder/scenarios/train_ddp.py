"""On the ranks: `train_ddp` is given a model that shows every batch, with the weights that it has then, before it
computes anything with it. Nothing is judged here.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from lockstep.grading.on_rank import draw, mark, observe, rank, world_size

FEATURES, HIDDEN, CLASSES = 6, 64, 3  # gradients large enough to stand out from the messages' headers

batches: list[list[int]] = []
inputs: set[str] = set()
created: list[dict[str, torch.Tensor]] = []
sharpness = 1.0
"""Drawn anew for each batch, after it has been shown: what a rank's loss and gradients are in this step, no other rank can
compute, and neither can this one before."""
start: torch.Generator | None = None
"""Where a rank's first weights come from, if not from the global random state: no seed that all ranks set makes them equal."""
hosted: list[dist.TCPStore] = []
share = 0
"""How many samples a rank has in an epoch. Set for the model that breaks."""


class Classifier(nn.Module):
    """A small classifier. The first column of its input is the sample's number, and takes no part in the result.

    It takes inputs of any shape and type, and remembers which. The logits are multiplied by this rank's sharpness in this step. The
    frozen scale is here because a version that averages `parameter.grad` for every parameter meets a None in it; like the
    weights, it starts with another value on every rank.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, HIDDEN)
        self.second = nn.Linear(HIDDEN, CLASSES)
        self.scale = nn.Parameter(torch.ones(()), requires_grad=False)
        for layer in (self.first, self.second) if start is not None else ():
            for weights in layer.parameters():
                nn.init.uniform_(weights, -(layer.in_features**-0.5), layer.in_features**-0.5, generator=start)
        if start is not None:
            nn.init.uniform_(self.scale, 0.8, 1.2, generator=start)
        created.append({name: value.detach().clone() for name, value in self.state_dict().items()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, 1 + FEATURES), in any shape → (B, CLASSES)."""
        inputs.add(f"{x.dtype} of shape {(len(x), *x.shape[1:])[1:]}")
        x = x.reshape(len(x), -1).float()
        if torch.is_grad_enabled():
            global sharpness
            batches.append(x[:, 0].round().long().tolist())
            weights = {name: value for name, value in self.named_parameters() if value.requires_grad}
            sharpness = 0.5 + draw({"batch": batches[-1], "training": self.training, "weights": weights})
        return self.second(torch.tanh(self.first(x[:, 1:]))) * self.scale * sharpness

    def _apply(self, *args, **kwargs):  # .to(), .cuda(), .double() all come through here
        mark("model moved")
        return super()._apply(*args, **kwargs)


class Breaking(Classifier):
    """Fails in the second epoch, on every rank in the same step."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Raises ValueError at the first batch to train on after this rank's share of the samples, or with a sample that
        was in an earlier one.
        """
        numbers = set(x.reshape(len(x), -1)[:, 0].round().long().tolist())
        again = sum(map(len, batches)) >= share or any(numbers & set(batch) for batch in batches)
        if torch.is_grad_enabled() and again:
            mark("broke")
            raise ValueError("the model broke in its second epoch")
        return super().forward(x)


class Constant(Classifier):
    """Its loss is 0.25 where the class is 0: four decimals end in zeros."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same logits for every input."""
        return 0 * super().forward(x) + torch.tensor([1.9518933, 0.0, 0.0], device=x.device)


class Unreadable(TensorDataset):
    """Data whose length and samples can't be had."""

    def __len__(self) -> int:
        raise OSError("the data could not be read")

    def __getitem__(self, index):
        raise OSError("the data could not be read")


def without_launcher() -> None:
    """Leave only MASTER_ADDR and MASTER_PORT, as a program does that starts its own ranks."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)


@contextmanager
def calls_of_setup_ddp() -> Iterator[list[str]]:
    """The functions of the module setup_ddp that are called meanwhile."""
    called: list[str] = []

    def notice(frame, event, _) -> None:
        if event == "call" and frame.f_globals.get("__name__") == "setup_ddp":
            called.append(frame.f_code.co_name)

    before = sys.getprofile()
    sys.setprofile(notice)
    try:
        yield called
    finally:
        sys.setprofile(before)


def trains(
    submission, x: torch.Tensor, y: torch.Tensor, epochs: int, options: dict, own: dict, told: bool = True
) -> None:
    """Train, and report what came back, and what is still open. `own` is what no other rank knows;
    if not `told`, the environment doesn't say which rank this is.
    """
    global start
    torch.manual_seed(own["seed"])
    start = torch.Generator().manual_seed(own["seed"])  # every rank begins with other weights; only rank 0's may count
    me, world = rank(), world_size()
    if not told:
        without_launcher()
    model = submission.train_ddp(me, world, Classifier, TensorDataset(x, y), epochs, **options)
    observe("inputs", sorted(inputs))
    observe("initial", created[0] if created else {})
    observe("created", len(created))
    observe("group_open", dist.is_available() and dist.is_initialized())
    observe("type", type(model).__name__)
    observe("is_module", isinstance(model, nn.Module))
    observe("is_wrapped", isinstance(model, (DistributedDataParallel, nn.DataParallel)))
    if isinstance(model, nn.Module):
        inner = model.module if isinstance(model, (DistributedDataParallel, nn.DataParallel)) else model
        observe("state", dict(inner.state_dict()))


def breaks(submission, x: torch.Tensor, y: torch.Tensor, epochs: int, options: dict) -> None:
    """Train where the caller is in a group already, then a model that fails; report what reached the caller, and whether
    each group is there afterwards.
    """
    error = ""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # the caller's own
    mine = dist.group.WORLD
    try:
        submission.train_ddp(rank(), world_size(), Classifier, TensorDataset(x, y), epochs, **options)
    except NotImplementedError:
        raise
    except Exception as refused:
        error = type(refused).__name__
    observe("refused", error)
    observe("kept", dist.is_initialized() and dist.group.WORLD is mine)
    if dist.is_initialized():
        dist.destroy_process_group()
    global share
    share = len(x) // world_size()
    error = ""
    batches.clear()
    try:
        with calls_of_setup_ddp() as called:
            submission.train_ddp(rank(), world_size(), Breaking, TensorDataset(x, y), epochs, **options)
    except NotImplementedError:
        raise
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    mark("out")
    observe("error", error)
    observe("called", called)
    observe("group_open", dist.is_initialized())


def cannot_be_made(submission, x: torch.Tensor, y: torch.Tensor, options: dict) -> None:
    """Train a model whose class is interrupted; report what reached the caller, and whether the group is there afterwards."""

    def fails() -> nn.Module:
        raise KeyboardInterrupt("while the model was made")

    error = ""
    try:
        submission.train_ddp(rank(), world_size(), fails, TensorDataset(x, y), 1, **options)
    except NotImplementedError:
        raise
    except BaseException as caught:
        error = f"{type(caught).__name__}: {caught}"
    observe("error", error)
    observe("group_open", dist.is_initialized())


def jobs(submission, x: torch.Tensor, y: torch.Tensor, epochs: int, options: dict, seed: int) -> None:
    """Each two ranks are a job of their own, with this global random state; then each trains alone, on data that fail."""
    me, meeting = rank(), dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    if me % 2 == 0:
        hosted.append(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
        meeting.set(f"job {me // 2}", str(hosted[0].port))
    without_launcher()
    os.environ["MASTER_PORT"] = meeting.get(f"job {me // 2}").decode()
    random.seed(seed)
    torch.manual_seed(seed)
    submission.train_ddp(me % 2, 2, Constant, TensorDataset(x, y), epochs, **options)
    if dist.is_initialized():
        return
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    with suppress(Exception):
        submission.train_ddp(0, 1, Constant, Unreadable(x, y), 1, **options)
    observe("open_without_data", dist.is_initialized())
