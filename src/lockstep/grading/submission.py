"""From what was handed in to a clean folder that ranks can import from.

Only the exercise's own file is taken, and a batch script of the same name (`NAME.sbatch`) where the course has one.
What it imports from other exercises comes from the reference, so that no mistake is counted twice. A learner's own
version of such a file is taken only when the submission needs a name from it that the reference does not have. A
reference is taken only when this exercise's own reference imports it too; otherwise an import would be all it takes
to have any solution at hand. Nothing else in that folder has any effect.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ..course import Course, CourseError, leaf
from ..course.stubs import SCRIPT
from ..ranks.text import CodeLine
from .request import GradeRequest
from .source import body_lines, docstring_lines, parse, searched_lines, without_path
from .text import cut, harmless

MAX_BYTES = 1 << 20
LONGER = 4  # How much more of a text is read than is shown: paths and colors are taken out of it
RUN_FOLDER = re.compile(r"/lockstep-run-[\w-]+/(work|tmp)/?")
"""The working folder of a run's ranks, which no learner has seen."""


@dataclass(frozen=True)
class Submission:
    """One exercise's file, ready to run. `original` is the file that the learner edits, `file` the copy that runs.

    `shown` is the original's path as reports name it. `script` is the batch script that was handed in with it.
    """

    name: str
    original: Path
    file: Path
    shown: str
    script: Submission | None = None

    @property
    def folder(self) -> Path:
        """The folder that the ranks import from."""
        return self.file.parent

    @cached_property
    def text(self) -> str:
        return self.file.read_text(encoding="utf-8", errors="replace")

    @cached_property
    def _lines(self) -> list[str]:
        return searched_lines(self.text)

    @cached_property
    def _prose(self) -> set[int]:
        return docstring_lines(self.text)

    def line(self, patterns: str) -> int | None:
        """The first line of code that matches; several patterns, tried in order, are separated by ` || `.

        `in NAME: PATTERN` looks only into the body of the function NAME. An import is no match for a pattern that
        doesn't ask for one.
        """
        for pattern in patterns.split(" || "):
            lines: Iterable[int] = range(1, len(self._lines) + 1)
            if within := re.fullmatch(r"in (\w+): (.+)", pattern):
                lines, pattern = body_lines(self.text, within[1]), within[2]
            for number in lines:
                line = self._lines[number - 1] if number <= len(self._lines) else ""
                code = line if line.startswith("#SBATCH") else line.split("#")[0]
                imports = re.match(r"\s*(from|import) ", code) and "import" not in pattern
                if number not in self._prose and not imports and re.search(pattern, code):
                    return number
        return None

    def source_line(self, number: int | None) -> str:
        """That line, without its indentation; empty when there is no such line."""
        return self._lines[number - 1].strip() if number and number <= len(self._lines) else ""

    def own(self, code: tuple[CodeLine, ...]) -> tuple[CodeLine, ...]:
        """The code, if it is of this file: what ranks stand in may be a check's own."""
        lines = dict(enumerate(self._lines, 1))
        return code if all(lines.get(one.number, "").rstrip() == one.source for one in code) else ()

    def to_original(self, text: str) -> str:
        """The same text with the original's path or name for the copy's, and no other path of the scratch folder."""
        text = re.sub(r"\x1b?\[[0-9;]*m", "", text)  # torch's own colors
        scratch = re.escape(str(self.folder.parent) + os.sep)
        text = re.sub(rf"{scratch}[\w.-]+{re.escape(os.sep)}", "", text.replace(str(self.file), self.shown))
        text = re.sub(rf"(?<![\w/.-]){re.escape(self.file.name)}(?=:\d)", self.original.name, text)
        return without_path(text, RUN_FOLDER)

    def reported(self, text: str, most: int) -> str:
        """What the submission said, as a report may show it: its own path, at most so many characters, and nothing
        that acts on a terminal."""
        return cut(harmless(self.to_original(text[: LONGER * most])), most)


