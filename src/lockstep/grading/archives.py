"""Strangers' folders, zips and tars, read member by member: names and bytes come out, nothing is ever unpacked.

Everything in an archive is a claim: sizes in headers, names, kinds, the number of members. None of it is trusted.
What is read is counted while it is read, against a `Budget`. A link, a device or a pipe is a kind of member and never
followed or opened. A name is split into parts and checked before anything else. A zip's members are read only when
asked for, so a bomb in it is never inflated. A tar has to be inflated in order, and is counted.
"""

from __future__ import annotations

import io
import lzma
import os
import re
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any

from .text import visible

SUFFIXES = (".zip", ".tar", ".tgz", ".txz", ".tar.gz", ".tar.xz")
# What editors, systems and version control leave: never looked at, and never mentioned.
JUNK = frozenset({"__MACOSX", "__pycache__", "node_modules", "site-packages", "venv"})
HIDDEN = frozenset(
    {".DS_Store", ".git", ".github", ".gitignore", ".idea", ".ipynb_checkpoints", ".lockstep", ".venv", ".vscode"}
)
CHUNK = 1 << 16
MOST_ENTRIES = 200_000  # of one folder that are looked at; far more than any budget allows
# What the standard library raises at archives that are damaged, on purpose or not.
BROKEN = (zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, struct.error, EOFError, OSError, ValueError,
          OverflowError, NotImplementedError, RuntimeError)  # fmt: skip
SIGNATURE = b"PK\x01\x02"  # every entry of a zip's directory begins with it


class Refused(Exception):
    """What is here must not be read further. The message is one readable line."""


class Overdrawn(Refused):
    """The budget is spent: nothing more is read for this learner."""


class Kind(Enum):
    FILE = "file"
    FOLDER = "folder"
    LINK = "link"
    SPECIAL = "device or pipe"


@dataclass(frozen=True)
class ArchiveMember:
    """One name in a folder or an archive.

    `read(limit)` gives its bytes, at most `limit` + 1; it is valid until the next member. `problem` says what is wrong
    with the name itself: such a member is not to be read, and `parts` only tell whose folder it claims to be in.
    """

    parts: tuple[str, ...]
    kind: Kind
    read: Callable[[int], bytes]
    problem: str = ""


@dataclass
class Budget:
    """What may still be read for one learner; each method raises Overdrawn when it is spent."""

    members: int = 5_000
    bytes: int = 64 << 20
    ratio: int = 200  # of inflated to stored bytes, once more than 1 MiB came out
    depth: int = 16
    archive_bytes: int = 16 << 20
    header_bytes: int = 1 << 18  # Python 3.11's tarfile takes 0.1 s for 8 KiB made to be slow

    def count_member(self) -> None:
        self.members -= 1
        if self.members < 0:
            raise Overdrawn("holds too many files: hand in the exercises' files alone")

    def count_bytes(self, count: int) -> None:
        self.bytes -= count
        if self.bytes < 0:
            raise Overdrawn("unpacks to too many bytes: hand in the exercises' files alone")

    def check_announced(self, count: int) -> None:
        """Refuse what says that it has more bytes than may be read: tarfile goes past them even if they are missing."""
        self.count_bytes(count)
        self.bytes += count

    def count_header(self, count: int) -> None:
        """Count bytes of names and attributes in a tar."""
        self.header_bytes -= count
        if count > 8192 or self.header_bytes < 0:
            raise Overdrawn("has a tar header of unreasonable length")

    def check_ratio(self, stored: int, inflated: int) -> None:
        """Refuse what blows up; source code packs ten to one, rarely more."""
        if inflated > 1 << 20 and inflated > self.ratio * max(stored, 1):
            raise Overdrawn(f"unpacks to over {self.ratio} times its size, as only an archive bomb does")


def printable(text: str, width: int = 80) -> str:
    """A stranger's name made safe to show: control, direction and undecodable characters escaped, the middle cut."""
    shown = visible(text[: 4 * width])
    if len(text) > 4 * width:
        shown += "…" + text[-1:].encode("unicode_escape").decode()
    return shown if len(shown) <= width else f"{shown[: width * 2 // 3]}…{shown[-width // 4 :]}"


def split(name: str) -> tuple[tuple[str, ...], str]:
    """An archive's member name as parts, and what is wrong with it, if it points outside or is no path at all."""
    path = name.replace("\\", "/")
    parts = tuple(part for part in path.split("/") if part not in ("", "."))
    if path.startswith("/") or re.match(r"[A-Za-z]:", path):
        return (), f"holds a path that points outside of it: {printable(name)}"
    if ".." in parts:
        return parts[: parts.index("..")], f"holds a path that points outside of it: {printable(name)}"
    if "\0" in name:
        return parts[:1], f"holds a name with a null byte: {printable(name)}"
    return parts, ""


