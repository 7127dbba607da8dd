"""Where the course's content is, read from the content itself: no exercise is known here by name."""

from __future__ import annotations

import ast
import difflib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, count
from pathlib import Path

from .toml import CourseError, read_toml


@dataclass(frozen=True)
class Chapter:
    name: str
    title: str
    exercises: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Contents:
    chapter: tuple[Chapter, ...]


@dataclass(frozen=True)
class CatalogueEntry:
    title: str
    why: str
    read: str = ""


@dataclass(frozen=True)
class Course:
    """A checkout of the course, or a learner's copy of it, which has no solutions."""

    root: Path

    @property
    def autograder(self) -> Path:
        """The checks."""
        return self.root / "autograder"

    @property
    def exercises(self) -> Path:
        """What the learner edits."""
        return self.root / "exercises"

    @property
    def solutions(self) -> Path:
        """The same files, complete."""
        return self.root / "solutions"

    @property
    def workspace(self) -> Path:
        """Progress, backups and hints taken; never part of the course itself."""
        return self.root / ".lockstep"

    @cached_property
    def chapters(self) -> tuple[Chapter, ...]:
        """The table of contents, from `autograder/course.toml`."""
        return read_toml(self.autograder / "course.toml", _Contents).chapter

    @cached_property
    def names(self) -> tuple[str, ...]:
        """All exercises that have checks, in reading order."""
        listed = [name for chapter in self.chapters for name in chapter.exercises]
        return tuple(name for name in listed if self.checks(name).is_file())

    @cached_property
    def catalogue(self) -> dict[str, CatalogueEntry]:
        """Every diagnosis, by its id, from `autograder/diagnoses.toml`."""
        return read_toml(self.autograder / "diagnoses.toml", dict[str, CatalogueEntry])

    def checks(self, name: str) -> Path:
        """The pytest file of an exercise: `autograder/test_NAME.py`, or `autograder/GROUP/test_NAME.py` in a group."""
        return (self.autograder / name).with_name(f"test_{leaf(name)}.py")

    def count_checks(self, name: str) -> int:
        """How many checks an exercise has, counted in their file without importing it."""
        return len(re.findall(r"^def test_", self.checks(name).read_text(encoding="utf-8"), re.MULTILINE))

    def titles(self, name: str) -> dict[str, str]:
        """Each check's id and name in the learner's words, in order; none if their file cannot be read.

        The file is not imported: that would take seconds.
        """
        try:
            nodes = ast.parse(self.checks(name).read_bytes()).body
        except (OSError, SyntaxError, ValueError):
            return {}
        tests = [node for node in nodes if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
        return {node.name: (ast.get_docstring(node) or node.name).splitlines()[0].rstrip(".") for node in tests}

    def scenario(self, name: str) -> Path:
        """What runs on the ranks for that exercise: its own file, or that of its whole group."""
        scenarios = self.autograder / "scenarios"
        own = scenarios / f"{name}.py"
        return own if own.is_file() or "/" not in name else scenarios / f"{name.partition('/')[0]}.py"

    def has_script(self, name: str) -> bool:
        """Whether a batch script (`NAME.sbatch`) belongs to the exercise."""
        places = (self.exercises, self.solutions, self.autograder / "stubs")
        return any((place / f"{name}.sbatch").is_file() for place in places)

    def of_checks(self, file: Path) -> str:
        """The exercise that a pytest file checks."""
        relative = file.resolve().relative_to(self.autograder)
        return relative.with_name(relative.stem.removeprefix("test_")).as_posix()

    def group(self, name: str) -> tuple[str, ...]:
        """The exercises whose names begin with `name/`."""
        return tuple(one for one in self.names if one.startswith(f"{name}/"))

    def page(self, chapter: str) -> Path:
        """A chapter's notebook."""
        return self.root / "chapters" / f"{chapter}.ipynb"

    def chapter_of(self, name: str) -> Chapter | None:
        return next((chapter for chapter in self.chapters if name in chapter.exercises), None)

    def require(self, names: Iterable[str]) -> list[str]:
        """These exercises, in the course's order. Raises CourseError for one that does not exist, naming those that do.

        The name of a group (`clinic`) stands for all its exercises, and an exercise's file (`exercises/train.py`, as a
        shell completes it) for the exercise.
        """
        names = [self._of_file(name) for name in names]
        names = [one for name in names for one in (self.group(name) or (name,))]
        for name in names:
            if name not in self.names:
                near = nearest(name, self.names)
                hint = f"Did you mean {near}?" if near else f"There are: {self.listed}"
                raise CourseError(f"there is no exercise {name!r}. {hint}")
        return [name for name in self.names if name in names]

    @property
    def listed(self) -> str:
        """The names of all exercises, for a message, each group as one."""
        heads = dict.fromkeys(name.partition("/")[0] for name in self.names)
        return ", ".join(f"{head}/… ({len(group)} of them)" if (group := self.group(head)) else head for head in heads)

    def _of_file(self, name: str) -> str:
        """The exercise that a file in `exercises/` stands for, or a file's name alone; anything else unchanged."""
        if name in self.names or not name.endswith((".py", ".sbatch")):
            return name
        file = Path(name).resolve()
        if file.is_relative_to(self.exercises):
            return file.relative_to(self.exercises).with_suffix("").as_posix()
        if file.is_file():
            command = f"./lockstep check {file.stem} --submission {name}"
            raise CourseError(f"{name} is not in exercises/. To grade it: {command}")
        return Path(name).with_suffix("").as_posix()


def leaf(name: str) -> str:
    """An exercise's own name, without its group's: the stem of its file."""
    return name.rpartition("/")[2]


def unused(name: str, taken: set[str]) -> str:
    """The name, or with `-2`, `-3`, … at its end one that is not taken; it is then."""
    names = chain((name,), (f"{name}-{number}" for number in count(2)))
    found = next(one for one in names if one not in taken)
    taken.add(found)
    return found


def short(path: Path) -> str:
    """A path as you would type it: relative to the current folder if it is inside that."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def find(start: Path | None = None) -> Course:
    """The course around `start` (default: LOCKSTEP_COURSE, the current folder, then this installation's own checkout).

    Raises CourseError when there is none.
    """
    named = os.environ.get("LOCKSTEP_COURSE")
    places = [Path(named)] if named else []
    here = (start or Path.cwd()).resolve()
    places += [here, *here.parents, Path(__file__).resolve().parents[3]]
    for place in places:
        if (place / "autograder" / "course.toml").is_file():
            return Course(place.resolve())
    raise CourseError(
        "this is not a Lockstep course: go to the folder that has autograder/ and exercises/ (a checkout of Lockstep), "
        "and type ./lockstep there"
    )


def nearest(name: str, known: Iterable[str]) -> str:
    """What was probably meant; empty when no known name is similar."""
    return next(iter(difflib.get_close_matches(name, list(known), 1, 0.5)), "")