def locate(course: Course, name: str, request: GradeRequest) -> Path:
    """The file to grade for this exercise. Raises CourseError when it is not there."""
    given = request.submission
    place = given or request.learner_folder or course.exercises
    if place.is_dir():
        inside = place / f"{name}.py"
        place = inside if inside.is_file() else place / f"{leaf(name)}.py" if given else inside
    if not place.is_file():
        remedy = f"./lockstep reset {name} brings the stub back" if given is None else "give a file or a folder"
        raise CourseError(f"there is no {place}: {remedy}")
    if place.suffix == SCRIPT:
        raise CourseError(f"{place} is a batch script: give the folder that holds it and {leaf(name)}.py")
    if place.stat().st_size > MAX_BYTES:
        raise CourseError(f"{place} has more than 1 MiB; a submission is one Python file")
    return place.resolve()


def prepare(course: Course, name: str, request: GradeRequest, scratch: Path) -> Submission:
    """Copy the submission and what it imports into a folder of its own below `scratch`.

    Raises CourseError when it is not there.
    """
    original = locate(course, name, request)
    folder = scratch / name.replace("/", "-")
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{leaf(name)}.py"
    shutil.copyfile(original, file)
    _add_imports(course, name, original, file, folder, {leaf(name)}, _foundations(course, name))
    script = _script(course, name, original, file, request)
    return Submission(name, original, file, shown(original, request.directory), script)


def shown(original: Path, directory: Path) -> str:
    """The path from `directory` or, for a notebook in another folder, from the course's root; else the whole path."""
    course = (place for place in original.parents if (place / "autograder" / "course.toml").is_file())
    for base in (directory, *course):
        if original.is_relative_to(base):
            return str(original.relative_to(base))
    return str(original)


def _script(course: Course, name: str, original: Path, file: Path, request: GradeRequest) -> Submission | None:
    """The batch script beside the submission, copied beside its copy."""
    own = original.with_name(file.with_suffix(SCRIPT).name)
    if not course.has_script(name) or not own.is_file():
        return None
    if own.stat().st_size > MAX_BYTES:
        raise CourseError(f"{own} has more than 1 MiB; a batch script is a page of text")
    copy = file.with_suffix(SCRIPT)
    shutil.copyfile(own, copy)
    return Submission(name, own, copy, shown(own, request.directory))


def _support(course: Course, name: str, module: str) -> Path | None:
    """A file that the exercises of this one's group share: the course's, never the submission's version of it."""
    group = name.rpartition("/")[0]
    file = course.autograder / group / "support" / f"{module}.py"
    return file if group and file.is_file() else None


def _foundations(course: Course, name: str) -> set[str]:
    """The exercises that the reference of this one imports, and what those import."""
    found: set[str] = set()
    open_ones = [name]
    while open_ones:
        file = course.solutions / f"{open_ones.pop()}.py"
        more = {module for module in (_imports(file) if file.is_file() else {}) if module in course.names} - found
        found |= more
        open_ones += more
    return found


def _add_imports(
    course: Course, name: str, original: Path, file: Path, folder: Path, taken: set[str], foundations: set[str]
) -> None:
    for module, names in _imports(file).items():
        if module in taken:
            continue
        support = _support(course, name, module)
        if support is not None:
            taken.add(module)
            shutil.copyfile(support, folder / support.name)
            continue
        if module not in course.names:
            continue
        taken.add(module)
        own = original.parent / f"{module}.py"
        reference = course.solutions / f"{module}.py"
        source = reference if reference.is_file() and module in foundations else own
        if own.is_file() and source is reference and not names <= _defined(reference) and names <= _defined(own):
            source = own
        if source.is_file():
            shutil.copyfile(source, folder / f"{module}.py")
            _add_imports(course, name, original, folder / f"{module}.py", folder, taken, foundations)


def _parse(file: Path) -> ast.Module:
    return parse(file.read_bytes()) or ast.Module(body=[], type_ignores=[])


def _imports(file: Path) -> dict[str, set[str]]:
    """Module name to the names taken from it."""
    found: dict[str, set[str]] = {}
    for node in ast.walk(_parse(file)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found.setdefault(alias.name, set())
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.setdefault(node.module, set()).update(alias.name for alias in node.names)
    return found


def _defined(file: Path) -> set[str]:
    names = {"*"}
    for node in _parse(file).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names.update(target.id for target in targets if isinstance(target, ast.Name))
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names.update(alias.asname or alias.name for alias in node.names)
    return names