def is_archive(name: str) -> bool:
    """True when a file of this name is to be looked into."""
    return name.lower().endswith(SUFFIXES)


def is_junk(parts: tuple[str, ...]) -> bool:
    """True for what no learner handed in on purpose: hidden files and folders, caches, environments."""
    return any(part in JUNK or part.startswith(".") for part in parts)


def is_litter(name: str) -> bool:
    """The same at the level of the learners' folders, where a leading dot may be part of a learner's name."""
    return name in JUNK or name in HIDDEN or name.startswith("._")


def members(file: IO[bytes], budget: Budget) -> Iterator[ArchiveMember]:
    """The members of an archive, in its order. Its first bytes say what it is, not its name."""
    file.seek(0)
    start = file.read(6)
    file.seek(0)
    if start.startswith(b"PK"):
        yield from _zip_members(file, budget)
    else:
        yield from _tar_members(_Inflated(file, start, budget), budget)


def folder_members(root: Path, descend: Callable[[tuple[str, ...]], bool]) -> Iterator[ArchiveMember]:
    """What is in a folder, sorted; links are not followed. `descend` says whether to look into a folder in it."""
    waiting: list[tuple[str, ...]] = [()]
    while waiting:
        where = waiting.pop()
        try:
            with os.scandir(root.joinpath(*where)) as found:
                entries = sorted(islice(found, MOST_ENTRIES), key=lambda entry: os.fsencode(entry.name))
        except OSError:
            continue
        folders = []
        for entry in entries:
            parts = (*where, entry.name)
            mode = entry.stat(follow_symlinks=False).st_mode
            yield ArchiveMember(parts, _kind(mode), partial(_read_file, entry.path))
            if stat.S_ISDIR(mode) and descend(parts):
                folders.append(parts)
        waiting += reversed(folders)


def _kind(mode: int) -> Kind:
    kinds = {stat.S_IFREG: Kind.FILE, 0: Kind.FILE, stat.S_IFDIR: Kind.FOLDER, stat.S_IFLNK: Kind.LINK}
    return kinds.get(stat.S_IFMT(mode), Kind.SPECIAL)


def _read_file(path: str, limit: int) -> bytes:
    try:
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise Refused(f"cannot be read: {error.strerror}") from None
    with open(number, "rb") as file:
        found = os.fstat(number)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
            raise Refused("is a link or no regular file")
        return file.read(limit + 1)


# Zips


def _zip_members(file: IO[bytes], budget: Budget) -> Iterator[ArchiveMember]:
    if _signatures(file, budget.members) > budget.members:
        raise Refused("holds too many files: hand in the exercises' files alone")
    try:
        archive = zipfile.ZipFile(file)
    except BROKEN as error:
        raise Refused(f"is no zip that can be read ({printable(str(error))})") from None
    with archive:
        _refuse_overlaps(archive)
        for info in archive.infolist():
            budget.count_member()
            parts, problem = split(_name(info))
            # A name may be empty, which zipfile's own is_dir does not expect.
            kind = Kind.FOLDER if info.filename.endswith("/") else _kind(info.external_attr >> 16)
            if problem or 0 < len(parts) <= budget.depth:
                read = partial(_read_zipped, archive, info, budget)
                yield ArchiveMember(parts, kind, read, problem)


def _name(info: zipfile.ZipInfo) -> str:
    """The member's name. Info-ZIP and macOS write UTF-8 without the flag for it, which reads as another alphabet: names
    that are UTF-8 are taken for it, since hardly any text of the old code page is.
    """
    if info.flag_bits & 0x800:
        return info.orig_filename
    try:
        return info.orig_filename.encode("cp437").decode("utf-8")
    except UnicodeError:
        return info.orig_filename


def _signatures(file: IO[bytes], most: int) -> int:
    """At least as many as the zip has entries, counted before zipfile reads them. Stops above `most`."""
    count, tail = 0, b""
    while count <= most and (chunk := file.read(1 << 20)):
        count += (tail + chunk).count(SIGNATURE)
        tail = chunk[-3:]
    file.seek(0)
    return count


def _refuse_overlaps(archive: zipfile.ZipFile) -> None:
    """Members that share their bytes are a bomb, or an archive that two programs read differently."""
    end = 0
    for info in sorted(archive.infolist(), key=lambda info: info.header_offset):
        if info.header_offset < end:
            raise Refused("holds members that overlap each other, as only an archive bomb does")
        end = info.header_offset + 30 + info.compress_size
    if end > archive.start_dir:
        raise Refused("holds members that overlap its directory")


