"""On the ranks: one start of the script, on small data that is counted, or on the digits. Nothing is judged here."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import TensorDataset

from lockstep.grading.on_rank import mark, observe, rank

FEATURES, CLASSES = 6, 3
FOLDER = Path("runs", "job")  # nested, as the default is: neither of the two exists at first

steps: list[dict[str, Any]] = []
seen: list[list[int]] = []
tested: list[list[int]] = []
tested_after: set[int] = set()
precision: set[str] = set()
modes: dict[str, set[bool]] = {"train": set(), "evaluate": set()}
models: list[nn.Module] = []


class Net(nn.Module):
    """A sample's number stands before its features; those of the test set are negative.

    It predicts twice for each sample, as the GPT does for each character, and both times the same.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 10)
        self.last = nn.Linear(10, CLASSES)
        models.append(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, 1 + FEATURES) → (B, 2, CLASSES)."""
        numbers = x[:, 0].round().long().tolist()
        if numbers[0] < 0:
            tested.append(numbers)
            tested_after.add(len(steps))
            modes["evaluate"].add(self.training)
        elif torch.is_grad_enabled():  # a second look without gradients trains nothing
            seen.append(numbers)
            modes["train"].add(self.training)
            about_to("forward")
        hidden = self.first(x[:, 1:])
        precision.add(str(hidden.dtype))
        return twice(self.last(F.relu(hidden)))


def twice(one: torch.Tensor) -> torch.Tensor:
    """Each row two times."""
    return one.unsqueeze(1).expand(-1, 2, *one.shape[1:])


happening: dict[str, Any] = {}


def about_to(what: str) -> None:
    """Send this process its signal, when this is the moment for it."""
    mine = rank() in happening.get("ranks", ()) and not happening.get("done")
    if not mine or happening["step"] != len(steps) - (what != "forward"):
        return
    if (what == "forward") != happening["before"]:
        return
    happening["done"] = True
    left = files()
    observe("files", left)
    mark("signal")
    os.kill(os.getpid(), happening["number"])
    for _ in range(3):
        pass  # a handler has run by now
    mark("signal over")
    after = files()
    observe("wrote in the handler", sorted(k for k in after if k not in left or not torch.equal(after[k], left[k])))


def flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    """All in one, as a copy."""
    return torch.cat([t.detach().reshape(-1).float() for t in tensors])


def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Note what the step is made of, in the order of the model, whatever groups the optimizer has."""
    given = [p for group in optimizer.param_groups for p in group["params"]]
    parameters = next((own for model in models if {*given} == {*(own := list(model.parameters()))}), given)
    moments = [optimizer.state.get(p, {}).get("exp_avg") for p in parameters]
    steps.append({
        "samples": [list(one) for one in seen],
        "weights": flat(parameters),
        "gradient": flat([torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]),
        "moments": flat([torch.zeros_like(p) if m is None else m for p, m in zip(parameters, moments, strict=True)]),
        "rate": float(optimizer.param_groups[0]["lr"]),
    })  # fmt: skip
    seen.clear()
    note_checkpoint()
    mark("step")


checkpoints: list[tuple[int, int]] = []


def note_checkpoint() -> None:
    """Which file was the checkpoint at this moment: number and time, (0, 0) for none."""
    try:
        now = (FOLDER / "checkpoint.pt").stat()
    except OSError:
        checkpoints.append((0, 0))
    else:
        checkpoints.append((now.st_ino, now.st_mtime_ns))


def after_step(*_: Any) -> None:
    """The weights are new; nothing has been counted."""
    about_to("count")


def files() -> dict[str, torch.Tensor]:
    """The files of the folder with their bytes."""
    found = {}
    for at, _, inside in os.walk(FOLDER):
        for name in inside:
            with contextlib.suppress(OSError):
                data = (Path(at) / name).read_bytes()
                content = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)
                found[str((Path(at) / name).relative_to(FOLDER))] = content
    return found


def script(submission: Any, arguments: list[str]) -> None:
    """Call the script's main and note what it returned."""
    register_optimizer_step_pre_hook(before_step)
    register_optimizer_step_post_hook(after_step)
    result = submission.main([*arguments, "--folder", str(FOLDER)])
    mark("returned")
    numbers = {name: getattr(result, name, None) for name in ("steps", "of", "loss", "accuracy")}
    observe("result", {key: float(value) if value is not None else None for key, value in numbers.items()})


