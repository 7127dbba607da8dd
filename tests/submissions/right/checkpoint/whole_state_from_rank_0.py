# style: rank 0 alone reads and sends the whole state to the others; a sidecar-free trailer holds the checksum
import hashlib
import io
import os
import warnings

import torch
import torch.distributed as dist

MAGIC = b"CKPT1\n"


def _list(folder):
    """(number, path), the oldest first."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    found = [(int(n[4:-5]), os.path.join(folder, n)) for n in names if n[:4] == "gen." and n[4:-5].isdigit() and n[-5:] == ".ckpt"]
    return sorted(found)


def _store(folder, state, keep):
    os.makedirs(folder, exist_ok=True)
    older = _list(folder)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    body = buffer.getvalue()
    blob = MAGIC + len(body).to_bytes(8, "big") + body + hashlib.blake2b(body).digest()
    temporary = os.path.join(folder, ".next")
    final = os.path.join(folder, f"gen.{older[-1][0] + 1 if older else 1}.ckpt")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        view = memoryview(blob)
        while view:
            view = view[os.write(fd, view):]
        os.fsync(fd)
    except BaseException:
        os.unlink(temporary)
        raise
    finally:
        os.close(fd)
    os.rename(temporary, final)
    directory = os.open(folder, os.O_RDONLY)
    os.fsync(directory)
    os.close(directory)
    everything = [*older, (None, final)]
    for _, path in everything[: max(len(everything) - keep, 0)]:
        os.remove(path)


def save_checkpoint(path, state, keep=3):
    outcome = [""]
    if dist.get_rank() == 0:
        try:
            _store(os.fspath(path), state, keep)
        except Exception as error:
            outcome = [repr(error)]
    dist.broadcast_object_list(outcome)
    if outcome[0]:
        raise RuntimeError("checkpoint not written: " + outcome[0])


def _parse(path):
    with open(path, "rb") as file:
        blob = file.read()
    size = int.from_bytes(blob[6:14], "big")
    body, digest = blob[14:14 + size], blob[14 + size:]
    if blob[:6] != MAGIC or hashlib.blake2b(body).digest() != digest:
        raise ValueError("damaged")
    return torch.load(io.BytesIO(body), map_location=torch.device("cpu"))


def _unwrap(tree):
    if isinstance(tree, dict):
        keys = list(tree)
        cut = 7 if keys and all(isinstance(k, str) and k.startswith("module.") for k in keys) else 0
        return {(k[cut:] if cut else k): _unwrap(v) for k, v in tree.items()}
    if isinstance(tree, list):
        return [_unwrap(v) for v in tree]
    if isinstance(tree, tuple):
        return tuple(_unwrap(v) for v in tree)
    return tree


def load_latest(path):
    found = [None]
    listed = None
    while dist.get_rank() == 0 and found == [None] and listed != (listed := _list(os.fspath(path))):
        for _, file in reversed(listed):
            try:
                found = [_unwrap(_parse(file))]
                break
            except Exception as error:
                warnings.warn(f"passing over {file}: {error}")
    dist.broadcast_object_list(found)
    return found[0]
