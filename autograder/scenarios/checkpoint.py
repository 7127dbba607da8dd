"""On the ranks: saves and loads checkpoints, and takes the ground away from under them. Nothing is judged here.

Every function of Python that changes a file goes through a tracer from before the submission is imported. It notes
each operation with the file's inode, cuts large writes into small ones (the kernel may do that at any time), and can
kill its process by SIGKILL before each operation and in the middle of each write. `torch.save` to a path would write
from C++, unseen; it is given a Python file instead, and writes the same bytes.
"""

from __future__ import annotations

import builtins
import contextlib
import datetime
import errno
import io
import json
import os
import resource
import select
import shutil
import signal
import stat
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lockstep.grading.on_rank import observe, raised_at, rank, world_size

CHUNK = 4096
PATIENCE_SECONDS = 20.0

# The tracer ----------------------------------------------------------------------------------------------------------

_open, _write, _fsync, _stat, _fstat, _kill = io.open, os.write, os.fsync, os.stat, os.fstat, os.kill
_save = torch.save


class Tracer:
    """What this process does to files, while it is on.

    `before(instant, what)` is called at every instant at which the process could die; `half` tells that it is in the
    middle of a write.
    """

    def __init__(self) -> None:
        self.on = False
        self.chunk = CHUNK
        self.operations: list[dict[str, Any]] = []
        self.instants = 0
        self.before: Callable[[int, str], None] = lambda instant, what: None
        self.reading: Callable[[Any], None] = lambda place: None

    def instant(self, what: str) -> None:
        """A point at which the process could die."""
        number, self.instants = self.instants, self.instants + 1
        self.before(number, what)

    def note(self, kind: str, **more: Any) -> None:
        """One operation, done."""
        self.operations.append({"kind": kind, **more})


tracer = Tracer()


@contextlib.contextmanager
def traced() -> Iterator[Tracer]:
    """Trace what happens in here."""
    tracer.operations, tracer.instants, tracer.on = [], 0, True
    try:
        yield tracer
    finally:
        tracer.on = False


@contextlib.contextmanager
def _untraced() -> Iterator[None]:
    tracer.on = False
    try:
        yield
    finally:
        tracer.on = True


def _inode(place: Any) -> int:
    """The inode of a path or descriptor; 0 when there is none."""
    try:
        return (_fstat if isinstance(place, int) else _stat)(place).st_ino
    except OSError:
        return 0


def _short(place: Any) -> str:
    if isinstance(place, int):
        with contextlib.suppress(OSError):
            return os.path.basename(os.readlink(f"/proc/self/fd/{place}"))
        return f"descriptor {place}"
    return os.path.basename(os.fspath(place)) if not isinstance(place, bytes) else repr(place)


def _pour(descriptor: int, data: Any, write: Callable[[Any], int | None]) -> int:
    """One write of a file, as a small one with a place to die before it and within it."""
    piece = memoryview(data).cast("B")[: tracer.chunk]
    inode, name = _inode(descriptor), _short(descriptor)
    tracer.instant(f"before a write of {len(piece)} bytes to {name}")
    half = len(piece) // 2
    if half:
        write(piece[:half])
        tracer.instant(f"in the middle of a write of {len(piece)} bytes to {name}")
        write(piece[half:])
    else:
        write(piece)
    tracer.note("write", name=name, inode=inode, bytes=len(piece))
    return len(piece)


class TracedFile(io.FileIO):
    """A file whose writes are traced."""

    def write(self, data: Any) -> int:
        if not tracer.on or not stat.S_ISREG(_fstat(self.fileno()).st_mode):
            return super().write(data)
        return _pour(self.fileno(), data, super().write)

    def truncate(self, size: int | None = None) -> int:
        if tracer.on:
            tracer.instant(f"before {_short(self.fileno())} is cut")
            tracer.note("write", name=_short(self.fileno()), inode=_inode(self.fileno()), bytes=0)
        return super().truncate(size)


