"""On the ranks: one start of the job, which may be killed or asked to stop at a given step. Nothing is judged here."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from lockstep.grading.on_rank import mark, observe, rank

FEATURES, HIDDEN, CLASSES = 6, 256, 3  # so many weights that another order of a sum shows in one of them
FOLDER = Path("run")


class Happening:
    """A signal to this process, while so many steps have been done by it.

    `place`: in "make", or in the next step: "forward", or "update", when it has been made, and not yet been counted.
    `again`: it comes a second time at once.
    """

    def __init__(self, number: int, step: int, place: str, again: bool = False) -> None:
        self.number, self.step, self.place, self.again = number, step, place, again
        self.done = False

    def at(self, place: str, done: int) -> None:
        """What comes here, after so many steps."""
        if not self.done and (self.place, self.step) == (place, done):
            self.happen()

    def happen(self) -> None:
        """Send it; Python runs a handler before the next line."""
        self.done = True
        left = files()
        observe("files", left)
        if self.number == signal.SIGKILL:
            os.kill(os.getpid(), signal.SIGKILL)
        mark("signal")
        os.kill(os.getpid(), self.number)
        for _ in range(3):
            pass  # a handler has run by now
        if self.again:
            mark("signal again")
            os.kill(os.getpid(), self.number)
        mark("signal over")
        after = files()
        observe("wrote in the handler", sorted(k for k in after if k not in left or not torch.equal(after[k], left[k])))


steps: list[dict[str, Any]] = []
seen: list[int] = []
models: list[nn.Module] = []
saves: list[int] = []
kept: list[Any] = []
happening: Happening | None = None
dtype = torch.float32


class Net(nn.Module):
    """A sample's number stands before its features. Its buffer counts the steps."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, HIDDEN)
        self.last = nn.Linear(HIDDEN, CLASSES)
        self.register_buffer("turns", torch.zeros((), dtype=torch.int64))
        models.append(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, 1 + FEATURES) → (B, CLASSES)."""
        if torch.is_grad_enabled():
            self.turns += 1
            seen.extend(x[:, 0].round().long().tolist())
            if happening:
                happening.at("forward", len(steps))
        return self.last(F.relu(self.first(x[:, 1:])))


def flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    """All in one, as a copy."""
    return torch.cat([t.detach().reshape(-1) for t in tensors])


def look() -> None:
    """Note on rank 0 that a checkpoint was saved since the last look: the folder's files are others."""
    if rank() != 0:
        return
    found = [(str(file), file.stat()) for file in sorted(FOLDER.rglob("*")) if file.is_file()]
    now = [(name, of.st_ino, of.st_size, of.st_mtime_ns) for name, of in found]
    if steps and now != kept:
        saves.append(len(steps))
    kept[:] = now


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same model on every rank and at every start, and an optimizer that has a state, and changes its rate itself."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = Net().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if happening:
        happening.at("make", 0)

    def before(*_: Any) -> None:
        look()
        parameters = list(model.parameters())
        moments = [optimizer.state.get(p, {}).get("momentum_buffer") for p in parameters]
        steps.append({
            "samples": list(seen),
            "weights": flat(parameters),
            "groups": optimizer.param_groups[0]["lr"],
            "turns": model.turns.clone(),
            "training": model.training,
            "moments": flat([torch.zeros_like(p) if m is None else m for p, m in zip(parameters, moments, strict=True)]),
        })  # fmt: skip
        seen.clear()

    def after(*_: Any) -> None:
        optimizer.param_groups[0]["lr"] *= 0.9  # as optimizers do that keep a number of theirs there
        if happening:
            happening.at("update", len(steps) - 1)

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    return model, optimizer


def files() -> dict[str, torch.Tensor]:
    """The files of the folder with their bytes."""
    found = {}
    for at, _, inside in os.walk(FOLDER):
        for name in inside:
            try:
                data = (Path(at) / name).read_bytes()
            except OSError:
                continue
            content = (
                torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.zeros(0, dtype=torch.uint8)
            )
            found[str((Path(at) / name).relative_to(FOLDER))] = content
    return found


def join(left: dict[str, torch.Tensor]) -> None:
    """Make the process group, and on rank 0 the folder with these files."""
    dist.init_process_group("gloo")
    if rank() == 0:
        for name, data in left.items():
            place = FOLDER / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(bytes(data.tolist()))
    dist.barrier()


def start(
    submission: Any,
    x: torch.Tensor,
    y: torch.Tensor,
    options: dict[str, Any],
    left: dict[str, torch.Tensor] | None = None,
    restart: int = 0,
    signals: dict[str, Any] | None = None,
    earlier: bool = False,
) -> None:
    """One start of the job, in new processes, with the files that the one before has left.

    `signals`: `number`, the `ranks` that get it, `step` (of this start, from 0), `place` and perhaps `again`. `earlier`:
    these processes have been asked to stop before, in a job of another folder.
    """
    global happening, dtype
    dtype = x.dtype
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(restart)
    os.environ["TORCHELASTIC_MAX_RESTARTS"] = "3"
    join(left or {})
    if signals and rank() in signals["ranks"]:
        observe("signal in", signals["step"])
        happening = Happening(signals["number"], signals["step"], signals["place"], signals.get("again", False))
    numbers = torch.arange(len(x), dtype=x.dtype).unsqueeze(1)
    dataset = TensorDataset(torch.cat([numbers, x], 1), y)
    if earlier:
        happening = Happening(signal.SIGTERM, 0, "forward")
        submission.train(Path("another"), make, dataset, **options | {"steps": 2})
        happening = None
        for noted in (steps, seen, models, saves, kept):
            noted.clear()
    mark("train")
    returned = submission.train(FOLDER, make, dataset, **options)
    mark("returned")
    look()
    observe("saves", saves)
    observe("done", returned if isinstance(returned, int) else type(returned).__name__)
    observe("steps", steps)
    observe("weights", flat(list(models[-1].parameters())) if models else None)
    observe("files", files() if rank() == 0 else {})


def refuses(
    submission: Any, x: torch.Tensor, y: torch.Tensor, options: dict[str, Any], left: dict[str, torch.Tensor]
) -> None:
    """Calls with what it must refuse, in an empty folder and in one with these files."""
    join(left)
    numbers = torch.arange(len(x), dtype=x.dtype).unsqueeze(1)
    for folder in (Path("empty"), FOLDER):
        try:
            returned = submission.train(folder, make, TensorDataset(torch.cat([numbers, x], 1), y), **options)
        except Exception as error:
            observe(str(folder), type(error).__name__)
        else:
            observe(str(folder), f"it returned {returned}")
