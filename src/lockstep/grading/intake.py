"""Taking in submissions: from what a teacher has downloaded to what can be graded.

`take_in` reads a folder of folders, a folder of files, or a zip or tar from Gradescope, Moodle, Canvas or GitHub
Classroom. It leaves one clean folder for each learner: files with the course's own names, copied byte by byte, and
nothing else. (UTF-16 becomes UTF-8, and of a notebook its definitions are taken; a note says so.)

Theory of operation. Four modules share the work. `archives` reads what strangers wrote, within limits; `layout` and
`learners` say whose a path is; this one decides what is taken. No name from a download ever becomes a path: files are
written under the course's own names, into a folder named by a made-up id. Nothing is executed, imported, unpickled or
followed. The download is read twice, first for the names alone, to see how it is laid out and who is in it. Each
learner has a budget (`Budget`). One who exceeds it is refused, and the others are not affected; only a download that
is itself broken stops everything, with `IntakeError`.
"""

from __future__ import annotations

import codecs
import difflib
import hashlib
import io
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path

from ..course import Course, leaf, unused
from . import by_content
from .apart import read_apart
from .archives import (
    ArchiveMember,
    Budget,
    Kind,
    Overdrawn,
    Refused,
    is_archive,
    is_junk,
    is_litter,
    members,
    printable,
)
from .layout import NOT_THEIRS, IntakeError, Layout, read
from .learners import METADATA, Claim, Owner, metadata
from .submission import MAX_BYTES

__all__ = ["Handed", "IntakeError", "take_in"]

EXTRAS = ("clinic/ticket.txt", "train.sbatch")
NESTING = 2  # a learner's archive, and one in it
LINES = 12  # of what is said of one learner
METADATA_BYTES = 64 << 20
NOTEBOOK_BYTES = 8 << 20
MOST_NEAR = 8  # files of one learner whose names are nearly an exercise's
MOST_LOOKED_INTO = 16  # files of one learner that are read for what they define
MOST_EXPLAINED = 4  # exercises of which a learner is told what a file must define
_ADDED = re.compile(
    r"^(copy_of|my)_|_(final|new|last|latest|fixed|done|submission|solution|copy|edited|updated|v?\d{1,4})(?=_|$)"
)
"""What people put around a file's name."""
Parts = tuple[str, ...]  # of a path
_Known = tuple[str, int]  # an exercise's file, and the number after the name that it was handed in under


@dataclass(frozen=True)
class Handed:
    """What one learner handed in, as far as it can be graded.

    `id` is stable, unique and safe as a file name; `shown` is the name in the download, made printable. `folder` holds
    `files` (`train_ddp.py`, `clinic/short_shard.py`) and nothing else. `refused` says, line by line, what could not be
    taken, `notes` what was left out or chosen. No files and a refusal: nothing can be graded.
    `account` is the LMS and its number of the learner (`moodle 123`), if known; Canvas adds that of the last upload.
    """

    id: str
    shown: str
    folder: Path
    files: tuple[str, ...]
    handed_in: datetime | None = None
    marked_late: bool = False
    refused: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    account: str = ""


@dataclass(frozen=True)
class _Expected:
    """The names that are taken, and those that were asked for."""

    files: tuple[str, ...]
    course: Course
    asked: tuple[str, ...] = ()

    @classmethod
    def of(cls, course: Course) -> _Expected:
        """Every exercise's file, and the course's few others where it has them."""
        there = [name for name in EXTRAS if (course.exercises / name).is_file() or (course.solutions / name).is_file()]
        return cls((*(f"{name}.py" for name in course.names), *there), course)

    @cached_property
    def by_leaf(self) -> dict[str, str]:
        """From a name without folders to the file; the first in the course's order where two share one."""
        return {leaf(file): file for file in reversed(self.files)}

    @cached_property
    def definitions(self) -> dict[str, frozenset[str]]:
        """What a file of another name must define to be taken for an exercise's."""
        found = by_content.definitions(self.course).items()
        return {f"{name}.py": own for name, own in found if not self.asked or f"{name}.py" in self.asked}

    def find(self, parts: Parts) -> _Known | None:
        """The file that a path stands for, and the number that an LMS or a browser added to its name; else None."""
        exact = "/".join(parts[-2:])
        if exact in self.files:
            return exact, 0
        name, number = parts[-1], 0
        if found := re.fullmatch(r"(\w+)(?:-(\d{1,6})| ?\((\d{1,6})\))(\.\w+)", name, re.ASCII):
            name, number = found[1] + found[4], int(found[2] or found[3])
        grouped = "/".join((*parts[-2:-1], name))
        if grouped in self.files:
            return grouped, number
        return (self.by_leaf[name], number) if name in self.by_leaf else None

    def near(self, name: str) -> str | None:
        """The Python file that is plainly meant by a name that is not quite right: `Setup_DDP_final.py.txt`."""
        stem = re.sub(r"(\.(py|txt))+$", "", lowered := name[:100].lower())
        plain = re.sub(r"[^a-z0-9]+", "_", stem).strip("_")
        file = self.by_leaf.get(f"{_ADDED.sub('', plain)}.py") if stem != lowered else None
        return file if file in (self.asked or self.files) else None