def traced_open(
    file: Any, mode: str = "r", buffering: int = -1, encoding: Any = None, errors: Any = None, newline: Any = None,
    closefd: bool = True, opener: Any = None,
) -> Any:  # fmt: skip
    """`open`, for files that are written."""
    if not set(mode) & set("wxa+"):
        tracer.reading(file)
    if not tracer.on or not set(mode) & set("wxa+"):
        return _open(file, mode, buffering, encoding, errors, newline, closefd, opener)
    if not isinstance(file, int):
        tracer.instant(f"before {_short(file)} is opened for writing")
    raw = TracedFile(file, mode.replace("t", "").replace("b", ""), closefd, opener)
    if not isinstance(file, int):
        tracer.note(
            "open", name=_short(raw.fileno() if opener else file), inode=_inode(raw.fileno())
        )  # another rank may rename it at once
    if buffering == 0:
        return raw
    size = buffering if buffering > 1 else io.DEFAULT_BUFFER_SIZE
    buffered = io.BufferedRandom(raw, size) if "+" in mode else io.BufferedWriter(raw, size)
    if "b" in mode:
        return buffered
    text = io.TextIOWrapper(buffered, encoding, errors, newline, line_buffering=buffering == 1)
    text.mode = mode
    return text


def traced_save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
    """`torch.save`, through a file that is traced."""
    if not tracer.on or not isinstance(f, (str, os.PathLike)):
        return _save(obj, f, *args, **kwargs)
    with traced_open(f, "wb") as file:
        return _save(obj, file, *args, **kwargs)


