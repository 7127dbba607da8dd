"""Reads torch's flight-recorder dumps: which calls a rank's process groups were asked for, by NCCL or gloo, torch 2.8 and later.

A dump is a pickle, and a pickle can run programs. Nothing is loaded here but numbers, texts, lists and dictionaries. What
comes out is checked against the fields that are used, and all others are passed over.
"""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated, Any

import msgspec

from ..ranks.calls import around, inside_of
from ..ranks.report import Collective, Frame
from .stacks import is_users

TYPES = {
    "Float": ("float32", 4), "Double": ("float64", 8), "Half": ("float16", 2), "BFloat16": ("bfloat16", 2), "Byte": ("uint8", 1),
    "Char": ("int8", 1), "Short": ("int16", 2), "Int": ("int32", 4), "Long": ("int64", 8), "Bool": ("bool", 1),
}  # fmt: skip
"""torch's names for types in a dump, as users know them, and their bytes. Those of one byte may be missing."""
KINDS = {
    "_all_gather_base": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "all_reduce_barrier": "barrier",
    "_broadcast_oop": "broadcast",
    "_reduce_oop": "reduce",
    "allreduce_coalesced": "all_reduce_coalesced",
}
Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class NoDump(Exception):
    """This is no dump, or a broken one."""


class _Place(msgspec.Struct):
    filename: str
    line: int
    name: str = ""


class _Entry(msgspec.Struct):
    process_group: tuple[str, str]
    collective_seq_id: Number
    profiling_name: str
    state: str
    p2p_seq_id: Number = 0
    is_p2p: bool = False
    retired: bool = False
    input_sizes: list[list[Number]] = []
    input_dtypes: list[str] = []
    time_created_ns: Number = 0
    frames: list[_Place] = []

    @property
    def call(self) -> tuple[str, bool, int]:
        """Equal for the parts of one coalesced call."""
        return self.process_group[0], self.is_p2p, self.p2p_seq_id if self.is_p2p else self.collective_seq_id


class _Group(msgspec.Struct):
    ranks: str = "[]"


class _Dump(msgspec.Struct):
    version: str
    entries: list[_Entry]
    pg_config: dict[str, _Group] = {}


@dataclass(frozen=True)
class Dump:
    """One rank's calls, oldest first: those of a whole group, and those between two ranks. `ended` has the calls' numbers.

    `members` are the ranks of each group, for those groups that the dump describes (gloo's describe none); `titles` say what
    each group was called when it was made: `default_pg`.
    """

    rank: int
    collectives: tuple[Collective, ...]
    transfers: tuple[Collective, ...]
    ended: frozenset[int]
    members: dict[str, tuple[int, ...]]
    titles: dict[str, str]


class _Plain(pickle._Unpickler):
    """Plain data alone. This is the unpickler in Python: a hostile file makes the one in C allocate any amount of memory."""

    def find_class(self, module: str, name: str) -> Any:
        """Called for whatever is no plain data."""
        raise pickle.UnpicklingError(f"it asks for {module!a}, {name!a}; nothing of it was run")


def parse(data: bytes, rank: int) -> Dump:
    """The dump in these bytes, a pickle or JSON. Raises NoDump."""
    try:
        loaded = json.loads(data) if data.lstrip()[:1] == b"{" else _Plain(io.BytesIO(data)).load()
    except pickle.UnpicklingError as error:
        raise NoDump(f"it holds more than plain data, or is broken: {error}") from None
    except Exception as error:  # a broken pickle raises whatever its bytes lead to
        raise NoDump(f"it is broken or cut off ({type(error).__name__})") from None
    try:
        dump = msgspec.convert(loaded, _Dump, strict=False)
    except (msgspec.ValidationError, RecursionError) as error:
        raise NoDump(f"it is no flight-recorder dump: {error}") from None
    members = {clean(name): ranks for name, group in dump.pg_config.items() if (ranks := _ranks(group.ranks)) and name}
    calls, ended = [], set()
    for number, (_, parts) in enumerate(groupby(dump.entries, key=lambda entry: entry.call), 1):
        entries = list(parts)
        calls.append(_call(entries, rank, number, members))
        if entries[-1].retired or entries[-1].state == "completed":  # of a coalesced call, only the last part tells
            ended.add(number)
    return Dump(
        rank,
        tuple(call for call in calls if not call.is_point_to_point),
        tuple(call for call in calls if call.is_point_to_point),
        frozenset(ended),
        members,
        {clean(name): clean(title) for name, title in (entry.process_group for entry in dump.entries)},
    )


def _ranks(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text))) if re.fullmatch(r"\[(\d{1,6}(, ?)?)*\]", text) else ()


def clean(text: str, keep: str = "") -> str:
    """Without what would steer a terminal."""
    return "".join(letter for letter in text if letter.isprintable() or letter in keep)


def _call(entries: list[_Entry], rank: int, number: int, members: dict[str, tuple[int, ...]]) -> Collective:
    group, is_transfer, seq = entries[-1].call
    group, first = clean(group), entries[0]
    said, _, ends = clean((first if is_transfer else entries[-1]).profiling_name.rpartition(":")[2]).partition(" ")
    if is_transfer and said not in ("send", "recv"):
        said = "recv"
    peers = [int(one) for one in re.findall(r"\d{1,6}", ends)][-1:]
    ranks = members.get(group, ())
    peer = ranks[peers[0]] if peers and peers[0] < len(ranks) else next(iter(peers), None)
    sizes = [one for entry in entries for one in entry.input_sizes]
    types = [one for entry in entries for one in entry.input_dtypes]
    dtype, bytes_each = TYPES.get(types[0], (clean(types[0]).lower(), 1)) if types else ("", 0)
    frame, part = _place(first.frames)
    return Collective(
        rank, number, KINDS.get(said, said), group, seq, sum(map(math.prod, sizes)) * bytes_each,
        tuple(sizes[0]) if sizes else (), dtype, first.time_created_ns / 1e9, frame, part, peer=peer, members=ranks,
    )  # fmt: skip


def _place(frames: Iterable[_Place]) -> tuple[Frame | None, str]:
    """The innermost place in the user's code, and the part of DDP that it led to."""
    part = ""
    for one in frames:
        if is_users(one.filename):
            # Its line will be read: never from a pipe or a device that the dump names.
            is_file = os.path.isfile(one.filename) and not one.filename.startswith(("/proc/", "/sys/"))
            known = is_file or not os.path.exists(one.filename)
            return (Frame(clean(one.filename), one.line, clean(one.name)) if known else None), part
        part = around(part, inside_of(one.filename, one.name))
    return None, part
