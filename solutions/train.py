"""Exercise train: the whole script, for torchrun on one node or many, and for SLURM (`train.sbatch`).

Chapter 5, "Before a long run". It trains on scikit-learn's handwritten digits, on CPU in seconds:

    torchrun --nproc-per-node=2 exercises/train.py --epochs 12

or a small GPT on the characters of Python's own library, for which you want a GPU:

    torchrun --nproc-per-node=gpu exercises/train.py --task gpt --epochs 2 --batch-size 256 --amp

Kill it and start it again with the same `--folder`: it continues after the last saved step. `--exact` makes that bit for
bit the same on any number of ranks, for some speed. The file needs only torch and, for the digits, scikit-learn. Take it
with you.
"""

import argparse
import errno  # solution-only
import fcntl  # solution-only
import json  # solution-only
import math
import os
import signal
import sys
import sysconfig
import time  # solution-only
import zipfile  # solution-only
from collections.abc import Iterator
from contextlib import nullcontext, suppress  # solution-only
from dataclasses import dataclass
from datetime import timedelta  # solution-only
from pathlib import Path
from types import FrameType
from typing import IO, Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer
from torch.utils.data import (
    DataLoader,  # solution-only
    Dataset,
    DistributedSampler,  # solution-only
    Subset,  # solution-only
    TensorDataset,
)