def start(
    submission: Any,
    arguments: list[str],
    train: tuple[torch.Tensor, torch.Tensor],
    test: tuple[torch.Tensor, torch.Tensor],
    left: dict[str, torch.Tensor] | None = None,
    signals: dict[str, Any] | None = None,
) -> None:
    """One start of the script on counted samples, with the files that the one before has left."""
    happening.update(signals or {})
    observe("signal in", happening.get("step", 0))
    for name, data in (left or {}).items() if rank() == 0 else ():
        place = FOLDER / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(bytes(data.tolist()))

    def datasets(task: str) -> tuple[TensorDataset, TensorDataset]:
        numbers = torch.arange(len(train[0]), dtype=torch.float32), -1 - torch.arange(len(test[0]), dtype=torch.float32)
        both = (
            TensorDataset(torch.cat([number.unsqueeze(1), x], 1), twice(y))
            for number, (x, y) in zip(numbers, (train, test), strict=True)
        )
        return tuple(both)

    submission.datasets = datasets
    submission.build_model = lambda task: Net()
    evaluate = submission.evaluate

    def evaluates(model: nn.Module, *arguments: Any, **more: Any) -> Any:
        evaluated.add(type(model).__name__)
        return evaluate(model, *arguments, **more)

    evaluated: set[str] = set()
    submission.evaluate = evaluates
    script(submission, arguments)
    note_checkpoint()
    observe("checkpoints", checkpoints)
    observe("evaluated", sorted(evaluated))
    observe("steps", steps)
    observe("tested", tested)
    observe("tested after", sorted(tested_after))
    observe("precision", sorted(precision))
    observe("modes", {kind: sorted(found) for kind, found in modes.items()})
    observe("kept in", sorted({str(p.dtype) for p in models[-1].parameters()}) if models else [])
    observe("weights", flat(list(models[-1].parameters())) if models else None)
    observe("files", files() if rank() == 0 else {})


def on_hosts(submission: Any, **given: Any) -> None:
    """A start on a host of its own for each node; notes where the ranks meet, and who writes into the folder."""
    wrote: set[str] = set()
    make, write = dist.init_process_group, torch.save

    def note(path: Any) -> None:
        if isinstance(path, (str, os.PathLike)) and FOLDER.resolve() in Path(path).resolve().parents:
            wrote.add(Path(path).name)

    def init_process_group(*arguments: Any, **more: Any) -> None:
        method = str(more.get("init_method") or "env://")
        observe("met at", os.environ["MASTER_ADDR"] if method.startswith("env:") else method)
        make(*arguments, **more)

    def save(content: Any, file: Any, *arguments: Any, **more: Any) -> None:
        note(getattr(file, "name", file))
        write(content, file, *arguments, **more)

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR):
            note(arguments[0])

    observe("told", os.environ["MASTER_ADDR"])
    observe("host", socket.gethostname())
    dist.init_process_group, torch.save = init_process_group, save
    sys.addaudithook(hear)
    start(submission, **given)
    observe("wrote", sorted(wrote))


def digits(submission: Any, arguments: list[str]) -> None:
    """The script as it is, on the digits."""
    script(submission, arguments)
    observe("steps made", len(steps))


def steps_once(
    submission: Any, train: tuple[torch.Tensor, torch.Tensor], samples: list[list[list[int]]], seed: int
) -> None:
    """Call train_step once, with micro-batches of these samples for each rank."""
    device = submission.join()
    torch.manual_seed(seed)
    model = Net().to(device)
    parts = [
        (torch.cat([torch.tensor(one)[:, None], train[0][one]], 1), twice(train[1][one])) for one in samples[rank()]
    ]
    wrapped = DistributedDataParallel(model)
    loss = submission.train_step(wrapped, torch.optim.AdamW(model.parameters(), 0.05), parts, 1000.0, False)
    observe("loss", float(loss))
    observe("graph", bool(getattr(loss, "requires_grad", False)))
    dist.destroy_process_group()


def refuses(submission: Any, arguments: list[str]) -> None:
    """Arguments that it must refuse, and how many steps it made before that."""
    made: list[Any] = []
    register_optimizer_step_pre_hook(lambda *_: made.append(None))
    try:
        submission.main([*arguments, "--folder", str(FOLDER)])
    except NotImplementedError:
        raise
    except (Exception, SystemExit) as error:
        observe("refused", "ValueError" if isinstance(error, ValueError) else type(error).__name__)
    else:
        observe("refused", "nothing")
    observe("made", len(made))
    sys.stdout.flush()


