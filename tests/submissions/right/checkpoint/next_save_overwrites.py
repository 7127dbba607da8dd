# style: a save that fails leaves its half-written file; the next save writes over it
import hashlib
import os
import re
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

NAME = re.compile(r"step-(\d+)-([0-9a-f]{64})\.pt")


def number_of(file):
    return int(NAME.fullmatch(file.name).group(1))


def checkpoints(folder):
    if not folder.exists():
        return []
    return sorted([file for file in folder.iterdir() if NAME.fullmatch(file.name)], key=number_of)


def sync_folder(folder):
    fd = os.open(folder, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def write(folder, state, keep):
    folder.mkdir(parents=True, exist_ok=True)
    old = checkpoints(folder)
    number = number_of(old[-1]) + 1 if old else 0
    tmp = folder / "saving.tmp"
    try:
        with open(tmp, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        digest = hashlib.sha256(tmp.read_bytes()).hexdigest()
        final = folder / f"step-{number}-{digest}.pt"
        os.replace(tmp, final)
        sync_folder(folder)
    except Exception:
        raise
    for file in (old + [final])[:-keep]:
        file.unlink()


def save_checkpoint(path, state, keep=3):
    folder = Path(path)
    problem = None
    if dist.get_rank() == 0:
        try:
            write(folder, state, keep)
        except Exception as e:
            problem = e
    box = [str(problem) if problem else None]
    dist.broadcast_object_list(box, src=0)
    if problem:
        raise problem
    if box[0]:
        raise RuntimeError(f"saving failed on rank 0: {box[0]}")


def read(file):
    data = file.read_bytes()
    if hashlib.sha256(data).hexdigest() != NAME.fullmatch(file.name).group(2):
        raise ValueError("wrong checksum")
    return torch.load(file, map_location="cpu", weights_only=True)


def plain(value):
    if isinstance(value, dict):
        if value and all(str(key).startswith("module.") for key in value):
            value = {key[len("module."):]: inner for key, inner in value.items()}
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [plain(inner) for inner in value]
    if isinstance(value, tuple):
        return tuple(plain(inner) for inner in value)
    return value


def load_latest(path):
    folder = Path(path)
    box = [[file.name for file in checkpoints(folder)][::-1]]
    dist.broadcast_object_list(box, src=0)
    for name in box[0]:
        state = None
        try:
            state = read(folder / name)
        except Exception as e:
            warnings.warn(f"{folder / name} cannot be loaded: {e}")
        ok = torch.tensor([1 if state is not None else 0])
        dist.all_reduce(ok, op=dist.ReduceOp.MIN)
        if ok.item() == 1:
            return plain(state)
        warnings.warn(f"{folder / name} is skipped: some rank cannot read it")
    again = [[file.name for file in checkpoints(folder)][::-1]]  # a save may have removed what was to be read
    dist.broadcast_object_list(again, src=0)
    return load_latest(path) if again != box else None
