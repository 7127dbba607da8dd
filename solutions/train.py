"""Exercise train: the whole script, for torchrun on one node or many, and for SLURM (`train.sbatch`).

Chapter 5, "Before a long run". It trains on scikit-learn's handwritten digits, on CPU in seconds:

    torchrun --nproc-per-node=2 exercises/train.py --epochs 12

or a small GPT on the characters of Python's own library, for which you want a GPU:

    torchrun --nproc-per-node=gpu exercises/train.py --task gpt --epochs 2 --batch-size 256 --amp

Kill it and start it again with the same `--folder`: it continues after the last saved step. The file needs only torch
and, for the digits, scikit-learn. Take it with you.
"""

import argparse
import atexit
import fcntl
import functools
import json
import math
import multiprocessing
import os
import signal
import sys
import sysconfig
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, TensorDataset

Pairs = Dataset[tuple[Tensor, ...]]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train with DDP.")
    parser.add_argument("--task", choices=("digits", "gpt"), default="digits")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=48, help="samples per step over all ranks")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches per step on each rank")
    parser.add_argument("--lr", type=float, default=0.01, help="the largest learning rate")
    parser.add_argument("--clip", type=float, default=1.0, help="the largest norm of the gradient")
    parser.add_argument("--amp", action="store_true", help="forward and loss under autocast to bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("runs/train"), help="checkpoints; seen by rank 0's node")
    parser.add_argument("--save-every", type=int, default=50, help="steps from one checkpoint to the next")
    parser.add_argument("--log-every", type=int, default=20, help="steps from one line of progress to the next")
    parser.add_argument("--exact", action="store_true", help="a restarted job ends with the same bits; slower")
    parser.add_argument("--compile", action="store_true", help="compile the model; the first step takes longer")
    parser.add_argument("--workers", type=int, default=0, help="processes on each rank that load its data")
    return parser.parse_args(arguments)


@dataclass(frozen=True)
class Result:
    """How the job ended: steps done and planned; after the last step also loss and accuracy on the test set."""

    steps: int
    of: int
    loss: float | None = None
    accuracy: float | None = None


# What is trained, and on what: given ---------------------------------------------------------------------------------


def datasets(task: str) -> tuple[Pairs, Pairs]:
    """The training and the test set: pairs of an input and a class, or of 64 characters and, for each, the next character."""
    if task == "digits":
        from sklearn.datasets import load_digits

        digits = load_digits()
        inputs = torch.tensor(digits.data, dtype=torch.float32) / 16
        targets = torch.tensor(digits.target)
        order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
        train, test = order[:1437], order[1437:]
    else:
        library = Path(sysconfig.get_paths()["stdlib"])
        text = b"".join(file.read_bytes() for file in sorted(library.glob("*.py")))[: 1 << 20]
        windows = torch.tensor(list(text)).clamp(max=127).unfold(0, 65, 65)
        inputs, targets = windows[:, :-1], windows[:, 1:]
        test, train = torch.arange(len(windows)).tensor_split([len(windows) // 20])
    return TensorDataset(inputs[train], targets[train]), TensorDataset(inputs[test], targets[test])


class GPT(nn.Module):
    """A small transformer over characters: (B, T) numbers below 128 → (B, T, 128) logits of the next one."""

    def __init__(self, width: int = 128, layers: int = 4, heads: int = 4, length: int = 64) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(128, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, 128)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T) → (B, T, 128)."""
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        hidden = self.characters(x) + self.places.weight[: x.shape[1]]
        return self.head(self.layers(hidden, mask, is_causal=True))  # is_causal: attention in one kernel


def build_model(task: str) -> nn.Module:
    """A new model."""
    return GPT() if task == "gpt" else nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def rate(step: int, steps: int, largest: float) -> float:
    """The learning rate of a step: it rises for the first twentieth, then falls along a cosine."""
    warm = max(1, steps // 20)
    return largest * min((step + 1) / warm, 0.5 * (1 + math.cos(math.pi * step / steps)) + 0.01)


# The distributed parts -----------------------------------------------------------------------------------------------


def join() -> torch.device:
    """Join the process group that torchrun describes in the environment (address, port, ranks).

    Returns:
        This rank's device. On a node with GPUs it is the GPU with the rank's number *on that node*. It becomes the
        current device before the group is created, and the backend is nccl. Otherwise it is the CPU, with gloo.
    """
    # --- solution: join the process group ---
    timeout = timedelta(minutes=5)  # longer than any step; `patient_group` is for saving
    if not torch.cuda.is_available():
        dist.init_process_group("gloo", timeout=timeout)
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    # gloo as well: a question to all ranks doesn't wait for the GPU
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device, timeout=timeout)
    return device
    # --- end ---


# --- solution-only ---
@functools.cache
def patient_group() -> Any:
    """All ranks again, with time to write and to send a large checkpoint."""
    return dist.new_group(backend="gloo", timeout=timedelta(hours=1))


def on_rank_0(work: Callable[..., Any]) -> Callable[..., Any]:
    """Rank 0 does the work, and the others wait. Every rank returns its result, or raises RuntimeError."""

    @functools.wraps(work)
    def together(*arguments: Any) -> Any:
        told: list[Any] = [None, None]  # the result, and what went wrong
        if dist.get_rank() == 0:
            try:
                told[0] = work(*arguments)
            except Exception as error:
                told[1] = f"rank 0 could not {work.__name__} {arguments[0]}: {type(error).__name__}: {error}"
        dist.broadcast_object_list(told, src=0, group=patient_group())
        if told[1]:
            raise RuntimeError(told[1])
        return told[0]

    return together


@on_rank_0
def claim(folder: Path) -> None:
    """Make the folder, and keep other jobs out of it while this one lives."""
    folder.mkdir(parents=True, exist_ok=True)
    file = os.open(folder / "lock", os.O_CREAT | os.O_RDWR)  # never closed: the lock ends with the process
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RuntimeError("another job works there; give each its own --folder") from None
    except OSError:
        pass  # some file systems have no locks


def ignore_signals(worker: int) -> None:
    """For a loader's worker. torchrun signals it too, but its rank needs it to the end of the step."""
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


# --- end ---


class StopRequest:
    """Remembers SIGTERM and SIGUSR1. A handler can run between any two instructions, so it only sets a flag."""

    def __init__(self) -> None:
        self.made = False
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.made = True

    # --- solution-only ---
    def anywhere(self) -> bool:
        """Whether any rank was asked; the same answer on all."""
        asked = torch.tensor(float(self.made))
        dist.all_reduce(asked)
        return asked.item() > 0

    # --- end ---


@on_rank_0  # solution-only
def save(path: Path, state: dict[str, Any]) -> None:
    """Replace the checkpoint `path` by `state`. Every rank calls it; no rank returns before the file is there.

    One rank writes. If the job is killed at any moment, either the old or the new file is there, complete. After `save`
    returns, the new one is there, even after a power failure. Raises RuntimeError on every rank if the file could not be
    written: no permission, a full disk. The solution also keeps the two checkpoints before it, as `checkpoint.old` and
    `checkpoint.older`.
    """
    # --- solution: save, atomically and durably ---
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished, replaced, old, older = (path.with_suffix(end) for end in (".tmp", ".replaced", ".old", ".older"))
    replaced.unlink(missing_ok=True)
    with suppress(OSError):  # there is none yet, or the file system has no hard links
        os.link(path, replaced)  # a second name: `path` itself is never missing
    with open(unfinished, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)
    if replaced.exists():  # last: until here, an older one may be the only intact one
        with suppress(FileNotFoundError):
            os.replace(old, older)
        os.replace(replaced, old)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)  # the new name has to reach the disk, too
    os.close(folder)
    # --- end ---


@on_rank_0  # solution-only
def load(path: Path) -> dict[str, Any] | None:
    """The checkpoint `path`, or None if there is none; the same on every rank.

    Read it with `weights_only=True`. The solution also skips damaged files, says so, and returns the newest intact one.
    If all are damaged it raises RuntimeError on every rank. You may assume that every node sees the folder. In the
    solution only rank 0 looks at it, and sends the file to the others. That suits checkpoints of a few GB; save larger ones in parts, with `torch.distributed.checkpoint` (chapter 6).
    """
    # --- solution: load the same on every rank ---
    damaged: list[str] = []
    for file in (path, path.with_suffix(".old"), path.with_suffix(".older")):
        try:
            with zipfile.ZipFile(file) as archive:  # torch.load does not look at the checksums
                if part := archive.testzip():
                    raise zipfile.BadZipFile(f"wrong checksum of {part}")
            state = torch.load(file, map_location="cpu", weights_only=True)
            if damaged:
                say(0, f"{'; '.join(damaged)}. Continuing from {file}.")
            return state
        except FileNotFoundError:
            pass
        except Exception as error:
            damaged.append(f"{file} is damaged: {type(error).__name__}: {error}")
    if damaged:
        raise RuntimeError("; ".join(damaged))
    return None
    # --- end ---


def batches(
    dataset: Pairs, step: int, epochs: int, batch_size: int, accumulate: int, seed: int, workers: int = 0
) -> Iterator[Any]:
    """This rank's micro-batches, from the one after `step` steps of training to the end of the last epoch.

    A step uses `batch_size` samples over all ranks, an equal share on each, in `accumulate` micro-batches of equal
    size. An epoch has `len(dataset) // batch_size` steps; samples left over are dropped. The order is that of
    `DistributedSampler(dataset, seed=seed, drop_last=True)`, a different one in each epoch.
    """
    # --- solution: deal out the samples ---
    share, an_epoch = batch_size // dist.get_world_size(), len(dataset) // batch_size  # type: ignore[arg-type]

    def order() -> Iterator[int]:
        sampler: DistributedSampler[Any] = DistributedSampler(dataset, seed=seed, drop_last=True)
        for epoch in range(step // an_epoch, epochs):
            sampler.set_epoch(epoch)
            done = step % an_epoch if epoch == step // an_epoch else 0
            yield from list(sampler)[done * share : an_epoch * share]

    if workers:  # as they ignore SIGTERM, a rank that fails would wait for them at its end
        atexit.register(lambda: [child.kill() for child in multiprocessing.active_children()])
    # One loader for all epochs: its workers start once.
    how: dict[str, Any] = {"sampler": order(), "num_workers": workers, "pin_memory": torch.cuda.is_available()}
    return iter(DataLoader(dataset, share // accumulate, worker_init_fn=ignore_signals, **how))
    # --- end ---


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor, amp: bool) -> tuple[Tensor, Tensor]:
    """The mean cross-entropy of a batch and the number of correct predictions; given."""
    with torch.autocast(inputs.device.type, dtype=torch.bfloat16, enabled=amp):
        logits = model(inputs).flatten(0, -2)
        loss = F.cross_entropy(logits, targets.flatten())
    return loss, (logits.argmax(1) == targets.flatten()).sum()


def train_step(model: DDP, optimizer: Optimizer, micro_batches: list[Any], clip: float, amp: bool) -> Tensor:
    """One step of the optimizer, on the gradient of the mean loss over all ranks' micro-batches.

    Average the gradients over the ranks once, with the last micro-batch, and clip them after that.

    Returns:
        This rank's mean loss before the step: a tensor without a gradient, on its device.
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
    model: nn.Module, dataset: Pairs, amp: bool, batch_size: int = 256, stop: StopRequest | None = None
) -> tuple[float, float]:
    """Mean loss and accuracy over all targets of the dataset, each sample counted once, the same on every rank.

    The ranks share the work, even if it can't be divided evenly or there are fewer samples than ranks. `model` is the
    model itself: DDP's forward may call collectives, which ranks with fewer batches would not join. It is evaluated in
    eval mode, and is in training mode afterwards. If any rank is asked to `stop`, the solution ends early: it returns the
    numbers of a part, which `train` doesn't use.
    """
    # --- solution: evaluate, every sample once ---
    rank, world_size, samples = dist.get_rank(), dist.get_world_size(), len(dataset)  # type: ignore[arg-type]
    mine = Subset(dataset, range(rank, samples, world_size))
    on_all_ranks = samples // world_size // batch_size  # batches; some ranks may have one more
    device = next(model.parameters()).device
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # loss, correct predictions, samples
    model.eval()
    for number, (inputs, targets) in enumerate(DataLoader(mine, batch_size)):
        if stop and number < on_all_ranks and stop.anywhere():
            break  # only a part is evaluated: the caller asks again
        loss, correct = loss_of(model, inputs.to(device), targets.to(device), amp)
        sums += torch.stack([loss * targets.numel(), correct, torch.tensor(targets.numel(), device=device)])
    model.train()
    dist.all_reduce(sums)
    return (sums[0] / sums[2]).item(), (sums[1] / sums[2]).item()
    # --- end ---


# --- solution-only ---
def make_optimizer(model: nn.Module, lr: float) -> Optimizer:
    """AdamW in one kernel. Only matrices decay, not biases and norms."""
    matrices = [weight for weight in model.parameters() if weight.dim() > 1]
    others = [weight for weight in model.parameters() if weight.dim() <= 1]
    return torch.optim.AdamW([{"params": matrices}, {"params": others, "weight_decay": 0.0}], lr=lr, fused=True)


PEAKS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}  # dense bfloat16 operations a second


class Log:
    """Progress since the last line: a line to read, and one of JSON in `log.jsonl`."""

    def __init__(self, folder: Path, operations: int) -> None:
        self.file, self.operations = folder / "log.jsonl", operations  # operations for each sample
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
        self.peak = next((peak for name, peak in PEAKS.items() if name in gpu), None)
        self.began, self.waited, self.samples = time.perf_counter(), 0.0, 0

    def write(self, step: int, steps: int, **numbers: float) -> None:
        """On rank 0."""
        now = time.perf_counter()
        speed, waiting = self.samples / (now - self.began), self.waited / (now - self.began)
        self.began, self.waited, self.samples = now, 0.0, 0
        numbers |= {"step": step, "samples_per_second": speed, "waiting_for_data": waiting}
        if torch.cuda.is_available():
            numbers["memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
        if self.peak:
            numbers["mfu"] = self.operations * speed / dist.get_world_size() / self.peak
        more = "".join(f"  {name} {numbers[name]:.2f}" for name in ("memory_gb", "mfu") if name in numbers)
        say(0, f"step {step}/{steps}  loss {numbers['loss']:.4f}  {speed:,.0f} samples/s{more}")
        with suppress(OSError), open(self.file, "a") as file:  # if the disk is full, a save says so
            file.write(json.dumps(numbers) + "\n")


# --- end ---


def train(arguments: argparse.Namespace, device: torch.device) -> Result:
    """Train to the last epoch, from the checkpoint in `arguments.folder` if there is one.

    - Build the model after `torch.manual_seed(seed)`; all ranks start with equal weights. The optimizer is AdamW with
      the learning rate `rate(step, …)`.
    - A checkpoint (`checkpoint.pt` in the folder) holds the number of steps done, the weights and the optimizer's
      state. Save it every `save_every` steps, after the last step, and when the job is asked to stop.
    - After each step one small collective tells every rank whether any rank was asked to stop (`StopRequest`). If one was,
      all stop after the same step and save.
    - Interrupted anywhere and restarted on the same number of ranks, it ends with the same weights (on two ranks, bit
      for bit).
    - Only rank 0 prints: where training starts, the global loss every `log_every` steps, and after each epoch the loss
      and accuracy on the test set.

    The check doesn't test `--exact`, `--compile` and `--workers`.

    Raises:
        ValueError: `batch_size` can't be divided evenly among the ranks and their micro-batches.
    """
    # --- solution: train, evaluate, save, stop, and resume ---
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batch_size, accumulate, path = arguments.batch_size, arguments.accumulate, arguments.folder / "checkpoint.pt"
    if batch_size % (parts := world_size * accumulate):
        raise ValueError(f"--batch-size {batch_size} is no multiple of {parts} (ranks times --accumulate)")
    stop = StopRequest()
    claim(arguments.folder)
    training_set, test_set = datasets(arguments.task)
    an_epoch = len(training_set) // batch_size  # type: ignore[arg-type]
    steps = an_epoch * arguments.epochs

    if device.type == "cuda" and not arguments.exact:
        torch.set_float32_matmul_precision("high")  # TF32: float32's range with 10 bits of mantissa
    torch.manual_seed(arguments.seed)
    model = build_model(arguments.task).to(device)
    optimizer = make_optimizer(model, arguments.lr)
    step = 0
    if saved := load(path):
        step = saved["step"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    if arguments.compile:
        model.compile()  # in place: the names in the checkpoint stay, and under DDP the graph is cut where buckets end
    # After its first step DDP rebuilds its buckets, so a restarted job adds in another order for one step, which changes
    # last bits. With find_unused_parameters it doesn't, for a walk over the graph and an all-reduce a step (chapter 5).
    ddp = DDP(model, find_unused_parameters=arguments.exact, gradient_as_bucket_view=not arguments.exact)
    mine = batches(training_set, step, arguments.epochs, batch_size, accumulate, arguments.seed, arguments.workers)
    weights, predictions = sum(weight.numel() for weight in model.parameters()), training_set[0][1].numel()
    log = Log(arguments.folder, 6 * weights * predictions)  # forward and backward, without attention
    say(rank, f"{world_size} ranks, {device.type}; {step} of {steps} steps are done")

    loss = accuracy = None
    while True:
        if step and step % an_epoch == 0:  # also when it restarts there
            loss, accuracy = evaluate(model, test_set, arguments.amp, stop=stop)
            if stop.anywhere():  # only a part was evaluated; it stops and saves after one more step
                loss = accuracy = None
            else:
                told = f"test loss {loss:.4f}  test accuracy {accuracy:.4f}"
                say(rank, f"epoch {step // an_epoch}/{arguments.epochs}  {told}")
        if step == steps:
            return Result(step, steps, loss, accuracy)
        for group in optimizer.param_groups:
            group["lr"] = rate(step, steps, arguments.lr)
        began = time.perf_counter()
        micro_batches = [next(mine) for _ in range(accumulate)]
        log.waited += time.perf_counter() - began
        log.samples += batch_size
        # What is random in a step, such as dropout, follows from these three, so no generator's state has to be saved.
        torch.manual_seed(hash((arguments.seed, step, rank)))
        own = train_step(ddp, optimizer, micro_batches, arguments.clip, arguments.amp)
        step += 1
        stopping = stop.anywhere()
        saving = stopping or step % arguments.save_every == 0 or step == steps
        logging = step % arguments.log_every == 0
        if saving or logging:
            dist.all_reduce(own)
            mean, norm = own.item() / world_size, float(ddp.gradient_norm)  # here the CPU waits for the GPU
            if not math.isfinite(mean + norm):  # the same on every rank, and never saved
                raise FloatingPointError(f"step {step}: loss {mean}, gradient norm {norm}")
        if logging and rank == 0:
            log.write(step, steps, loss=mean, gradient_norm=norm, lr=group["lr"])
        if saving:
            save(path, {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()})
        if stopping:
            say(rank, f"asked to stop: saved after step {step} of {steps}")
            return Result(step, steps)
    # --- end ---


def say(rank: int, line: str) -> None:
    """Print on rank 0, without buffering."""
    if rank == 0:
        print(line, flush=True)


def main(arguments: list[str] | None = None) -> Result:
    """Run the script, from the command line to the end of the process group."""
    result = train(parse(arguments), join())
    # Not after an error: nccl would wait here for the other ranks before torch could print the error.
    dist.destroy_process_group()
    return result


if __name__ == "__main__":
    record(main)()  # writes an exception to a file; torchrun reads it and says which rank failed first, and why
    if not torch.cuda.is_available():
        # gloo's threads sometimes abort a finished process while the interpreter shuts down; nccl needs no such exit.
        sys.stdout.flush()
        os._exit(0)

# lockstep-canary: 2bf9e822a8bf431f