def joins(submission: Any, devices: int) -> None:
    """Call join on a machine whose torch says that a node has so many GPUs (0: none)."""
    chosen: list[str] = []
    given: list[str] = []
    make = dist.init_process_group

    def set_device(device: Any) -> None:
        chosen.append(str(torch.device("cuda", device) if isinstance(device, int) else torch.device(device)))

    def current() -> int:
        return torch.device(chosen[-1]).index or 0 if chosen else 0

    def init_process_group(backend: Any = None, *arguments: Any, **more: Any) -> None:
        given.append(str(backend or ""))
        observe("chosen before the group", list(chosen))
        more.pop("device_id", None)
        make("gloo", *arguments, **more)

    for name, pretended in {
        "is_available": lambda: devices > 0, "device_count": lambda: devices, "set_device": set_device,
        "current_device": current, "is_initialized": lambda: devices > 0,
    }.items():  # fmt: skip
        setattr(torch.cuda, name, pretended)
    for name, pretended in {
        "is_available": lambda: devices > 0, "device_count": lambda: devices, "set_device_index": set_device,
        "set_device_idx": set_device, "current_device_index": current, "current_device_idx": current,
        "current_accelerator": lambda check_available=False: torch.device("cuda") if devices else None,
    }.items():  # fmt: skip
        setattr(torch.accelerator, name, pretended)
    dist.is_nccl_available = lambda: devices > 0
    dist.init_process_group = init_process_group
    device = torch.device(submission.join())
    observe("device", str(device))
    observe("chosen", chosen)
    observe("backend", given[-1] if given else "none")


def saves(submission: Any) -> None:
    """Save while the writer is slow, load, and save where it cannot be done; notes what happens to files."""
    submission.join()
    operations: list[dict[str, Any]] = []
    trusting: list[bool] = []
    read = torch.load

    def load(*arguments: Any, **more: Any) -> Any:
        # broadcast_object_list unpickles tensors by torch.load as well.
        if not str(sys._getframe(1).f_globals.get("__name__")).startswith("torch."):
            trusting.append(more.get("weights_only") is False)
        return read(*arguments, **more)

    torch.load = load
    write, path = torch.save, FOLDER / "checkpoint.pt"

    def note(kind: str, place: Any, **more: Any) -> None:
        with contextlib.suppress(OSError, AttributeError, TypeError, ValueError):
            place = place.fileno() if hasattr(place, "fileno") else place
            inode = (os.fstat if isinstance(place, int) else os.stat)(place).st_ino
            name = os.path.basename(
                os.readlink(f"/proc/self/fd/{place}") if isinstance(place, int) else os.fspath(place)
            )
            operations.append({"kind": kind, "name": name, "inode": inode, **more})

    full: list[bool] = []

    def save(content: Any, file: Any, *arguments: Any, **more: Any) -> None:
        if full:
            full.append(True)
            if hasattr(file, "write"):
                raise OSError(errno.ENOSPC, "No space left on device")
            raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")
        time.sleep(0.5)
        write(content, file, *arguments, **more)
        note("write", file)

    def around(name: str, kind: str) -> None:
        real = getattr(os, name)

        def operation(place: Any, *arguments: Any, **more: Any) -> Any:
            target = (*arguments, *more.values())
            folder = os.stat(os.path.dirname(os.path.abspath(target[0]))).st_ino if kind == "rename" else 0
            note(kind, place, folder=folder)
            return real(place, *arguments, **more)

        setattr(os, name, operation)

    torch.save = save
    for name, kind in (("fsync", "fsync"), ("fdatasync", "fsync"), ("replace", "rename"), ("rename", "rename")):
        around(name, kind)
    FOLDER.parent.mkdir(exist_ok=True)
    submission.save(path, {"model": {"weight": torch.full((2000,), float(rank()))}, "step": 7 + rank()})
    observe("there", path.is_file())
    dist.barrier()
    observe("operations", operations)
    observe("inodes", [path.stat().st_ino, path.parent.stat().st_ino])
    loaded = submission.load(path)
    observe("trusting", any(trusting))
    observe("loaded", [loaded["step"], loaded["model"]["weight"].unique().tolist()] if loaded else None)
    observe("nothing", submission.load(FOLDER / "other.pt"))
    if rank() == 0:
        Path("a-file").touch()
    for name, place in (("error", Path("a-file/checkpoint.pt")), ("error on a full disk", path)):
        dist.barrier()  # the error of the one before has reached all
        full[:] = [True] if place == path else []
        try:
            submission.save(place, {"step": 8})
        except (Exception, SystemExit) as error:
            observe(name, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
            observe(f"another {name}", "" if isinstance(error, RuntimeError) else type(error).__name__)
        else:
            observe(name, "")
            observe(f"another {name}", "")
    dist.barrier()
    observe("disk was full", len(full) > 1)