@dataclass(frozen=True)
class _Candidate:
    """A file for an exercise; that with the greatest `rank` is taken, and among equals the first by its name."""

    # In exercises/, the upload's number, the number after the name, how near to the top.
    rank: tuple[int, int, int, int]
    shown: str
    digest: bytes

    @property
    def order(self) -> tuple[tuple[int, ...], str]:
        """Sorts the best first."""
        return tuple(-part for part in self.rank), self.shown


@dataclass
class _Gathering:
    """One learner's work while the download is read."""

    owner: Owner
    id: str
    folder: Path
    expected: _Expected
    budget: Budget = field(default_factory=Budget)
    late: bool = False
    hostile: bool = False
    taken: dict[str, _Candidate] = field(default_factory=dict)
    offered: dict[str, list[_Candidate]] = field(default_factory=dict)
    twice: set[str] = field(default_factory=set)
    seen: dict[tuple[str, ...], bytes] = field(default_factory=dict)
    refused: dict[str, None] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)
    beside: dict[str, None] = field(default_factory=dict)
    upload: int = 0
    looked_into: int = 0
    near: dict[str, dict[bytes, tuple[str, bytes]]] = field(default_factory=dict)  # by file and digest: name, content

    def offer(self, member: ArchiveMember, found: Claim) -> None:
        """Look at one member of the download that is this learner's."""
        self.late |= found.owner.late
        self.upload = max(self.upload, found.upload)
        if self.hostile:
            return
        try:
            self.budget.count_member()
            self._look(member, found.rest, found.upload, ())
        except Refused as refusal:
            self.give_up(f"what was handed in {refusal}")

    def give_up(self, line: str) -> None:
        """Take nothing from this learner: it was meant to harm, or cannot be understood."""
        self.hostile = True
        self.refused = {line: None}
        self.taken.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _look(self, member: ArchiveMember, parts: Parts, upload: int, within: Parts) -> None:
        if member.problem:
            raise Refused(member.problem)
        if not parts and member.kind in (Kind.LINK, Kind.SPECIAL):
            raise Refused(f"is a {member.kind.value}, not a folder or a file")
        if not parts or is_junk(parts) or NOT_THEIRS.intersection(parts[:-1]):
            return
        shown = printable("/".join((*within, *parts)))
        if not self.expected.by_leaf.keys().isdisjoint(parts[:-1]):
            return  # inside a folder that bears a file's name: said once, of the folder
        known = self.expected.find(parts)
        if known and member.kind is Kind.FILE:
            self._consider(known, member, parts, upload, within, shown)
        elif known:
            self.refused[f"{shown} is a {member.kind.value}, not a file"] = None
        elif member.kind is Kind.FILE and is_archive(parts[-1]):
            self._open(member, upload, (*within, parts[-1]), shown)
        elif member.kind in (Kind.LINK, Kind.SPECIAL):
            self.notes[f"ignored: {shown}, a {member.kind.value}"] = None
        elif member.kind is Kind.FILE and not self._keep_near(member, parts[-1], within, shown):
            self._pass_by(parts[-1])

    def _keep_near(self, member: ArchiveMember, name: str, within: Parts, shown: str) -> bool:
        """Keep a file that is an exercise's by its name, nearly, or by what it defines, until it is known whether there
        is one of the right name. False for any other file.
        """
        file, notebook = self.expected.near(name), name.endswith(".ipynb")
        if not (file or notebook or name.endswith(".py")) or sum(map(len, self.near.values())) >= MOST_NEAR:
            return False
        self.looked_into += not file
        if self.looked_into > MOST_LOOKED_INTO:
            return False
        data = self._read(member, within, shown, NOTEBOOK_BYTES if notebook else MAX_BYTES)
        if data is None:
            return True
        if notebook:
            data = read_apart(by_content.of_notebook, data, otherwise="").encode("utf-8", "replace")
        text, wanted = data.decode("utf-8", "replace"), self.expected.definitions
        found: list[str] = [] if file else read_apart(by_content.exercises_in, text, wanted, otherwise=[])
        files = [file] if file else found
        for file in files:
            self.near.setdefault(file, {}).setdefault(hashlib.sha256(data).digest(), (printable(name), data))
        return bool(files)

    def _pass_by(self, name: str) -> None:
        if len(self.beside) < 200:
            self.beside[name[:200]] = None

    def _consider(
        self, known: _Known, member: ArchiveMember, parts: Parts, upload: int, within: Parts, shown: str
    ) -> None:
        file, number = known
        data = self._read(member, within, shown)
        if data is None:
            return
        digest = hashlib.sha256(data).digest()
        if self.seen.setdefault((str(upload), *within, "", *parts), digest) != digest:
            self.twice.add(file)
        new = _Candidate(("exercises" in parts[:-1], upload, number, -len(parts)), shown, digest)
        self.offered.setdefault(file, []).append(new)
        old = self.taken.get(file)
        if old is None or new.order < old.order:
            self.taken[file] = new
            target = self.folder / file
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)

    def _read(self, member: ArchiveMember, within: Parts, shown: str, most: int = MAX_BYTES) -> bytes | None:
        """The file's bytes; None, with a line for the learner, when it cannot be read or is too long."""
        try:
            data = member.read(most)
        except Overdrawn:
            raise
        except Refused as refusal:
            self.refused[f"{shown} {refusal}"] = None
            return None
        if not within:  # an archive's members were counted while they were inflated
            self.budget.count_bytes(len(data))
        if len(data) > most:
            self.refused[f"{shown} has more than {most >> 20} MiB; a submission is one Python file"] = None
            return None
        if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            self.notes[f"{shown} is in UTF-16, which Python does not run: it was turned into UTF-8"] = None
            data = data.decode("utf-16", "replace").encode()[:most]
        return data

    def _take_near(self) -> None:
        """Take a file whose name is nearly right where there is no other; of several, none, and say so."""
        for file, kept in sorted(self.near.items()):
            names = sorted(name for name, _ in kept.values())
            if file in self.taken or self.hostile:
                self.notes.update(dict.fromkeys(f"ignored: {name}, since {file} is there" for name in names))
            elif len(kept) > 1:
                listed = " and ".join((", ".join(names[:-1]), names[-1]))
                self.refused[f"{listed}: which of them is {leaf(file)}? Hand in one of that name"] = None
            else:
                ((digest, (name, data)),) = kept.items()
                self.taken[file] = _Candidate((0, 0, 0, 0), name, digest)
                self.offered[file] = [self.taken[file]]
                (self.folder / file).parent.mkdir(parents=True, exist_ok=True)
                (self.folder / file).write_bytes(data)
                notebook = name.endswith(".ipynb")
                why = "its imports, functions, classes and constants" if notebook else "its name should be that"
                self.notes[f"{name} was taken for {leaf(file)}: {why}"] = None

    def _open(self, member: ArchiveMember, upload: int, within: Parts, shown: str) -> None:
        if len(within) > NESTING:
            self.refused[f"{shown} is an archive too deep in other archives: it was not opened"] = None
            return
        try:
            data = member.read(self.budget.archive_bytes)
        except Overdrawn:
            raise
        except Refused as refusal:
            self.refused[f"{shown} {refusal}"] = None
            return
        if len(data) > self.budget.archive_bytes:
            most = self.budget.archive_bytes >> 20
            self.refused[f"{shown} has more than {most} MiB: hand in the exercises' files alone"] = None
            return
        left, folders = self.budget.members, 0
        try:
            for inner in members(io.BytesIO(data), self.budget):
                folders += inner.kind is Kind.FOLDER
                self._look(inner, inner.parts, upload, within)
        except Refused as refusal:
            text = str(refusal)
            raise Refused(text if text.startswith("in ") else f"in {shown}: it {text}") from None
        if left - self.budget.members == folders:  # all that was counted
            self.refused[f"{shown} is an empty archive: there is no file in it"] = None

    def finish(self, handed_in: datetime | None) -> Handed:
        """What was gathered, as it will be graded."""
        for file in sorted(self.twice & set(self.taken)):
            (self.folder / file).unlink(missing_ok=True)
            del self.taken[file]
            why = "with different contents: nobody can tell which is meant"
            self.refused[f"{file} is in the archive twice, {why}"] = None
        self._take_near()
        for file, best in sorted(self.taken.items()):
            others = sorted((one for one in self.offered[file] if one.digest != best.digest), key=lambda one: one.order)
            if others:
                next_best = others[0].rank
                newer = best.rank[0] == next_best[0] and best.rank[1:3] != next_best[1:3]
                why = "the newest by its number" if newer else "in exercises/ or nearest to the top"
                names = ", ".join(one.shown for one in others[:3])
                self.notes[f"several files for {file}: {best.shown} was taken, {why}; not taken: {names}"] = None
        beside = sorted(name for name in self.beside if name.endswith((".py", ".ipynb")))
        if beside and not self.hostile:
            listed = ", ".join(printable(name, 40) for name in beside[:5])
            more = f" and {len(beside) - 5} more" if len(beside) > 5 else ""
            self.notes[f"ignored, no exercise in it: {listed}{more}"] = None
            self._say_what_lacks()
            self._ask(beside)
        if not self.taken and not self.hostile:
            self.refused[self._nothing()] = None
        files = tuple(file for file in self.expected.files if file in self.taken)
        self.folder.mkdir(parents=True, exist_ok=True)
        refused, notes = _lines(self.refused), _lines(self.notes)
        return Handed(
            self.id, self.owner.shown, self.folder, files, handed_in, self.late, refused, notes,
            f"{self.owner.account} {self.upload}" if self.owner.account and self.upload else self.owner.account,
        )  # fmt: skip

    def _ask(self, beside: list[str]) -> None:
        """Where a file is missing and another's name is like its name, ask."""
        missing = [leaf(file) for file in self.expected.asked if file not in self.taken]
        for name in beside if self.taken else ():
            for near in difflib.get_close_matches(name.lower(), missing, 1, 0.7):
                self.notes[f"{printable(name)} was not taken: should it be {near}?"] = None

    def _say_what_lacks(self) -> None:
        """What a notebook, or a file of another name, must define for an exercise that was asked for and is missing."""
        for file in [file for file in self.expected.asked if file not in self.taken][:MOST_EXPLAINED]:
            if names := sorted(self.expected.definitions.get(file, ())):
                self.notes[f"a notebook or another file counts as {leaf(file)} if it defines {', '.join(names)}"] = None

    def _nothing(self) -> str:
        wanted = [leaf(file) for file in self.expected.asked or self.expected.files]
        shown = ", ".join(wanted[:6]) + (f" and {len(wanted) - 6} more" if len(wanted) > 6 else "")
        for name in sorted(self.beside):
            for near in difflib.get_close_matches(name.lower(), wanted, 1, 0.7):
                found = f"the nearest found is {printable(name)} (should it be {near}?)"
                return f"nothing to grade: expected {shown}; {found}"
        return f"nothing to grade: expected {shown}; no such file was found"


