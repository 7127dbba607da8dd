"""Exercise checkpoint: files that survive whatever happens to the job that writes them.

Chapter 5, "Atomic and durable". To see it at work on two ranks (run it twice: the second start finds what the first
saved):

    torchrun --nproc-per-node=2 exercises/checkpoint.py /tmp/checkpoints
"""

import hashlib  # solution-only
import os
import re  # solution-only
import sys
import warnings  # solution-only
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# --- solution-only ---
NAME = re.compile(r"checkpoint-(?P<number>\d{8,})-(?P<digest>[0-9a-f]{16})\.pt")
UNFINISHED = "unfinished.tmp"  # one writer, so one name: what a killed save has left is overwritten by the next
# --- end ---


def save_checkpoint(path: str | os.PathLike[str], state: dict[str, Any], keep: int = 3) -> None:
    """Save `state` as the newest checkpoint in the folder `path`. Called on every rank of an existing process group.

    - One rank writes, and it writes rank 0's `state`. What the other ranks pass doesn't matter.
    - No rank returns before the checkpoint is complete.
    - Atomic: a file is complete from the moment it has its final name. If a save is killed, at any instant, the folder
      holds the older checkpoints, the new one, or both, and each of them is whole. A process that loads during a save
      finds a whole one too.
    - Durable: the contents are on the disk (`os.fsync`) before the file gets its final name, and the name (the folder's
      entry) is on the disk before this function returns.
    - Afterwards the folder holds the `keep` newest checkpoints and no older ones, and nothing that a killed or failed
      save left behind. Leave all other files alone.
    - If the save fails (the disk is full, `fsync` fails, `state` can't be pickled), every rank raises an exception, and
      the older checkpoints are still there.

    Args:
        path: the folder. Create it, with its parents, if it doesn't exist.
        state: dictionaries (keys are text or integers), lists and tuples, nested as you like, of tensors, numbers,
            text and None: what `torch.load(weights_only=True)` reads.
        keep: how many checkpoints to keep, including this one; at least 1. A damaged one may count or not.
    """
    # --- solution: write the checkpoint ---
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            _write(Path(path), state, keep)
        except Exception as error:
            failure = error
    # The others wait for this word. It is the barrier, and it tells them how the save has ended.
    said = [None if failure is None else f"{type(failure).__name__}: {failure}"]
    dist.broadcast_object_list(said, src=0)
    if failure is not None:
        raise failure
    if said[0] is not None:
        raise RuntimeError(f"rank 0 could not save a checkpoint: {said[0]}")
    # --- end ---


def load_latest(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Return the newest intact checkpoint in the folder `path`. Called on every rank of an existing process group.

    - Newest means saved last, whichever process saved it and whatever the files' times say: copying a folder changes
      them.
    - All ranks return the same checkpoint, even if one of them sees an older state of the folder (a network file system
      shows a new file late) or can't read a file that the others can. You may take the newest that all ranks can
      read, or the newest that any can.
    - Skip a file that is cut short or in which a single bit of the state has changed. Load the next older one; at least
      one rank warns (`warnings.warn`) and names the file. `torch.load` doesn't notice a changed bit in a tensor.
    - A save with `keep=1` may remove the file that you are about to read. Then look into the folder again.
    - Loading runs no code from the file (`weights_only=True`). Tensors come back on the CPU.
    - A dictionary in which every key starts with `module.` comes from a DDP wrapper's `state_dict()`. Remove this prefix
      once, wherever in the state the dictionary is. All other keys come back unchanged.

    Returns:
        What was saved, or None if there is no checkpoint (or no folder).
    """
    # --- solution: load the newest checkpoint that is whole on all ranks ---
    folder = Path(path)
    candidates = [[file.name for file in reversed(_checkpoints(folder))]]
    dist.broadcast_object_list(candidates, src=0)  # rank 0 decides in which order they are tried
    for name in candidates[0]:
        state, problem = _read(folder / name)
        problems: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(problems, problem)
        if not any(problems):
            return state
        told = "; ".join(f"rank {rank}: {said}" for rank, said in enumerate(problems) if said)
        warnings.warn(f"{folder / name} is passed over, an older checkpoint is tried ({told})", stacklevel=2)
    # A save with keep=1 may have removed the file before it was read. Then the folder holds another one.
    now = [[file.name for file in reversed(_checkpoints(folder))]]
    dist.broadcast_object_list(now, src=0)
    return load_latest(path) if now != candidates else None
    # --- end ---


# --- solution-only ---
def _write(folder: Path, state: dict[str, Any], keep: int) -> None:
    """Write the newest checkpoint and remove the oldest. On one rank."""
    if not folder.is_dir():
        folder.mkdir(parents=True)
        _sync(folder.parent)
    older = _checkpoints(folder)
    number = _number(older[-1]) + 1 if older else 1
    unfinished = folder / UNFINISHED
    try:
        with open(unfinished, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())  # the contents, before the name says that they are there
        whole = folder / f"checkpoint-{number:08d}-{_digest(unfinished.read_bytes())}.pt"
        os.replace(unfinished, whole)
    except BaseException:
        unfinished.unlink(missing_ok=True)  # on a full disk this is room that somebody needs
        raise
    _sync(folder)  # and the name
    for file in [*older, whole][:-keep]:
        file.unlink(missing_ok=True)


def _checkpoints(folder: Path) -> list[Path]:
    """The folder's checkpoints, the oldest first."""
    if not folder.is_dir():
        return []
    return sorted((file for file in folder.iterdir() if NAME.fullmatch(file.name)), key=_number)


def _number(file: Path) -> int:
    """1 for the first checkpoint that was saved. As a number: as text, 9 comes after 10."""
    found = NAME.fullmatch(file.name)
    assert found is not None
    return int(found["number"])


def _digest(data: bytes) -> str:
    """The first 16 digits of the SHA-256. It stands in the name, so the two can never be out of step."""
    return hashlib.sha256(data).hexdigest()[:16]


def _read(file: Path) -> tuple[dict[str, Any] | None, str | None]:
    """The file's state and None, or None and what is the matter with it."""
    found = NAME.fullmatch(file.name)
    assert found is not None
    try:
        if _digest(file.read_bytes()) != found["digest"]:
            return None, "its contents do not have the checksum in its name"
        state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises many kinds of errors
        return None, f"{type(error).__name__}: {str(error).splitlines()[0].partition('. ')[0] if str(error) else ''}"
    return _plain(state), None


def _plain(value: Any) -> Any:
    """The same, with DDP's prefix taken off in every dictionary that a wrapper has written."""
    if isinstance(value, dict):
        wrapped = bool(value) and all(isinstance(key, str) and key.startswith("module.") for key in value)
        return {key.removeprefix("module.") if wrapped else key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(inner) for inner in value)
    return value


def _sync(folder: Path) -> None:
    """Have the folder's entries, the names, on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- end ---
if __name__ == "__main__":
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)
    rank = dist.get_rank()
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "checkpoints")
    found = load_latest(folder)
    start = found["step"] if found else 0
    print(f"rank {rank} starts at step {start}", flush=True)
    for step in range(start + 1, start + 6):
        save_checkpoint(folder, {"model": {"weight": torch.full((3,), float(step))}, "step": step})
    if rank == 0:
        print(*sorted(file.name for file in folder.iterdir()), sep="\n", flush=True)
    # gloo's threads sometimes abort a finished process while the interpreter shuts down; os._exit skips the shutdown.
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)

# lockstep-canary: e207bbfb003d50ce