Pairs = Dataset[tuple[torch.Tensor, ...]]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train with DDP.")
    parser.add_argument("--task", choices=("digits", "gpt"), default="digits")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=48, help="samples a step, of all ranks together")
    parser.add_argument("--accumulate", type=int, default=1, help="in how many parts each rank works through its share")
    parser.add_argument("--lr", type=float, default=0.01, help="the largest learning rate")
    parser.add_argument("--clip", type=float, default=1.0, help="the largest norm of the gradient")
    parser.add_argument("--amp", action="store_true", help="forward and loss under autocast to bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("runs/train"), help="checkpoints; seen by rank 0's node")
    parser.add_argument("--save-every", type=int, default=50, help="steps from one checkpoint to the next")
    parser.add_argument("--log-every", type=int, default=20, help="steps from one line of progress to the next")
    parser.add_argument("--exact", action="store_true", help="a restarted job ends with the same bits, on any ranks")
    parser.add_argument("--compile", action="store_true", help="compile the model; the first step takes longer")
    parser.add_argument("--workers", type=int, default=0, help="processes on each rank that load its data")
    return parser.parse_args(arguments)


@dataclass(frozen=True)
class Result:
    """How the job ended: steps done and planned and, once training is complete, loss and accuracy on the test set."""

    steps: int
    of: int
    loss: float | None = None
    accuracy: float | None = None


# What is trained, and on what: given ---------------------------------------------------------------------------------


def datasets(task: str) -> tuple[Pairs, Pairs]:
    """The training and the test set: pairs of an input and a class, or of 64 characters and, for each, the next one."""
    if task == "digits":
        from sklearn.datasets import load_digits

        digits = load_digits()
        inputs = torch.tensor(digits.data, dtype=torch.float32) / 16
        classes = torch.tensor(digits.target, dtype=torch.long)
        order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
        train, test = order[:1437], order[1437:]
        return TensorDataset(inputs[train], classes[train]), TensorDataset(inputs[test], classes[test])
    library = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(file.read_bytes() for file in sorted(library.glob("*.py")))[: 1 << 20]
    characters = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().clamp(max=127)
    windows = characters[: len(characters) // 65 * 65].view(-1, 65)
    inputs, following = windows[:, :-1], windows[:, 1:]
    held_out = len(windows) // 20
    return TensorDataset(inputs[held_out:], following[held_out:]), TensorDataset(
        inputs[:held_out], following[:held_out]
    )


class GPT(nn.Module):
    """A small transformer over characters: (B, T) numbers below 128 → (B, T, 128) logits of the next one."""

    def __init__(self, width: int = 128, layers: int = 4, heads: int = 4, length: int = 64) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(128, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T) → (B, T, 128)."""
        length = x.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=x.device)
        hidden = self.characters(x) + self.places(torch.arange(length, device=x.device))
        # With is_causal the layers compute attention in one kernel (scaled_dot_product_attention).
        return self.head(self.norm(self.layers(hidden, mask=mask, is_causal=True)))


def build_model(task: str) -> nn.Module:
    """A new model. Neither has dropout: a step depends only on the weights, the optimizer and the samples."""
    if task == "digits":
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    return GPT()


def rate(step: int, steps: int, largest: float) -> float:
    """The learning rate of a step: it rises for the first twentieth, then falls along a cosine. It needs no state."""
    warm = max(1, steps // 20)
    return largest * min((step + 1) / warm, 0.5 * (1 + math.cos(math.pi * step / steps)) + 0.01)


# The distributed parts -----------------------------------------------------------------------------------------------


def join() -> torch.device:
    """Join the process group that torchrun describes in the environment (address, port, ranks).

    Returns:
        This rank's device. On a node with GPUs it is the GPU with the rank's number *on that node*, made the current
        device before the group is created, and the backend is nccl; otherwise the CPU, with gloo.
    """
    # --- solution: join the process group ---
    # No step takes five minutes: a rank that is missing for so long is gone. Saves have a group of their own.
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device, timeout=timedelta(minutes=5))
        return device
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    return torch.device("cpu")
    # --- end ---


# --- solution-only ---
_patient: list[Any] = []


def patient() -> Any:
    """A second process group: for CPU tensors, so that no question waits for a GPU, and with time for large checkpoints."""
    if not _patient:
        _patient.append(dist.new_group(backend="gloo", timeout=timedelta(hours=1)))
    return _patient[0]


# --- end ---


class StopRequest:
    """Remembers SIGTERM and SIGUSR1. A handler can run between any two instructions, so it only sets a flag."""

    def __init__(self) -> None:
        self.made = False
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.made = True


def save(path: Path, state: dict[str, Any]) -> None:
    """Replace the checkpoint `path` by `state`. Every rank calls it; no rank returns before the file is there.

    One rank writes. If the job is killed at any moment, either the old or the new file is there, complete. After `save`
    returns, the new one is there, even after a power failure. The solution keeps the replaced file as `checkpoint.old`, and
    the one before it as `checkpoint.older`. Raises RuntimeError on every rank if the file could not be written.
    """
    # --- solution: save, atomically and durably ---
    problem: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replaced = path.with_suffix(".replaced")
            replaced.unlink(missing_ok=True)
            with suppress(OSError):  # there is none yet, or the file system has no hard links
                os.link(path, replaced)  # a second name: `path` itself is never missing
            unfinished = path.with_suffix(".tmp")
            with open(unfinished, "wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, path)
            if replaced.exists():  # last: until here an older one may be the only whole one
                with suppress(FileNotFoundError):
                    os.replace(path.with_suffix(".old"), path.with_suffix(".older"))
                os.replace(replaced, path.with_suffix(".old"))
            folder = os.open(path.parent, os.O_RDONLY)
            os.fsync(folder)  # the name, too, has to reach the disk
            os.close(folder)
        except Exception as error:
            problem[0] = f"{path} was not saved: {type(error).__name__}: {error}"
    # A meeting, like a barrier, in which a failure reaches every rank.
    dist.broadcast_object_list(problem, src=0, group=patient())
    if problem[0]:
        raise RuntimeError(problem[0])
    # --- end ---


def load(path: Path) -> dict[str, Any] | None:
    """The checkpoint `path`, or None if there is none; the same on every rank.

    Read it with `weights_only=True`. In the solution rank 0 reads it and sends it to the others, not through GPU memory:
    not every node needs to see the folder. That suits checkpoints of a few GB; every rank should read larger ones itself
    (chapter 5, "Who writes, who reads"), or each its part, with `torch.distributed.checkpoint` (chapter 6).

    The solution skips damaged files, says so on rank 0, and returns the newest intact one. If no file is intact it raises
    RuntimeError on every rank rather than start over. The check doesn't ask for that.
    """
    # --- solution: load the same on every rank ---
    state: Any = None
    damaged: list[str] = []
    newest_first = (path, path.with_suffix(".old"), path.with_suffix(".older"))
    for file in newest_first if dist.get_rank() == 0 else ():
        try:
            with zipfile.ZipFile(file) as archive:  # torch.load does not look at the checksums
                if (record := archive.testzip()) is not None:
                    raise zipfile.BadZipFile(f"wrong checksum of {record}")
            state = torch.load(file, map_location="cpu", weights_only=True)
            break
        except FileNotFoundError:
            pass
        except Exception as error:
            damaged.append(f"{file} cannot be read: {type(error).__name__}: {error}")
    told = [state, "; ".join(damaged)]
    dist.broadcast_object_list(told, src=0, group=patient())
    state, problem = told
    if problem and state is None:
        raise RuntimeError(f"no whole checkpoint: {problem}")
    if problem:
        say(dist.get_rank(), f"{problem}; going on from the one before")
    return state
    # --- end ---


def batches(
    dataset: Pairs, epoch: int, skip: int, batch_size: int, accumulate: int, seed: int, workers: int = 0
) -> Iterator[Any]:
    """This rank's micro-batches of an epoch (from 0), without those of its first `skip` steps.

    A step uses `batch_size` samples over all ranks, an equal share on each, in `accumulate` micro-batches of equal
    size. An epoch has `len(dataset) // batch_size` steps; samples left over are dropped. The order is that of
    `DistributedSampler(dataset, seed=seed, drop_last=True)`, a different one in each epoch.
    """
    # --- solution: deal out the samples ---
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, seed=seed, drop_last=True)
    sampler.set_epoch(epoch)
    share = batch_size // dist.get_world_size()
    steps = len(dataset) // batch_size  # type: ignore[arg-type]
    order = list(sampler)[skip * share : steps * share]
    # Pages that the GPU copies from by itself, while the step before is computed.
    pin = torch.cuda.is_available()
    yield from DataLoader(Subset(dataset, order), share // accumulate, num_workers=workers, pin_memory=pin)
    # --- end ---


def loss_of(
    model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, amp: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean cross-entropy of a batch and the number of correct predictions; given."""
    with torch.autocast(inputs.device.type, dtype=torch.bfloat16, enabled=amp):
        logits = model(inputs).flatten(0, -2)
        loss = F.cross_entropy(logits, targets.flatten())
    return loss, (logits.argmax(1) == targets.flatten()).sum()


def train_step(model: DDP, optimizer: Optimizer, micro_batches: list[Any], clip: float, amp: bool) -> torch.Tensor:
    """One step of the optimizer, on the gradient of the mean over all ranks' micro-batches.

    Average the gradients over the ranks once, with the last micro-batch, and clip them after that.

    Returns:
        This rank's mean loss before the step, a tensor without gradient on its device.
    """
    # --- solution: accumulate, average once, clip, step ---
    device = next(model.parameters()).device
    total = torch.zeros((), device=device)
    optimizer.zero_grad()
    for number, (inputs, targets) in enumerate(micro_batches, 1):
        # Inside no_sync DDP adds to the gradients of this rank only; forward has to be in there as well.
        with nullcontext() if number == len(micro_batches) else model.no_sync():
            inputs, targets = inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)
            loss, _ = loss_of(model, inputs, targets, amp)
            loss = loss / len(micro_batches)
            loss.backward()
        total += loss.detach()
    model.gradient_norm = nn.utils.clip_grad_norm_(model.parameters(), clip)  # for the log, still on the device
    optimizer.step()
    return total
    # --- end ---


@torch.no_grad()
def evaluate(
    model: nn.Module, dataset: Pairs, device: torch.device, amp: bool, batch_size: int = 256
) -> tuple[float, float]:
    """Mean loss and accuracy over the whole dataset, each sample counted once, the same numbers on every rank.

    The ranks share the work, even if it can't be divided evenly. `model` is the model itself: DDP's forward may call
    collectives, which ranks with fewer batches would not join.
    """
    # --- solution: evaluate, every sample once ---
    mine = Subset(dataset, range(dist.get_rank(), len(dataset), dist.get_world_size()))  # type: ignore[arg-type]
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # loss, right ones, how many
    model.eval()
    for inputs, targets in DataLoader(mine, batch_size):
        loss, right = loss_of(model, inputs.to(device), targets.to(device), amp)
        sums += torch.stack(
            [loss.double() * targets.numel(), right.double(), torch.full_like(loss, targets.numel()).double()]
        )
    model.train()
    dist.all_reduce(sums)
    return (sums[0] / sums[2]).item(), (sums[1] / sums[2]).item()
    # --- end ---


# --- solution-only ---
def make_optimizer(model: nn.Module, lr: float, device: torch.device) -> Optimizer:
    """AdamW in one kernel. Only matrices decay: biases and norms are few, and small ones are not simpler."""
    matrices = [one for one in model.parameters() if one.dim() > 1]
    others = [one for one in model.parameters() if one.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, fused=device.type in ("cuda", "cpu"))


def random_states() -> list[dict[str, Any]]:
    """Those of every rank, in order. There is no dropout here; where there is, a restarted job draws on."""
    own = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        own["cuda"] = torch.cuda.get_rng_state()
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, own, group=patient())
    return states


