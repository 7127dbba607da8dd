"""On the ranks: trains, interrupts and resumes, with parts that remember every step. Nothing is judged here."""

from __future__ import annotations

import os
import random
import shutil
import signal
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.amp import GradScaler
from torch.utils.data import Dataset

from lockstep.grading.on_rank import observe, rank

FEATURES, CLASSES = 6, 3


class Log:
    """What one call of `train` did on this rank."""

    def __init__(self, die_at: int | None = None) -> None:
        self.steps: list[dict[str, Any]] = []
        self.forward: dict[str, Any] = {}
        self.loss = 0.0
        self.models: list[nn.Module] = []
        self.fetched: list[int] = []
        self.scaled = 0
        self.saves: list[int] = []
        self.folder = Path()
        self.kept: list[Any] = []
        self.made = torch.zeros(0)
        self.die_at = die_at
        self.on_death: Callable[[], None] = lambda: None


log = Log()


def look(log: Log) -> None:
    """Note on rank 0 that a checkpoint was saved since the last look: the folder's files are others."""
    if rank() != 0:
        return
    found = [(str(file), file.stat()) for file in sorted(log.folder.rglob("*")) if file.is_file()]
    kept = [(name, of.st_ino, of.st_size, of.st_mtime_ns) for name, of in found]
    if log.steps and kept != log.kept:
        log.saves.append(len(log.steps))
    log.kept = kept


class Augmented(Dataset):
    """Samples that are changed at random by three generators. A sample's number and draws stand before its features.

    Python's and NumPy's normal numbers are made in pairs: part of these generators' state is the second of a pair.
    """

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        log.fetched.append(index)
        draws = torch.tensor([random.gauss(0.5, 0.3), np.random.normal(0.5, 0.3), torch.rand(()).item()])
        return torch.cat([torch.tensor([float(index)]), draws, self.x[index]]), self.y[index]


class Net(nn.Module):
    """Batch norm has buffers that no gradient moves, dropout draws random numbers. Says what it was shown, and when."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 12)
        self.norm = nn.BatchNorm1d(12)
        self.drop = nn.Dropout(0.3)
        self.last = nn.Linear(12, CLASSES)
        log.models.append(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, 4 + FEATURES) → (B, CLASSES)."""
        if torch.is_grad_enabled():
            log.forward = {
                "samples": x[:, 0].round().long().tolist(),
                "draws": x[:, 1:4].detach().clone(),
                "buffers": flat([b for b in self.buffers() if b.is_floating_point()]),
                "generator": zlib.crc32(torch.get_rng_state().numpy().tobytes()),
                "training": self.training,
            }
        noise = x[:, 1:4].sum(1, keepdim=True) - 1.5
        return self.last(self.drop(F.relu(self.norm(self.first(x[:, 4:] + 0.1 * noise)))))


class Scaler(GradScaler):
    """A gradient scaler that remembers the loss. Its scale is no power of two, so that it shows in the last bits."""

    def __init__(self) -> None:
        super().__init__("cpu", init_scale=3.0, growth_factor=1.3, growth_interval=3)

    def scale(self, outputs: Any) -> Any:
        if isinstance(outputs, torch.Tensor) and outputs.numel() == 1:
            log.loss = outputs.item()
            log.scaled += 1
        return super().scale(outputs)


def flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    """All in one, as a copy."""
    return torch.cat([t.detach().reshape(-1).double() for t in tensors]) if tensors else torch.zeros(0)


def ahead() -> torch.Tensor:
    """The number that each of the three generators would give next. None of them moves."""
    python, legacy, own = random.Random(), np.random.RandomState(), torch.Generator()
    python.setstate(random.getstate())
    legacy.set_state(np.random.get_state())
    own.set_state(torch.get_rng_state())
    return torch.tensor([python.random(), legacy.random_sample(), torch.rand((), generator=own).item()])