def take_in(source: Path, scratch: Path, course: Course, asked: Sequence[str] | None = None) -> list[Handed]:
    """Everybody's work in `source`, copied below `scratch`, sorted by id. The same source gives the same result.

    `asked` are the exercises that were to be handed in; a learner who has none of them is told their names. Raises
    IntakeError when nothing can be read.
    """
    expected = _Expected.of(course)
    layout = Layout.of(source, tuple(leaf(file) for file in expected.files))
    gatherings = _accounts(layout.owners, scratch, replace(expected, asked=tuple(f"{name}.py" for name in asked or ())))
    known: dict[str, tuple[str, datetime | None]] = {}

    def descend(parts: tuple[str, ...]) -> bool:
        found = layout.claim(ArchiveMember(parts, Kind.FOLDER, lambda limit: b""))
        if found is None or found.owner.key not in gatherings:
            return not is_litter(parts[-1])
        return not is_junk(found.rest) and not gatherings[found.owner.key].hostile

    for member in read(source, descend):
        if not member.problem and layout.strip(member.parts) == (METADATA,) and member.kind is Kind.FILE:
            known = _metadata(member)
        elif (found := layout.claim(member)) and found.owner.key in gatherings:
            gatherings[found.owner.key].offer(member, found)
    handed = []
    for key, gathering in gatherings.items():
        shown, moment = known.get(key.removeprefix("plain "), ("", None))
        gathering.owner = replace(gathering.owner, shown=shown or gathering.owner.shown)
        handed.append(gathering.finish(moment))
    return sorted(handed, key=lambda one: one.id)


def _accounts(owners: tuple[Owner, ...], scratch: Path, expected: _Expected) -> dict[str, _Gathering]:
    """A gathering for each learner, with an id and a folder that no other learner has."""
    found: dict[str, _Gathering] = {}
    used: set[str] = set()
    for owner in sorted(owners, key=lambda owner: (owner.id, owner.key)):
        ident = unused(owner.id, used)
        folder = scratch / ident
        if folder.exists():  # from an earlier time
            shutil.rmtree(folder)
        found[owner.key] = _Gathering(owner, ident, folder, expected)
    return found


def _metadata(member: ArchiveMember) -> dict[str, tuple[str, datetime | None]]:
    try:
        data = member.read(METADATA_BYTES)
    except Refused:
        return {}
    return metadata(data[:METADATA_BYTES].decode("utf-8", "replace"))


def _lines(lines: dict[str, None]) -> tuple[str, ...]:
    shown = tuple(lines)
    return shown if len(shown) <= LINES else (*shown[:LINES], f"and {len(shown) - LINES} lines more like these")