def _read_zipped(archive: zipfile.ZipFile, info: zipfile.ZipInfo, budget: Budget, limit: int) -> bytes:
    if info.flag_bits & 0x41:
        raise Refused("is encrypted")
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise Refused("is packed by a method other than deflate")
    found = bytearray()
    try:
        with archive.open(info) as file:
            while len(found) <= limit and (chunk := file.read(min(CHUNK, limit + 1 - len(found)))):
                found += chunk
                budget.count_bytes(len(chunk))
                budget.check_ratio(info.compress_size, len(found))
    except BROKEN as error:
        raise Refused(f"cannot be unpacked ({printable(str(error))})") from None
    return bytes(found)


# Tars


class _Inflated(io.RawIOBase):
    """A tar's bytes, from gzip, xz or as they are, counted as they are read."""

    def __init__(self, file: IO[bytes], start: bytes, budget: Budget) -> None:
        self._file, self._budget = file, budget
        self._new: Callable[[], Any] | None = None
        if start.startswith(b"\x1f\x8b"):
            self._new = lambda: zlib.decompressobj(wbits=31)
        elif start.startswith(b"\xfd7zXZ\0"):
            self._new = lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=128 << 20)
        self._engine = self._new() if self._new else None
        self._stored = self._came = 0
        self._left = b""

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        """At most `size` bytes; fewer only at the end."""
        found = bytearray()
        while len(found) < size and (chunk := self._next(size - len(found))):
            found += chunk
            self._came += len(chunk)
            self._budget.count_bytes(len(chunk))
            if self._engine is not None:
                self._budget.check_ratio(self._stored, self._came)
        return bytes(found)

    def _next(self, size: int) -> bytes:
        if self._engine is None:
            return self._file.read(min(size, CHUNK))
        while True:
            if self._engine.eof:
                self._left = self._engine.unused_data
                if not self._left.startswith((b"\x1f\x8b", b"\xfd7zXZ\0")):
                    return b""
                assert self._new is not None
                self._engine = self._new()
            hungry = getattr(self._engine, "needs_input", not self._left)
            data = self._left
            if hungry and not data:
                data = self._file.read(CHUNK)
                self._stored += len(data)
                if not data:
                    last: bytes = self._engine.decompress(b"", min(size, CHUNK))
                    return last
            out: bytes = self._engine.decompress(data, min(size, CHUNK))
            self._left = getattr(self._engine, "unconsumed_tail", b"")
            if out:
                return out


def _tar_members(stream: _Inflated, budget: Budget) -> Iterator[ArchiveMember]:
    class Header(tarfile.TarInfo):
        """Refuses headers that only an attacker writes, before tarfile reads what they announce."""

        @classmethod
        def frombuf(cls, *arguments: Any, **keywords: Any) -> Header:
            found = super().frombuf(*arguments, **keywords)
            if found.size < 0:
                raise Refused("has a tar header with a negative size")
            if found.type in (b"x", b"g", b"X", b"L", b"K"):
                budget.count_member()
                budget.count_header(found.size)
            return found

    try:
        with tarfile.open(fileobj=stream, mode="r|", tarinfo=Header, bufsize=CHUNK) as archive:
            for info in archive:
                archive.members = []  # type: ignore[attr-defined]
                budget.count_member()
                if info.size < 0:  # by a pax header
                    raise Refused("has a tar header with a negative size")
                budget.check_announced(info.size)
                parts, problem = split(info.name)
                if problem or 0 < len(parts) <= budget.depth:
                    yield ArchiveMember(parts, _tar_kind(info), partial(_read_tarred, archive, info), problem)
    except BROKEN as error:
        raise Refused(f"is no tar or zip that can be read ({printable(str(error))})") from None


def _tar_kind(info: tarfile.TarInfo) -> Kind:
    if info.isdir():
        return Kind.FOLDER
    if info.issym() or info.islnk():
        return Kind.LINK
    return Kind.FILE if info.isreg() and not info.issparse() else Kind.SPECIAL


def _read_tarred(archive: tarfile.TarFile, info: tarfile.TarInfo, limit: int) -> bytes:
    try:
        file = archive.extractfile(info)
        return file.read(min(limit + 1, info.size)) if file else b""
    except BROKEN as error:  # also for a file that was cut off
        raise Refused(f"cannot be unpacked ({printable(str(error))})") from None
