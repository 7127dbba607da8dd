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
    raise NotImplementedError("train: join the process group")


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
    returns, the new one is there, even after a power failure. Raises RuntimeError on every rank if the file could not be
    written: no permission, a full disk. The solution also keeps the two checkpoints before it, as `checkpoint.old` and
    `checkpoint.older`.
    """
    raise NotImplementedError("train: save, atomically and durably")


def load(path: Path) -> dict[str, Any] | None:
    """The checkpoint `path`, or None if there is none; the same on every rank.

    Read it with `weights_only=True`. The solution also skips damaged files, says so, and returns the newest intact one.
    If all are damaged it raises RuntimeError on every rank. You may assume that every node sees the folder. In the
    solution only rank 0 looks at it, and sends the file to the others. That suits checkpoints of a few GB; save larger ones in parts, with `torch.distributed.checkpoint` (chapter 6).
    """
    raise NotImplementedError("train: load the same on every rank")


def batches(
    dataset: Pairs, step: int, epochs: int, batch_size: int, accumulate: int, seed: int, workers: int = 0
) -> Iterator[Any]:
    """This rank's micro-batches, from the one after `step` steps of training to the end of the last epoch.

    A step uses `batch_size` samples over all ranks, an equal share on each, in `accumulate` micro-batches of equal
    size. An epoch has `len(dataset) // batch_size` steps; samples left over are dropped. The order is that of
    `DistributedSampler(dataset, seed=seed, drop_last=True)`, a different one in each epoch.
    """
    raise NotImplementedError("train: deal out the samples")


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
    raise NotImplementedError("train: accumulate, average once, clip, step")


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
    raise NotImplementedError("train: evaluate, every sample once")


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
    raise NotImplementedError("train: train, evaluate, save, stop, and resume")


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
