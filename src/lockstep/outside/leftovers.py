"""What a job has left: which files are flight-recorder dumps, error files of torchrun or py-spy's texts, and of which rank."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from ..ranks.explain import parse as parse_traceback
from ..ranks.report import Error
from . import dumps, stacks

LARGEST = 1 << 28  # Bytes of the largest file that is read: a hundred thousand calls take less
ENDINGS = re.compile(r"\.(json|txt|log|pickle|pkl|bin|dump|out)$")
T = TypeVar("T")


@dataclass(frozen=True)
class Failed:
    """What a rank's error file says, and when it was written."""

    rank: int
    error: Error
    at: float


@dataclass
class Leftovers:
    """Everything that was found, by rank. `refused` has a line for each file that can't be used."""

    dumps: dict[int, dumps.Dump] = field(default_factory=dict)
    stacks: dict[int, tuple[stacks.Thread, ...]] = field(default_factory=dict)
    errors: dict[int, Failed] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)


class _Refused(Exception):
    """Why a file can't be used."""


class _Foreign(_Refused):
    """It is no file that a job leaves: in a folder such a file is passed over."""


def read(paths: Iterable[Path]) -> Leftovers:
    """Read these files, and all in these folders."""
    found = Leftovers()
    for path in paths:
        for file in _below(path):
            try:
                _take(found, file)
            except _Foreign as why:
                if file == path:
                    found.refused.append(f"{file}: {why}")
            except _Refused as why:
                found.refused.append(f"{file}: {why}")
    return found


def _below(path: Path) -> Iterator[Path]:
    return iter(sorted(one for one in path.rglob("*") if one.is_file())) if path.is_dir() else iter((path,))


def _take(found: Leftovers, file: Path) -> None:
    if not file.is_file():
        raise _Refused("it is no regular file" if file.exists() else "there is no such file")
    try:
        if file.stat().st_size > LARGEST:
            raise _Foreign(f"it is larger than {LARGEST >> 20} MiB")
        data = file.read_bytes()
    except OSError as why:
        raise _Refused(why.strerror or str(why)) from None
    if data[:1] == pickle.PROTO or (data.lstrip()[:1] == b"{" and b'"entries"' in data):
        try:
            _put(found.dumps, rank := _rank(file), dumps.parse(data, rank))
        except dumps.NoDump as why:
            raise _Refused(str(why)) from None
        return
    text = dumps.clean(data.decode(errors="replace"), keep="\n")
    if (error := _error(text)) is not None:
        rank = _rank(file.parent if file.name == "error.json" else file)
        _put(found.errors, rank, Failed(rank, *error))
    elif (threads := stacks.from_text(text)) is not None:
        _put(found.stacks, _rank(file), threads)
    else:
        raise _Foreign("it is no flight-recorder dump, no error file of torchrun and no output of py-spy dump")


def _put(known: dict[int, T], rank: int, new: T) -> None:
    if rank in known:
        raise _Refused(f"there is another file of rank {rank}: give the files of one run and one attempt")
    known[rank] = new


def _rank(file: Path) -> int:
    """The number at the end of the name, before any ending: `trace_rank_3`, `rank3.json`, and of `0/error.json` the 0."""
    found = re.search(r"(\d{1,6})$", ENDINGS.sub("", file.name))
    if found is None:
        raise _Refused("its name does not end with the rank's number, as dump_0 does")
    return int(found[1])


def _error(text: str) -> tuple[Error, float] | None:
    """What an error file holds, and when it was written; None for any other text."""
    try:
        message = json.loads(text)["message"]
        if isinstance(message, str):
            return Error("an error", dumps.clean(message)), 0.0
        return parse_traceback(dumps.clean(str(message["extraInfo"]["py_callstack"]), keep="\n")), float(
            message["extraInfo"]["timestamp"]
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
