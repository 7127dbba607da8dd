# style: every checkpoint is a folder with a manifest, filled under another name and then renamed; errors by all-reduce
import hashlib
import json
import os
import shutil
import warnings
from pathlib import Path

import torch
import torch.distributed as dist


def fsync(path):
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def generations(root):
    if not root.is_dir():
        return []
    numbers = [int(entry.name[1:]) for entry in root.iterdir() if entry.is_dir() and entry.name[:1] == "g" and entry.name[1:].isdigit()]
    return sorted(numbers)


def everybody(good):
    flag = torch.tensor([float(good)])
    dist.all_reduce(flag, op=dist.ReduceOp.PRODUCT)
    return bool(flag.item())


def save_checkpoint(path, state, keep=3):
    root = Path(path)
    error = None
    if dist.get_rank() == 0:
        unfinished = root / "unfinished"
        try:
            root.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(unfinished, ignore_errors=True)
            for waste in root.glob("removing-*"):
                shutil.rmtree(waste)
            unfinished.mkdir()
            torch.save(state, unfinished / "state.pt")
            fsync(unfinished / "state.pt")
            digest = hashlib.sha256((unfinished / "state.pt").read_bytes()).hexdigest()
            with open(unfinished / "manifest.json", "w") as file:
                json.dump({"state.pt": digest}, file)
                file.flush()
                os.fsync(file.fileno())
            fsync(unfinished)
            known = generations(root)
            number = known[-1] + 1 if known else 0
            os.rename(unfinished, root / f"g{number}")
            fsync(root)
            for old in [*known, number][:-keep]:
                # Out of sight in one step; half a folder must never look like a checkpoint.
                os.rename(root / f"g{old}", root / f"removing-{old}")
                shutil.rmtree(root / f"removing-{old}")
        except Exception as caught:
            error = caught
            shutil.rmtree(unfinished, ignore_errors=True)
    if not everybody(error is None):
        raise error or RuntimeError("rank 0 could not write the checkpoint")


def load_one(folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    if hashlib.sha256((folder / "state.pt").read_bytes()).hexdigest() != manifest["state.pt"]:
        raise ValueError("checksum")
    return torch.load(folder / "state.pt", map_location="cpu", weights_only=True)


def without_prefix(value):
    if isinstance(value, dict):
        if value and all(isinstance(key, str) and key.startswith("module.") for key in value):
            return {key.split(".", 1)[1]: without_prefix(inner) for key, inner in value.items()}
        return {key: without_prefix(inner) for key, inner in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(map(without_prefix, value))
    return value


def load_latest(path):
    root = Path(path)
    count = torch.tensor(len(generations(root)))
    dist.broadcast(count, src=0)
    numbers = torch.zeros(int(count), dtype=torch.int64)
    if dist.get_rank() == 0:
        numbers = torch.tensor(generations(root)[: int(count)], dtype=torch.int64)
    if count:
        dist.broadcast(numbers, src=0)
    for number in reversed(numbers.tolist()):
        state = None
        try:
            state = load_one(root / f"g{number}")
        except Exception as error:
            warnings.warn(f"{root}/g{number}/state.pt: {error}")
        if everybody(state is not None):
            return without_prefix(state)
        warnings.warn(f"g{number}/state.pt is left out, not every rank could read it")
    # A save may have removed them meanwhile.
    others = [generations(root) != numbers.tolist()]
    dist.broadcast_object_list(others, src=0)
    return load_latest(path) if others[0] else None
