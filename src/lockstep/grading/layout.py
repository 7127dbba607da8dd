"""How a download is laid out, from its names alone: a folder around everything, or one learner's own work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..course import CourseError
from .archives import ArchiveMember, Budget, Kind, Refused, folder_members, is_archive, is_litter, members, printable
from .learners import METADATA, Claim, Owner, claim, is_named_by_an_lms, safe_id

# Parts of the course that come back when a learner hands in the whole repository: their files have exercises' names.
NOT_THEIRS = frozenset({"autograder", "solutions", "tests"})
THEIRS = frozenset({"exercises", "clinic"})
DEPTH = 32


class IntakeError(CourseError):
    """The download itself cannot be read: nobody's work was taken."""


def read(source: Path, descend: Callable[[tuple[str, ...]], bool]) -> Iterator[ArchiveMember]:
    """Everything in the download, always in the same order. Raises IntakeError when it cannot be read."""
    if source.is_dir():
        yield from folder_members(source, lambda parts: len(parts) < DEPTH and descend(parts))
    elif not source.is_file():
        raise IntakeError(f"there is no {source}: give a folder, or the zip or tar that was downloaded")
    elif not is_archive(source.name):
        inside = folder_members(source.parent, lambda parts: False)
        yield from (member for member in inside if member.parts == (source.name,))
    else:
        # The teacher's own archive may be large. What is in it counts against each learner's budget.
        budget = Budget(members=1_000_000, bytes=64 << 30, ratio=1 << 40, depth=DEPTH, header_bytes=1 << 30)
        try:
            with source.open("rb") as file:
                yield from members(file, budget)
        except Refused as refusal:
            raise IntakeError(f"{source.name} {refusal}") from None


@dataclass(frozen=True)
class Layout:
    """What was seen. `alone` is the learner whose work the whole download is, if it is one learner's."""

    wrapper: tuple[str, ...]
    alone: Owner | None
    leaves: tuple[str, ...]
    container: str
    owners: tuple[Owner, ...] = ()

    @classmethod
    def of(cls, source: Path, files: tuple[str, ...]) -> Layout:
        """Go through the download once; `files` are the files' names that an exercise may have, without folders."""
        heads: dict[tuple[tuple[str, ...], str], ArchiveMember] = {}
        for member in read(source, lambda parts: len(parts) < 3 and not is_litter(parts[-1])):
            kind = member.kind if len(member.parts) <= 3 else Kind.FOLDER
            head = ArchiveMember(member.parts[:3], kind, lambda limit: b"", member.problem)
            heads.setdefault((head.parts, head.problem), head)
        paths = [head for head in heads.values() if head.parts and not is_litter(head.parts[0])]
        wrapper = _wrapper(paths, files)
        layout = cls(wrapper, None, tuple(Path(file).stem for file in files), (*wrapper, _stem(source))[0])
        inner = [layout.strip(head.parts) for head in paths]
        if _is_one([parts for parts in inner if parts and not is_litter(parts[0])], files):
            name = _stem(source)
            layout = cls(wrapper, Owner("alone", printable(name), safe_id(name)), layout.leaves, name)
        owners: dict[str, Owner] = {}
        for head in heads.values():
            if found := layout.claim(head):
                owners.setdefault(found.owner.key, found.owner)
        return cls(wrapper, layout.alone, layout.leaves, layout.container, tuple(owners.values()))

    def strip(self, parts: tuple[str, ...]) -> tuple[str, ...]:
        """A path without the folder around it all."""
        return parts[len(self.wrapper) :] if parts[: len(self.wrapper)] == self.wrapper else parts

    def claim(self, member: ArchiveMember) -> Claim | None:
        """The owner of a member; None when it belongs to no learner."""
        parts = self.strip(member.parts)
        if self.alone and (parts or member.problem):
            return Claim(self.alone, parts)
        if member.problem and not parts:
            text = member.problem.rpartition(": ")[2]
            return Claim(Owner(f"outside {text}", text, safe_id(text)), ())
        if not parts or is_litter(parts[0]) or parts == (METADATA,):
            return None
        return claim(parts, member.kind is Kind.FILE and not member.problem, self.leaves, self.container)


def _stem(source: Path) -> str:
    name = source.resolve().name
    stem = name.partition(".")[0] if source.is_file() else name
    return stem or name or "submissions"


def _wrapper(paths: list[ArchiveMember], files: tuple[str, ...]) -> tuple[str, ...]:
    tops = {head.parts[0] for head in paths}
    if len(tops) != 1 or any(len(head.parts) == 1 and head.kind is not Kind.FOLDER for head in paths):
        return ()
    (top,) = tops
    children = {head.parts[1] for head in paths if len(head.parts) > 1 and not is_litter(head.parts[1])}
    if is_named_by_an_lms(top) or children & {*files, *THEIRS}:
        return ()
    return (top,) if len(children) > 1 or top.endswith(("-submissions", "_export")) else ()


def _is_one(paths: list[tuple[str, ...]], files: tuple[str, ...]) -> bool:
    """True when the exercises' files are at the top, and not a class's folders or archives."""
    tops = {parts[0] for parts in paths}
    own = tops & {*files, *THEIRS}
    others = {parts[0] for parts in paths if len(parts) > 1 and parts[-1] in files} - {*THEIRS, *NOT_THEIRS}
    archives = [top for top in tops if is_archive(top)]
    return bool(own) and not others and len(archives) < 2 and not any(map(is_named_by_an_lms, tops))