def _around(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    """A function of `os` with its operation noted."""

    def operation(*args: Any, **kwargs: Any) -> Any:
        if name == "open":
            tracer.reading(args[0] if args else kwargs["path"])
        if not tracer.on:
            return real(*args, **kwargs)
        places = [place for place in args if isinstance(place, (int, str, os.PathLike))]
        places += [kwargs[key] for key in ("src", "dst", "path", "fd") if key in kwargs]
        if name == "open":
            flags = args[1] if len(args) > 1 else kwargs.get("flags", 0)
            if not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
                return real(*args, **kwargs)
            tracer.instant(f"before {_short(places[0])} is opened for writing")
            descriptor = real(*args, **kwargs)
            tracer.note("open", name=_short(places[0]), inode=_inode(descriptor))
            return descriptor
        if name == "write":
            descriptor, data = places[0], args[-1] if len(args) > 1 else kwargs["data"]
            if not stat.S_ISREG(_fstat(descriptor).st_mode):
                return real(*args, **kwargs)
            return _pour(descriptor, data, lambda piece: real(descriptor, piece))
        said = (
            " to ".join(_short(place) for place in places[:2]) if name in TWO else _short(places[0]) if places else ""
        )
        tracer.instant(f"before {name} {said}".rstrip())
        source = _inode(places[0]) if places else 0
        result = real(*args, **kwargs)
        more: dict[str, Any] = {"name": said, "inode": source}
        if name in TWO:
            folder = os.path.dirname(os.path.abspath(os.fspath(places[1]))) if not isinstance(places[1], int) else None
            more["folder"] = _inode(folder) if folder else 0
            if name in ("sendfile", "copy_file_range"):
                more["inode"] = _inode(places[0 if name == "sendfile" else 1])
        tracer.note(OPERATIONS[name], **more)
        return result

    return operation


TWO = ("replace", "rename", "link", "symlink", "sendfile", "copy_file_range")
OPERATIONS = {
    "open": "open", "write": "write", "fsync": "fsync", "fdatasync": "fsync", "sync": "sync", "replace": "rename",
    "rename": "rename", "link": "rename", "symlink": "link", "unlink": "remove", "remove": "remove", "rmdir": "remove",
    "mkdir": "mkdir", "truncate": "write", "ftruncate": "write", "sendfile": "write", "copy_file_range": "write",
    "utime": "touch",
}  # fmt: skip


def before() -> None:
    """Put the tracer in place. Called ahead of the submission's import, so that `from os import replace` meets it."""
    builtins.open = io.open = traced_open
    torch.save = torch.serialization.save = traced_save
    time.time, time.time_ns, datetime.datetime = clock.time, clock.time_ns, Date
    for name in OPERATIONS:
        real = getattr(os, name, None)
        if real is not None:
            setattr(os, name, _around(name, real))


class Clock:
    """The machine's clock, which may be `behind`, in seconds; `read`: whether somebody has asked it meanwhile."""

    def __init__(self) -> None:
        self.behind, self.read = 0, False
        self._seconds, self._nanoseconds = time.time, time.time_ns

    def time(self) -> float:
        """`time.time`."""
        self.read = True
        return self._seconds() - self.behind

    def time_ns(self) -> int:
        """`time.time_ns`."""
        self.read = True
        return self._nanoseconds() - self.behind * 10**9


clock = Clock()


class Date(datetime.datetime):
    """`datetime.datetime`, by that clock."""

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> Date:
        """As with the usual one."""
        return cls.fromtimestamp(clock.time(), tz)

    @classmethod
    def today(cls) -> Date:
        """As with the usual one."""
        return cls.now()

    @classmethod
    def utcnow(cls) -> Date:
        """As with the usual one."""
        return cls.now(datetime.timezone.utc).replace(tzinfo=None)


# What is saved -------------------------------------------------------------------------------------------------------


TIMES = 20  # so often a state's text says its number


def numbered(number: int, size: int = 2000) -> dict[str, Any]:
    """A state of about 12 KB in which every number is `number`, also in its text, so that a mixture of two shows."""
    value = float(number)
    return {
        "model": {"weight": torch.full((size // 50, 50), value), "bias": torch.full((300,), value)},
        "optimizer": {"step": number, "momentum": torch.full((700,), value)},
        "step": number,
        "text": f"{number} " * TIMES,
    }


def content(state: Any) -> Any:
    """What a loaded state holds: None, or its different numbers, in order. What is not such a state is said as text."""
    if state is None:
        return None
    try:
        parts = [state["model"]["weight"], state["model"]["bias"], state["optimizer"]["momentum"]]
        found = {number for part in parts for number in part.unique().tolist()}
        found |= {float(word) for word in state["text"].split()}
        return sorted({*found, float(state["step"]), float(state["optimizer"]["step"])})[:6]
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def load(submission: Any, folder: Path) -> dict[str, Any]:
    """Load, and say what came back or was raised, and what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            loaded = content(submission.load_latest(folder))
            error = ""
        except NotImplementedError:
            raise
        except Exception as problem:
            error, line = raised_at(submission, problem)
            return {"loaded": None, "error": error, "line": line, "warned": []}
    return {"loaded": loaded, "error": error, "line": 0, "warned": [str(one.message) for one in caught]}


def files(folder: Path) -> dict[str, int]:
    """The files in the folder and below, with their sizes in bytes."""
    found = {}
    for at, _, inside in os.walk(folder):
        for name in inside:
            with contextlib.suppress(OSError):
                found[str((Path(at) / name).relative_to(folder))] = os.path.getsize(os.path.join(at, name))
    return found


def fresh_file(folder: Path, earlier: Path) -> Path:
    """The largest file in `folder` with contents that no file in `earlier` has: the newest checkpoint's."""
    known = {(earlier / name).read_bytes() for name in files(earlier)}
    fresh = [folder / name for name in files(folder) if (folder / name).read_bytes() not in known]
    return max(fresh, key=lambda file: file.stat().st_size)


def join() -> None:
    """Make the process group."""
    dist.init_process_group("gloo")


def moved(value: Any) -> Any:
    """The same with its tensors on the GPU, if there is one."""
    if isinstance(value, torch.Tensor) and torch.cuda.is_available():
        return value.to("cuda:0")
    if isinstance(value, dict):
        return {key: moved(inner) for key, inner in value.items()}
    return [moved(inner) for inner in value] if isinstance(value, list) else value


# Scenarios -----------------------------------------------------------------------------------------------------------


def round_trip(submission: Any, state: dict[str, Any], folder: str) -> None:
    """Load from a folder that is not there; save there; load. Every rank brings a state of its own."""
    join()
    place = Path(folder)
    if rank() == 0:
        Path("empty").mkdir()
    dist.barrier()
    observe("nothing", load(submission, place))
    observe("empty", load(submission, Path("empty")))
    dist.barrier()
    own = dict(moved(state), of_rank=rank(), pair=("left", (3.0, None)), by_number={0: 1.5, 7: None})
    try:
        with traced() as trace:
            submission.save_checkpoint(str(place), own)
    finally:
        observe("operations", trace.operations)
        observe("written", written(place))
    dist.barrier()
    loaded = submission.load_latest(str(place))
    observe("loaded", describe(loaded))
    observe("own", describe(own))


def written(folder: Path) -> dict[str, Any]:
    """The inodes of the folder and of each file in it, with those of the folders in between."""
    inside = {name: [name, *(str(part) for part in Path(name).parents if str(part) != ".")] for name in files(folder)}
    inodes = {name: [_inode(folder / part) for part in parts] for name, parts in inside.items()}
    return {"folder": _inode(folder), "files": inodes, "sizes": files(folder)}


def describe(value: Any, at: str = "") -> dict[str, Any]:
    """A nested state as one flat dictionary, by the place of each value, with the type of everything."""
    if isinstance(value, dict):
        parts = [(f"{at}[{key!r}]", inner) for key, inner in value.items()]
    elif isinstance(value, (list, tuple)):
        parts = [(f"{at}[{number}]", inner) for number, inner in enumerate(value)]
    elif isinstance(value, torch.Tensor):
        return {at: value.detach().clone(), f"{at} (where)": value.device.type, f"{at} (dtype)": str(value.dtype)}
    else:
        return {at: f"{type(value).__name__} {value!r}"}
    inside = {name: found for place, inner in parts for name, found in describe(inner, place).items()}
    kind = next(kind.__name__ for kind in (dict, list, tuple) if isinstance(value, kind))
    return {at: f"{kind} of {len(value)}", **inside} if at else inside


def wrapped(submission: Any, plain: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> None:
    """Save a model as a DDP wrapper names it and as it names itself, beside keys that only look like it."""
    join()
    model = {f"module.{name}": value for name, value in plain.items()}
    for name, own in (("wrapped", model), ("plain", plain)):
        state = {
            "model": own, "averages": [dict(own)], "pair": (1, dict(own)), "others": others, "step": 1,
            "within": {"module.first": dict(own), "module.second": dict(own)},
            "twice": {f"module.{name}": value for name, value in model.items()},
        }  # fmt: skip
        submission.save_checkpoint(name, state)
        dist.barrier()
        loaded = submission.load_latest(name)
        observe(
            name,
            {
                "model": sorted(loaded["model"]),
                "averages": sorted(loaded["averages"][0]),
                "pair": sorted(loaded["pair"][1]),
                "others": sorted(loaded["others"]),
                "within": sorted(next(iter(loaded["within"].values()))),
                "twice": sorted(loaded["twice"]),
            },
        )


ELSEWHERE = (5, 6)


def many(submission: Any, saves: int, keep: int | None, foreign: dict[str, str]) -> None:
    """Save often, look at what is left each time, then load; once more with the files' times turned around.

    The fifth save and the sixth are made by a process of its own, whose clock is a day behind. With the default `keep`
    also save once more, now with keep=2, and load with that one damaged.
    """
    folder = Path("many")
    options = {} if keep is None else {"keep": keep}

    def save_elsewhere(child: Child) -> None:
        for number in ELSEWHERE:
            if child.wait():
                if not dist.is_initialized():
                    alone()
                clock.behind, clock.read = 86_400, False
                submission.save_checkpoint(folder, numbered(number), **options)
                child.say({"by the clock": clock.read})

    # It is forked before any save, so it knows nothing of them but what lies in the folder.
    elsewhere = Child(save_elsewhere) if rank() == 0 else None
    join()
    observe("scenario", "many")
    if rank() == 0:
        folder.mkdir()
        for name, text in foreign.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text)
        _save({"accuracy": 0.5}, folder / "best.pt")
    dist.barrier()
    left = []
    for number in range(1, saves + 1):
        if number not in ELSEWHERE:
            submission.save_checkpoint(folder, numbered(number), **options)
        elif elsewhere is not None:
            elsewhere.go_on()
            said = elsewhere.hear()
            if "by the clock" not in (said or {}):
                raise RuntimeError(f"a save by a new process, alone, failed: {(said or {}).get('raised', 'it died')}")
            observe("clock", said["by the clock"])
        dist.barrier()
        left.append(files(folder))
        if number in (5, 7):
            observe(f"loaded after {number}", load(submission, folder))
        dist.barrier()
    if elsewhere is not None:
        elsewhere.end()
    observe("left", left)
    observe("foreign", {name: (folder / name).is_file() and (folder / name).read_text() for name in foreign})
    dist.barrier()
    observe("loaded", load(submission, folder))
    dist.barrier()
    if rank() == 0:
        ages = sorted(files(folder), key=lambda name: -os.stat(folder / name).st_mtime_ns)
        for age, name in enumerate(ages):
            os.utime(folder / name, (1_700_000_000 + age * 1000, 1_700_000_000 + age * 1000))
    dist.barrier()
    observe("loaded again", load(submission, folder))
    if keep is None:
        dist.barrier()
        if rank() == 0:
            shutil.copytree(folder, "earlier")
        dist.barrier()
        submission.save_checkpoint(folder, numbered(saves + 1), 2)
        dist.barrier()
        observe("left with keep=2", files(folder))
        dist.barrier()
        if rank() == 0:
            with contextlib.suppress(ValueError):  # the last save has left no file: `loaded` shows that already
                newest = fresh_file(folder, Path("earlier"))
                newest.write_bytes(newest.read_bytes()[:-100])
        dist.barrier()
        observe("loaded older", load(submission, folder))


def waits(submission: Any) -> None:
    """The writer is held at its first write until the others have come back from the save, or all sleep in it."""
    join()
    observe("scenario", "waits")
    folder, flags = Path("waits"), Path("flags")
    submission.save_checkpoint(folder, numbered(1))
    flags.mkdir(exist_ok=True)
    dist.barrier()

    held = False

    def hold(instant: int, what: str) -> None:
        nonlocal held
        if held or " a write of " not in what:
            return
        held = True
        end = time.monotonic() + PATIENCE_SECONDS
        asleep = 0
        while asleep < 5 and time.monotonic() < end:
            time.sleep(0.03)
            asleep = asleep + 1 if all(settled(other) for other in range(world_size()) if other != rank()) else 0

    def settled(other: int) -> bool:
        """The rank has returned from the save, or sleeps in it: not merely waits for a processor to run on."""
        if (flags / f"returned-{other}").exists():
            return True
        if not (flags / f"entered-{other}").exists():
            return False
        try:
            status = Path(f"/proc/{(flags / f'entered-{other}').read_text()}/stat").read_text()
        except OSError:
            return True  # not on Linux: five looks have to do
        return status.rpartition(")")[2].split()[0] in "SD"

    tracer.before = hold
    (flags / "new").with_suffix(f".{rank()}").write_text(str(os.getpid()))
    os.replace(flags / f"new.{rank()}", flags / f"entered-{rank()}")
    with traced() as trace:
        submission.save_checkpoint(folder, (numbered(2), {}, {"other": (n for n in ())})[rank()])
        trace.on = False
        there = files(folder)
        (flags / f"returned-{rank()}").touch()
    observe("there", there)
    dist.barrier()
    observe("in the end", files(folder))


def views(submission: Any, late: int, damaged: int) -> None:
    """Rank `late` does not see save 3; then rank `damaged` cannot read it; then the one does not, and the other not save 2.

    Where views differ each rank has a working directory of its own, and the folder's name is relative.
    """
    join()
    observe("scenario", "views")
    shared = Path("shared")
    for number in (1, 2, 3):
        submission.save_checkpoint(shared, numbered(number))
        dist.barrier()
        if rank() == 0:
            shutil.copytree(shared, f"at-{number}")
        dist.barrier()
    own = Path(f"late-{rank()}")
    shutil.copytree("at-2" if rank() == late else shared, own / shared)
    second, third = (str(fresh_file(Path(f"at-{n}"), Path(f"at-{n - 1}")).relative_to(f"at-{n}")) for n in (2, 3))
    unreadable = ""

    def fail(place: Any) -> None:
        mine = rank() == damaged and unreadable and not isinstance(place, int)
        if mine and os.path.abspath(os.fspath(place)).endswith(f"/{shared}/{unreadable}"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(place))

    tracer.reading = fail
    here = os.getcwd()
    for what, place, file in (("late", own, ""), ("damaged", here, third), ("both", own, second)):
        unreadable = file
        dist.barrier()
        os.chdir(place)
        observe(what, load(submission, shared))
        os.chdir(here)


LARGE = 400_000  # 1.6 MB, so that a checksum over a file's beginning does not reach its end


def damages(submission: Any, position: float) -> None:
    """The newest file is cut, emptied, replaced by text, and has one bit of a tensor changed, or of a text."""
    join()
    shared = Path("shared")
    for number in (1, 2, 3):
        if rank() == 0 and number == 3:
            shutil.copytree(shared, "earlier")
        dist.barrier()
        submission.save_checkpoint(shared, numbered(number, LARGE))
        dist.barrier()
    names = {}
    for kind in ("cut short", "empty", "text", "one bit", "one digit"):
        folder = Path(kind.replace(" ", "-"))
        if rank() == 0:
            shutil.copytree(shared, folder)
            newest = fresh_file(folder, Path("earlier"))
            names[kind] = newest.name
            data = bytearray(newest.read_bytes())
            if kind == "cut short":
                data = data[: len(data) // 2]
            elif kind == "empty":
                data = bytearray()
            elif kind == "text":
                data = bytearray(b"this is not a checkpoint\n" * 40)
            elif kind == "one bit":
                # Within the last tensor of the file: 3.0 as a float32, many times.
                pattern = bytes(torch.full((64,), 3.0).view(torch.uint8).tolist())
                at = data.rfind(pattern)
                data[at + int(position * 200) if at >= 0 else int(position * len(data))] ^= 0x20
            else:
                at = data.rfind(b"3 " * TIMES)  # one of these becomes a 7
                data[at + 2 * int(position * TIMES) if at >= 0 else int(position * len(data))] ^= 0x04
            newest.write_bytes(data)
        dist.barrier()
        observe(kind, load(submission, folder))
        dist.barrier()
    observe("names", names)


def unpickled() -> Payload:
    """What unpickling a payload calls: it makes a folder. What it returns is a payload, and can be saved."""
    os.makedirs("ran-code", exist_ok=True)
    return Payload()


class Payload:
    """Pickled, it makes a folder wherever it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return unpickled, ()


unpickled.__module__ = "payload"  # pickle looks it up by this name: a submission may be called like this file
sys.modules["payload"] = types.SimpleNamespace(unpickled=unpickled)  # type: ignore[assignment]


def code(submission: Any) -> None:
    """The newest checkpoint holds an object that does something when it is unpickled."""
    join()
    folder = Path("code")
    submission.save_checkpoint(folder, numbered(1))
    dist.barrier()
    refused = ""
    try:
        submission.save_checkpoint(folder, {**numbered(2), "extra": Payload()})
    except Exception as error:
        refused = f"{type(error).__name__}: {error}"
    dist.barrier()
    observe("refused", refused)
    if rank() == 0:
        shutil.rmtree("ran-code", ignore_errors=True)  # if rank 0's state was sent as an object, the save has made it
    dist.barrier()
    observe("loaded", load(submission, folder))
    dist.barrier()
    observe("ran", Path("ran-code").exists())


def full_disk(submission: Any) -> None:
    """No file may grow beyond 4 KiB while a checkpoint of 12 KB is saved; afterwards there is room again."""
    join()
    observe("scenario", "full_disk")
    folder = Path("full")
    submission.save_checkpoint(folder, numbered(1))
    dist.barrier()
    earlier = files(folder)
    dist.barrier()
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # then a write fails with EFBIG, as ENOSPC would
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    error = raised(submission, folder)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    observe("error", error)
    observe("no room", error)
    dist.barrier()
    observe("loaded", load(submission, folder))
    observe("earlier", earlier)
    observe("left", files(folder))
    dist.barrier()
    submission.save_checkpoint(folder, numbered(3))
    dist.barrier()
    observe("after", load(submission, folder))
    observe("left after", files(folder))
    Path("a-file").touch()
    for name, place, more in (
        ("no folder", Path("a-file/folder"), {}),
        ("no pickle", folder, {"extra": (n for n in ())}),
    ):
        dist.barrier()  # with what a rank raised before still to be seen, should another never come
        observe("error", "")
        error = raised(submission, place, **more)
        observe("error", error)
        observe(name, error)


def raised(submission: Any, folder: Path, keep: int = 3, **more: Any) -> str:
    """What a save of a state, and `more` in it, raises; empty when it returns."""
    try:
        submission.save_checkpoint(folder, numbered(2) | more, keep)
    except Exception as problem:
        return f"{type(problem).__name__}: {str(problem).splitlines()[0] if str(problem) else ''}"
    return ""


# Kills ---------------------------------------------------------------------------------------------------------------


def alone() -> None:
    """In a child: a process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


class Child:
    """A process of its own, forked from this rank, that calls a function and says JSON lines."""

    def __init__(self, work: Callable[[Child], None]) -> None:
        self.reading, writing = os.pipe()
        self.asking, self.answering = os.pipe()
        self.rest = b""
        self.status: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.close(self.reading)
                os.close(self.answering)
                self.writing = writing
                work(self)
                os._exit(0)
            except BaseException as error:
                self.say({"raised": f"{type(error).__name__}: {error}"})
                os._exit(1)
        os.close(writing)
        os.close(self.asking)

    def say(self, value: Any) -> None:
        """In the child: one line to the parent."""
        _write(self.writing, json.dumps(value).encode() + b"\n")

    def wait(self) -> bool:
        """In the child: wait for `go_on`; False when the parent is gone."""
        return bool(os.read(self.asking, 1))

    def hear(self) -> Any:
        """Its next word; None when it has died, or said nothing for PATIENCE_SECONDS (then it is killed)."""
        while b"\n" not in self.rest:
            ready, _, _ = select.select([self.reading], [], [], PATIENCE_SECONDS)
            data = os.read(self.reading, 1 << 20) if ready else b""
            if not data:
                if not ready:
                    _kill(self.pid, signal.SIGKILL)
                return None
            self.rest += data
        line, _, self.rest = self.rest.partition(b"\n")
        return json.loads(line)

    def go_on(self) -> None:
        """Let it go on from `wait`."""
        with contextlib.suppress(OSError):
            _write(self.answering, b".")

    def end(self) -> str:
        """How it ended: `returned`, `killed`, or its status."""
        while self.hear() is not None:
            self.go_on()
        _, status = os.waitpid(self.pid, 0)
        os.close(self.reading)
        os.close(self.answering)
        if os.WIFSIGNALED(status):
            return "killed" if os.WTERMSIG(status) == signal.SIGKILL else f"signal {os.WTERMSIG(status)}"
        return "returned" if os.WEXITSTATUS(status) == 0 else f"status {os.WEXITSTATUS(status)}"


def _prepare(submission: Any, folder: Path, keep: int) -> list[str]:
    """A folder with one checkpoint, saved by the submission in a child; and all instants of the next save."""

    def work(child: Child) -> None:
        alone()
        submission.save_checkpoint(folder, numbered(1), keep)
        shutil.copytree(folder, "dry")
        instants: list[str] = []
        tracer.before = lambda instant, what: instants.append(what)
        with traced() as trace:
            submission.save_checkpoint("dry", numbered(2), keep)
        child.say({"instants": instants, "operations": trace.operations, "written": written(Path("dry"))})

    child = Child(work)
    told = child.hear() or {}
    child.end()
    if "instants" not in told:
        raise RuntimeError(f"the save on one rank alone failed: {told.get('raised', 'it came to no end')}")
    observe("operations", told["operations"])
    observe("written", told["written"])
    return told["instants"]


def kills(submission: Any, chunk: int, most: int, keep: int = 1) -> None:
    """Kill a save at its instants, each in a process and folder of its own; load what is left, and save once more."""
    tracer.chunk = chunk
    base = Path("base")
    instants = _prepare(submission, base, keep)
    observe("instants", instants)
    observe("usual", files(Path("dry")))
    chosen = _spread(instants, most)
    ends = []
    for number in chosen:
        folder = Path(f"kill-{number}")
        shutil.copytree(base, folder)

        def work(child: Child, number: int = number, folder: Path = folder) -> None:
            def die(instant: int, what: str) -> None:
                if instant == number:
                    _kill(os.getpid(), signal.SIGKILL)

            tracer.before = die
            alone()
            with traced():
                submission.save_checkpoint(folder, numbered(2), keep)

        ends.append(Child(work).end())

    def inspect(child: Child) -> None:
        alone()
        for number in chosen:
            folder = Path(f"kill-{number}")
            found = {"instant": number, "left": files(folder), **load(submission, folder)}
            try:
                submission.save_checkpoint(folder, numbered(3), keep)
                found["again"] = load(submission, folder)
                found["afterwards"] = files(folder)
            except Exception as error:
                found["again"] = {"loaded": None, "error": f"{type(error).__name__}: {error}"}
                found["afterwards"] = {}
            child.say(found)

    child = Child(inspect)
    seen = []
    while (word := child.hear()) is not None and "raised" not in word:
        seen.append(word)
    child.end()
    observe("chosen", chosen)
    observe("ends", ends)
    observe("seen", seen)


def breaks(submission: Any) -> None:
    """On the rank that writes, let one operation of a save fail, each but the writes; load what is left."""
    join()
    observe("scenario", "full_disk")
    for older in (0, 1):
        submission.save_checkpoint("base", numbered(older), 2)
    dist.barrier()
    if rank() == 0:
        shutil.copytree("base", "dry")
    dist.barrier()
    instants: list[str] = []
    tracer.before = lambda instant, what: instants.append(what)
    with traced() as trace:
        submission.save_checkpoint("dry", numbered(2), 2)
    of_ranks: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(of_ranks, instants)
    observe("usual", {"operations": trace.operations, "written": written(Path("dry"))})
    observe("earlier", list(files(Path("base"))))
    writer = max(range(len(of_ranks)), key=lambda one: len(of_ranks[one]))
    seen = []
    for number, broken in enumerate(of_ranks[writer]):
        if " a write of " in broken:
            continue

        def fail(instant: int, what: str, number: int = number) -> None:
            if instant == number and rank() == writer:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

        folder = Path(f"break-{number}")
        if rank() == 0:
            shutil.copytree("base", folder)
        observe("error", "")
        dist.barrier()
        tracer.before = fail
        with traced() as trace:
            error = raised(submission, folder, 2)
        observe("error", error)
        dist.barrier()
        done = {"operations": trace.operations, "written": written(folder)}
        seen.append({"instant": broken, "raised": error, **done, **load(submission, folder)})
        dist.barrier()
    observe("seen", seen)


def _spread(instants: list[str], most: int) -> list[int]:
    """At most so many instants: all that are no writes, and writes at even distances."""
    writes = [number for number, what in enumerate(instants) if " a write of " in what]
    others = [number for number in range(len(instants)) if number not in set(writes)]
    room = max(most - len(others), 8)
    if len(writes) > room:
        writes = [writes[round(i * (len(writes) - 1) / (room - 1))] for i in range(room)]
    return sorted({*writes, *others})


def reader(submission: Any, chunk: int) -> None:
    """While one process saves, another loads before every single operation of the save."""
    tracer.chunk = chunk
    folder = Path("live")
    _prepare(submission, folder, 1)

    def write(child: Child) -> None:
        alone()

        def stop(instant: int, what: str) -> None:
            child.say(what)
            child.wait()

        tracer.before = stop
        with traced():
            submission.save_checkpoint(folder, numbered(2), 1)

    def read(child: Child) -> None:
        alone()
        while child.wait():
            child.say(load(submission, folder))

    saver, loader = Child(write), Child(read)
    seen = []
    while (what := saver.hear()) is not None and isinstance(what, str):
        loader.go_on()
        found = loader.hear()
        if found is None:
            break
        seen.append({"instant": what, **found})
        saver.go_on()
    ended = saver.end()
    loader.go_on()
    observe("last", loader.hear())
    with contextlib.suppress(OSError):
        _kill(loader.pid, signal.SIGKILL)
    loader.end()
    observe("ended", ended)
    observe("seen", seen)


def removed(submission: Any, most: int) -> None:
    """A process is about to read its first file, or its second, …; before it does, another one saves with keep=1."""
    base = Path("older")

    def save(child: Child, folder: Path, number: int) -> None:
        alone()
        submission.save_checkpoint(folder, numbered(number), 1)

    Child(lambda child: save(child, base, 1)).end()
    seen = []
    for number in range(most):
        folder = Path(f"removed-{number}").absolute()
        shutil.copytree(base, folder)

        def read(child: Child, number: int = number, folder: Path = folder) -> None:
            alone()
            places: list[str] = []

            def stop(place: Any) -> None:
                if (
                    isinstance(place, int)
                    or folder not in Path(os.path.abspath(place)).parents
                    or not os.path.isfile(place)
                ):
                    return
                places.append(os.path.relpath(place, folder))
                if len(places) == number + 1:
                    child.say(places[-1])
                    child.wait()

            tracer.reading = stop
            child.say(load(submission, folder))

        reader = Child(read)
        name = reader.hear()
        if not isinstance(name, str):  # it opens no more files
            reader.end()
            break
        ended = Child(lambda child, folder=folder: save(child, folder, 2)).end()
        reader.go_on()
        found = reader.hear() or {"loaded": None, "error": "it came to no end", "warned": []}
        reader.end()
        seen.append({"file": name, "number": number + 1, "ended": ended, **found})
    observe("seen", seen)
