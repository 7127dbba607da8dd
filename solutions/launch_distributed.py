"""Exercise launch_distributed: start the ranks from Python, and bring the trained weights back.

Chapter 2, "Launching from Python". To see it start two ranks:

    python exercises/launch_distributed.py
"""

import os  # solution-only
import sys  # solution-only
import tempfile  # solution-only
import traceback  # solution-only
from collections.abc import Callable
from multiprocessing.process import BaseProcess  # solution-only
from pathlib import Path  # solution-only

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from torch.utils.data import TensorDataset
from train_ddp import train_ddp


def launch_distributed(
    world_size: int, model_class: Callable[[], nn.Module], data: TensorDataset, epochs: int
) -> dict[str, torch.Tensor]:
    """Run `train_ddp(rank, world_size, model_class, data, epochs)` in `world_size` new processes on this machine.

    On each rank `train_ddp` needs MASTER_ADDR and MASTER_PORT, reads the other variables of torchrun where they are set,
    and returns the trained model.

    The call waits for all of them and leaves nothing behind: no processes, no files that your code wrote, no environment
    variables. It uses a free port, so several programs can launch at the same time (a port that you found free just
    before is good enough).

    Args:
        world_size: the number of ranks, at least 1.
        model_class: as for train_ddp. The new processes import it, so it must be defined at the top level of a module.
        data: as for train_ddp.
        epochs: as for train_ddp.

    Returns:
        The trained model's state_dict: CPU tensors under their names in the model, without a "module." prefix.

    Raises:
        ValueError: world_size is less than 1.
        RuntimeError (or another exception): a rank failed. Its message contains the error of the rank that failed first
            (you may assume that pickle can carry this error). It is raised soon after the failure, not only when the
            other ranks time out.
    """
    # --- solution: start the ranks, wait for them, return the weights ---
    if world_size < 1:
        raise ValueError(f"a world of {world_size} ranks is none")
    # As torchrun does, the parent hosts the store where the ranks meet. The system chooses its port, and from then on
    # nobody else can take it. A port that is looked up first and opened later can be lost in between.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ranks = mp.spawn(
            _run_rank,
            (world_size, model_class, data, epochs, store.port, folder),
            nprocs=world_size,
            join=False,
        )
        try:
            # When one rank has failed, the others get two seconds to say what happened to them, and are then ended.
            while not ranks.join(grace_period=2):
                pass
        except mp.ProcessExitedException as ended:
            raise RuntimeError(f"{ended}\n{_what_the_ranks_said(ranks.processes, folder)}") from ended
        return torch.load(folder / "weights.pt")
    # --- end ---


# --- solution-only ---
def _run_rank(
    rank: int,
    world_size: int,
    model_class: Callable[[], nn.Module],
    data: TensorDataset,
    epochs: int,
    port: int,
    folder: Path,
) -> None:
    """Be one rank: runs in a process of its own, whose environment is its own too."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",  # the store is hosted already: rank 0 joins it like the others
    )
    try:
        model = train_ddp(rank, world_size, model_class, data, epochs)
        if rank == 0:
            # Through a file, because it stays when the process is gone. A tensor sent through a queue lies in memory
            # that its sender shares, and can vanish with the sender.
            torch.save({name: tensor.cpu() for name, tensor in model.state_dict().items()}, folder / "weights.pt")
        status = 0
    except Exception:
        (folder / f"rank-{rank}.txt").write_text(f"rank {rank} failed:\n{traceback.format_exc()}")
        status = 1
    # The work is done and written down. Leave without tearing down the interpreter: gloo's threads now and then abort
    # a finished process there (SIGABRT), and good work would be reported as a crash.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _what_the_ranks_said(processes: list[BaseProcess], folder: Path) -> str:
    """The ranks' own words, first the rank that failed first: what the others say is often only its echo."""
    told = sorted(folder.glob("rank-*.txt"), key=lambda path: path.stat().st_mtime_ns)
    killed = [f"rank {rank} was ended by signal {-p.exitcode}" for rank, p in enumerate(processes) if p.exitcode < 0]
    return "\n".join(killed + [path.read_text() for path in told])


# --- end ---
class SmallNet(nn.Module):
    """64 pixels in, 10 classes out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.layers(pixels)


def digits() -> TensorDataset:
    """1797 handwritten digits: pixels (1797, 64) between 0 and 1, classes (1797,)."""
    from sklearn.datasets import load_digits

    pixels, classes = load_digits(return_X_y=True)
    return TensorDataset(torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(classes))


if __name__ == "__main__":
    pixels, classes = digits().tensors
    weights = launch_distributed(2, SmallNet, TensorDataset(pixels[:1500], classes[:1500]), epochs=20)
    model = SmallNet()
    model.load_state_dict(weights)
    right = (model(pixels[1500:]).argmax(dim=1) == classes[1500:]).float().mean().item()
    print(f"right on {right:.1%} of the digits that it had not seen")

# lockstep-canary: 91d26ae189e4b4dc