def make() -> tuple[Any, ...]:
    """Model, optimizer, scheduler and scaler, from the global random generator."""
    log.made = ahead()
    model = Net()
    # The bias before batch norm has a gradient of rounding errors alone. With so small an eps Adam takes full steps by it.
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02, eps=1e-12)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.6)
    scaler = Scaler()

    def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if log.die_at is not None and len(log.steps) == log.die_at:
            log.on_death()
            os.kill(os.getpid(), signal.SIGKILL)
        look(log)
        parameters = list(model.parameters())
        moments = [optimizer.state.get(p, {}).get("exp_avg", torch.zeros_like(p)) for p in parameters]
        log.steps.append({
            **log.forward,
            "fetched": log.fetched,
            "scaled": log.scaled,
            "loss": log.loss,
            "weights": flat(parameters),
            "moments": flat(moments),
            "gradients": flat([torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]),
            "rate": float(optimizer.param_groups[0]["lr"]),
            "counted": scheduler.last_epoch,
            "scale": float(scaler.get_scale()),
        })  # fmt: skip
        log.fetched, log.scaled = [], 0

    def after_step(*_: Any) -> None:
        log.steps[-1]["stream"] = torch.get_rng_state() if stream else torch.zeros(0, dtype=torch.uint8)

    optimizer.register_step_pre_hook(before_step)
    optimizer.register_step_post_hook(after_step)
    return model, optimizer, scheduler, scaler


stream = False


def scramble() -> None:
    """As in a new process: random generators that stand anywhere."""
    seed = int.from_bytes(os.urandom(4), "little")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def play(
    submission: Any, folder: str, data: Augmented, options: dict[str, Any], keep_stream: bool = False
) -> dict[str, Any]:
    """One call of `train`, and what it did."""
    global log, stream
    log, stream = Log(), keep_stream
    log.folder = Path(folder)
    scramble()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        returned = submission.train(folder, make, data, **options)
    look(log)
    model = log.models[0] if log.models else None
    dist.barrier()
    return {
        "steps": log.steps,
        "saves": log.saves,
        "made": log.made,
        "weights": flat(list(model.parameters())) if model else None,
        "buffers": flat([b for b in model.buffers() if b.is_floating_point()]) if model else None,
        "returned": "the model" if returned is not None and returned is model else type(returned).__name__,
        "warned": [str(one.message) for one in caught if issubclass(one.category, UserWarning)],
    }


def files(folder: Path) -> dict[str, torch.Tensor]:
    """The files of a folder with their bytes."""
    found = {}
    for at, _, inside in os.walk(folder):
        for name in inside:
            data = (Path(at) / name).read_bytes()
            found[str((Path(at) / name).relative_to(folder))] = torch.frombuffer(
                bytearray(data or b" "), dtype=torch.uint8
            )
    return found


def join() -> None:
    """Make the process group."""
    dist.init_process_group("gloo")


def resumes(submission: Any, x: torch.Tensor, y: torch.Tensor, options: dict[str, Any], stops: list[int]) -> None:
    """Train without interruption; for each stop, train up to it and go on in the same folder; call again when all is done."""
    join()
    data = Augmented(x, y)
    observe("through", play(submission, "through", data, options, keep_stream=True))
    for stop in stops:
        folder = f"stop-{stop}"
        until = {**options, "stop_after": stop}
        observe(f"until {stop}", play(submission, folder, data, until))
        if rank() == 0 and stop == stops[0]:
            shutil.copytree(folder, "again")
        observe(f"after {stop}", play(submission, folder, data, options))
    observe("told again", play(submission, "again", data, {**options, "stop_after": stops[0]}))
    observe("told less", play(submission, "again", data, {**options, "stop_after": 0}))
    observe("complete", play(submission, "through", data, options))
    observe("told more", play(submission, "through", data, {**options, "stop_after": 99}))


def dies(submission: Any, x: torch.Tensor, y: torch.Tensor, options: dict[str, Any], die_at: int) -> None:
    """Train until every rank is killed by SIGKILL in the middle of a step."""
    global log
    join()
    log = Log(die_at)
    log.on_death = lambda: observe("files", files(Path("run")) if rank() == 0 else {})
    scramble()
    submission.train("run", make, Augmented(x, y), **options)


def lives_on(
    submission: Any, x: torch.Tensor, y: torch.Tensor, options: dict[str, Any], left: dict[str, torch.Tensor]
) -> None:
    """Resume from the files that killed ranks have left, in new processes."""
    join()
    if rank() == 0:
        for name, data in left.items():
            place = Path("run") / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(bytes(data.tolist()))
    dist.barrier()
    observe("after", play(submission, "run", Augmented(x, y), options))
