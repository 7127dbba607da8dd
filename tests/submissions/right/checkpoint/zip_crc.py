# style: a class around the folder, the archive's own CRC-32 as the checksum, NamedTemporaryFile, os.sync
import os
import tempfile
import warnings
import zipfile
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile

import torch
import torch.distributed as dist


class Store:
    def __init__(self, path):
        self.path = Path(path)

    def numbers(self):
        with suppress(FileNotFoundError):
            return sorted(int(f.name[2:-3]) for f in self.path.iterdir() if f.match("c_*.pt") and f.name[2:-3].isdigit())
        return []

    def file(self, number):
        return self.path / f"c_{number:06d}.pt"

    def add(self, state, keep):
        self.path.mkdir(parents=True, exist_ok=True)
        for left in self.path.glob(".c_*.part"):
            left.unlink()
        numbers = self.numbers()
        new = numbers[-1] + 1 if numbers else 1
        with NamedTemporaryFile(dir=self.path, prefix=".c_", suffix=".part", delete=False) as out:
            try:
                torch.save(state, out)
            except BaseException:
                os.unlink(out.name)
                raise
        os.sync()
        os.replace(out.name, self.file(new))
        os.sync()
        for number in (numbers + [new])[:-keep]:
            self.file(number).unlink(missing_ok=True)

    def get(self, number):
        with zipfile.ZipFile(self.file(number)) as archive:
            bad = archive.testzip()
        if bad:
            raise zipfile.BadZipFile(f"{bad} is damaged")
        return torch.load(self.file(number), map_location="cpu", weights_only=True)


def save_checkpoint(path, state, keep=3):
    result = None
    if dist.get_rank() == 0:
        try:
            Store(path).add(state, keep)
        except Exception as error:
            result = error
    results = [None] * dist.get_world_size()
    dist.all_gather_object(results, str(result) if result else "")
    if any(results):
        raise OSError(f"no checkpoint was written: {''.join(results)}")


def strip(node):
    match node:
        case dict():
            full = len(node) > 0 and all(k.startswith("module.") for k in map(str, node))
            return {(k.removeprefix("module.") if full else k): strip(v) for k, v in node.items()}
        case list():
            return [strip(v) for v in node]
        case tuple():
            return tuple(strip(v) for v in node)
    return node


def load_latest(path):
    store = Store(path)
    loaded = {}
    # Everybody says what it can read; the newest that all can read is taken.
    readable = set()
    mine = store.numbers()
    for number in reversed(mine):
        try:
            loaded[number] = store.get(number)
            readable.add(number)
        except Exception as error:
            warnings.warn(f"cannot load {store.file(number)}: {error}")
    said = [None] * dist.get_world_size()
    dist.all_gather_object(said, sorted(readable))
    common = set.intersection(*map(set, said))
    if common:
        return strip(loaded[max(common)])
    # Nothing, or a save has removed what was here a moment ago.
    moved = [None] * dist.get_world_size()
    dist.all_gather_object(moved, store.numbers() != mine)
    return load_latest(path) if any(moved) else None