def claim(folder: Path) -> None:
    """Keep other jobs out of the folder as long as this one lives. Raises RuntimeError on every rank if one is there."""
    problem: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _lock.append(open(folder / "lock", "w"))  # noqa: SIM115  open as long as the process lives
            fcntl.flock(_lock[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel lets go of it, however the process ends
        except BlockingIOError:
            problem[0] = f"another job works in {folder}: give each its own --folder"
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP):  # some file systems have no locks
                problem[0] = f"{folder} cannot be used: {error}"
    dist.broadcast_object_list(problem, src=0, group=patient())
    if problem[0]:
        raise RuntimeError(problem[0])


_lock: list[IO[str]] = []
PEAKS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}  # dense bfloat16 operations a second


class Log:
    """How the last steps went: a line for people, and one of JSON for machines in `log.jsonl`."""

    def __init__(self, folder: Path, device: torch.device, weights: int) -> None:
        self.file, self.device, self.weights = folder / "log.jsonl", device, weights
        gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        self.peak = next((peak for known, peak in PEAKS.items() if known in gpu), None)
        self.since, self.waited = time.perf_counter(), 0.0

    def timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The same batches. The time until each has come counts as waiting."""
        while True:
            before = time.perf_counter()
            batch = next(batches, None)
            self.waited += time.perf_counter() - before
            if batch is None:
                return
            yield batch

    def write(self, step: int, steps: int, samples: int, tokens: int, **numbers: float) -> None:
        """On rank 0. `samples` were trained on by all ranks since the last line, each of `tokens` predictions."""
        now = time.perf_counter()
        numbers["samples_per_second"] = samples / (now - self.since)
        numbers["waiting_for_data"], said = self.waited / (now - self.since), ""
        if self.device.type == "cuda":
            numbers["memory_gb"] = torch.cuda.max_memory_allocated(self.device) / 1e9
            said = f"  {numbers['memory_gb']:.1f} GB"
        if self.peak:  # 6 operations for each weight and token: forward and backward
            each = 6 * self.weights * tokens * numbers["samples_per_second"] / dist.get_world_size()
            numbers["mfu"] = each / self.peak
            said += f"  MFU {numbers['mfu']:.1%}"
        say(0, f"step {step}/{steps}  loss {numbers['loss']:.4f}  {numbers['samples_per_second']:,.0f} samples/s{said}")
        with suppress(OSError), open(self.file, "a", encoding="utf-8") as file:  # if there is no room, a save says so
            file.write(json.dumps({"step": step, **numbers}) + "\n")
        self.since, self.waited = now, 0.0


# --- end ---


def train(arguments: argparse.Namespace, device: torch.device) -> Result:
    """Train to the last epoch, from the checkpoint in `arguments.folder` if there is one.

    - Build the model after `torch.manual_seed(seed)`; all ranks start with equal weights. The optimizer is AdamW with
      the learning rate `rate(step, …)`.
    - A checkpoint (`checkpoint.pt` in the folder) holds the number of steps done, the weights and the optimizer's
      state. Save it every `save_every` steps, after the last step, and when the job is asked to stop.
    - After each step one small collective tells every rank whether any rank was asked to stop (`StopRequest`). If one was,
      all stop after the same step and save.
    - Interrupted anywhere and restarted on the same number of ranks, it ends with the same weights.
    - Only rank 0 prints: where training starts, the global loss every `log_every` steps, and after each epoch the loss
      and accuracy on the test set.

    The check asks for no `--exact`, `--compile` or `--workers`. In the solution, only `--exact` keeps the order of sums on
    more than two ranks. Its checkpoints also have each rank's random states.

    Raises:
        ValueError: `batch_size` can't be divided evenly among the ranks and their micro-batches.
    """
    # --- solution: train, evaluate, save, stop, and go on ---
    rank, world_size = dist.get_rank(), dist.get_world_size()
    parts = world_size * arguments.accumulate
    if arguments.batch_size % parts:
        raise ValueError(f"--batch-size {arguments.batch_size} is no multiple of {parts} (ranks times --accumulate)")
    stop = StopRequest()
    training_set, test_set = datasets(arguments.task)
    an_epoch = len(training_set) // arguments.batch_size  # type: ignore[arg-type]
    steps = an_epoch * arguments.epochs

    if device.type == "cuda" and not arguments.exact:
        torch.set_float32_matmul_precision("high")  # TF32: float32's range with 10 bits of mantissa
    torch.manual_seed(arguments.seed)
    model = build_model(arguments.task).to(device)
    optimizer = make_optimizer(model, arguments.lr, device)
    path = arguments.folder / "checkpoint.pt"
    step = 0
    claim(arguments.folder)
    saved = load(path)
    if saved is not None:
        step = saved["step"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        if len(states := saved.get("random", [])) == world_size:  # on other ranks no state fits
            torch.set_rng_state(states[rank]["cpu"])
            if device.type == "cuda" and "cuda" in states[rank]:
                torch.cuda.set_rng_state(states[rank]["cuda"])
    if arguments.compile:
        model.compile()  # in place: the names in the checkpoint stay
    # By default DDP orders its buckets anew after the first step, as the gradients came, and the gradients lie in them. So a
    # restarted job adds in another order for one step, which changes last bits. When it looks for unused parameters, DDP
    # leaves the buckets alone (chapter 5, "Determinism"); that costs a walk over the graph and an all-reduce a step.
    ddp = DDP(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        find_unused_parameters=arguments.exact,
        gradient_as_bucket_view=not arguments.exact,
    )
    say(rank, f"{world_size} ranks, {device.type}; {step} of {steps} steps are done")
    log = Log(arguments.folder, device, sum(one.numel() for one in model.parameters()))

    loss = accuracy = None
    for epoch in range(step // an_epoch, arguments.epochs):
        given = arguments.batch_size, arguments.accumulate, arguments.seed, arguments.workers
        mine = log.timed(batches(training_set, epoch, step % an_epoch, *given))
        for micro_batches in zip(*[mine] * arguments.accumulate, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate(step, steps, arguments.lr)
            own = train_step(ddp, optimizer, list(micro_batches), arguments.clip, arguments.amp)
            step += 1
            # One answer for all: was anyone asked to stop? It goes over the CPUs, so that it does not wait for the GPU's step.
            told = torch.tensor(float(stop.made))
            dist.all_reduce(told, group=patient())
            stopping = told.item() > 0
            if step % arguments.log_every == 0:
                dist.all_reduce(own)
                loss, norm = own.item() / world_size, float(ddp.gradient_norm)  # here the CPU waits for the GPU
                if not math.isfinite(loss) or not math.isfinite(norm):  # on all ranks alike
                    raise FloatingPointError(
                        f"step {step}: loss {loss}, gradient norm {norm}; the last checkpoint is older"
                    )
                if rank == 0:
                    samples, tokens = arguments.log_every * arguments.batch_size, micro_batches[0][1][0].numel()
                    log.write(step, steps, samples, tokens, loss=loss, gradient_norm=norm, lr=group["lr"])
            if stopping or step % arguments.save_every == 0 or step == steps:
                state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
                save(path, state | {"random": random_states()})
            if stopping and step < steps:
                say(rank, f"asked to stop: saved behind step {step} of {steps}")
                return Result(step, steps)
        loss, accuracy = evaluate(model, test_set, device, arguments.amp)
        say(rank, f"epoch {epoch + 1}/{arguments.epochs}  test loss {loss:.4f}  test accuracy {accuracy:.4f}")
    if accuracy is None:  # there was nothing left to train
        loss, accuracy = evaluate(model, test_set, device, arguments.amp)
        say(rank, f"complete  test loss {loss:.4f}  test accuracy {accuracy:.4f}")
    return Result(step, steps, loss, accuracy)
    # --- end ---


def say(rank: int, line: str) -> None:
    """Print on rank 0, without buffering."""
    if rank == 0:
        print(line, flush=True)


def main(arguments: list[str] | None = None) -> Result:
    """Run the script, from the command line to the end of the process group."""
    parsed = parse(arguments)
    device = join()
    result = train(parsed, device)
    # Only after success: after an error the other ranks may be gone, and nccl would wait for them before the error is printed.
    dist.destroy_process_group()
    return result


if __name__ == "__main__":
    main()
    if not torch.cuda.is_available():
        # gloo's threads now and then abort a finished process while the interpreter shuts down: leave without that. It also
        # leaves out what waits for the end (atexit): with nccl there is no need for it.
        sys.stdout.flush()
        os._exit(0)

# lockstep-canary: 2bf9e822a8bf431f
