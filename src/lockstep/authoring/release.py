"""A learner's copy of the course: what it takes to learn and to be checked, and nothing of any solution.

What goes in is an allow-list of the course's files. Before anything gets its final name, every file is searched for the
solutions' canaries and for longer lines that only solutions have. Anything found stops the release. The same course
gives the same bytes: files are sorted, and all have the same time.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from ..course import Course, CourseError
from ..course.stubs import SCRIPT, canary, make_stub, solved, with_canary, without_markers
from . import cut
from .mutants import imported

HANDOUT = Path(__file__).with_name("handout")
TOP = (
    ".gitignore", "LICENSE", "README.md", "docs/run.md", "docs/where.md", "environment.yml", "lockstep",
    "pyproject.toml", "requirements.lock",
    *(f"docs/images/{name}.png" for name in ("check", "hang", "map", "stepper", "timeline")),
)  # fmt: skip
CHAPTER_FILES = (".cfg", ".ipynb", ".py", ".svg", ".toml", ".gitignore")
TEACHERS = ("autograder/policy.toml",)  # what it says about single learners is confidential
TIME = 315532800  # 1980-01-01, the earliest that a zip can say
LONG = 40  # characters: a line this long is hardly ever written twice by chance
BY_CHANCE = 1  # long lines of one solution that a file may have, if it is not its hints
IN_HINTS = 3  # the last hint is almost the answer

Files = dict[str, bytes]


@dataclass(frozen=True)
class Released:
    """What was written. `added` are exercises that were not asked for, but that others import."""

    written: tuple[Path, ...]
    exercises: tuple[str, ...]
    added: tuple[str, ...]


def release(
    course: Course,
    only: Iterable[str] | None = None,
    *,
    folder: Path | None = None,
    gradescope: Path | None = None,
    classroom: Path | None = None,
) -> Released:
    """Write what is asked for, after searching all of it.

    Raises CourseError when a place is taken, when the course has no solutions to make stubs from, or when part of a
    solution shows.
    """
    for place in (folder, gradescope, classroom):
        _require_free(place)
    asked = course.require(only) if only is not None else list(course.names)
    for name in asked:
        _solution(course, name)
    names = _with_imports(course, asked)
    files = contents(course, names)
    leaks = find_leaks(course, files)
    if leaks:
        raise CourseError("nothing was released, because a solution shows:\n  " + "\n  ".join(leaks))
    written = []
    if folder:
        written.append(_write_folder(folder, files))
    if classroom:
        written.append(
            _write_folder(classroom, files | {".github/workflows/check.yml": (HANDOUT / "check.yml").read_bytes()})
        )
    if gradescope:
        written.append(_write_zip(gradescope, gradescope_files(files)))
    return Released(tuple(written), tuple(names), tuple(name for name in names if name not in asked))


def contents(course: Course, names: list[str]) -> Files:
    """All files of a learner's copy with these exercises, by their path in it."""
    files = {path: (course.root / path).read_bytes() for path in _listed(course) if _goes(course, path, names)}
    for name in names:
        stub = make_stub(_solution(course, name).read_text(encoding="utf-8"), name).encode()
        files[f"exercises/{name}.py"] = files[f"autograder/stubs/{name}.py"] = stub
        script = course.solutions / f"{name}{SCRIPT}"
        if script.is_file():
            stub = make_stub(script.read_text(encoding="utf-8"), script.name).encode()
            files[f"exercises/{script.name}"] = files[f"autograder/stubs/{script.name}"] = stub
    for path in [path for path in files if PurePosixPath(path).match("autograder/*/support/*.py")]:
        shared = PurePosixPath(path)
        files[f"exercises/{shared.parts[1]}/{shared.name}"] = files[path]
    whole = set(names) == set(course.names)
    if not whole:
        files = _cut_chapters(course, files, names)
        files["autograder/course.toml"] = _table_of_contents(course, names).encode()
    if "README.md" in files:
        files["README.md"] = cut.readme(files["README.md"].decode(), files, names, whole).encode()
    return dict(sorted(files.items()))


def _cut_chapters(course: Course, files: Files, names: list[str]) -> Files:
    """Only the chapters that have one of these exercises, and what they use."""
    here = {chapter.name: set(chapter.exercises) & set(names) for chapter in course.chapters}
    gone = [name for name, own in here.items() if not own]
    kept = {path: data for path, data in files.items() if PurePosixPath(path).stem not in gone}
    for name in here.keys() - set(gone):
        page = f"chapters/{name}.ipynb"
        kept[page] = cut.chapter(kept[page], names)
    used = b"".join(data for path, data in kept.items() if path.startswith("chapters/0"))
    pictures = {path for path in kept if path.startswith("chapters/pictures/")}
    unused = {path for path in pictures if PurePosixPath(path).name.encode() not in used} | {"chapters/claims.toml"}
    numbers = "".join(str(number) for number, name in enumerate(here, 1) if name in gone)
    says = re.compile(rb"^read = .*chapter [%s].*\n" % numbers.encode(), re.MULTILINE)
    kept["autograder/diagnoses.toml"] = says.sub(b"", kept["autograder/diagnoses.toml"])
    return {path: data for path, data in kept.items() if path not in unused}


def _listed(course: Course) -> list[str]:
    """The course's files: those that git tracks or would track; without git, all of them."""
    if (course.root / ".git").exists():
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        try:
            out = subprocess.run(command, cwd=course.root, capture_output=True, check=True, timeout=60).stdout
        except (OSError, subprocess.SubprocessError) as error:
            raise CourseError(f"git could not list the course's files: {error}") from None
        found = [os.fsdecode(path) for path in out.split(b"\0") if path]
    else:
        places = [course.root / top for top in TOP]
        for part in ("src", "autograder", "chapters", "exercises"):
            places += (course.root / part).rglob("*")
        found = [path.relative_to(course.root).as_posix() for path in places]
    return sorted(
        path for path in set(found) if (course.root / path).is_file() and not (course.root / path).is_symlink()
    )


def _goes(course: Course, path: str, names: list[str]) -> bool:
    parts = PurePosixPath(path).parts
    if path in TEACHERS or any(
        part in ("__pycache__", ".ipynb_checkpoints") or part.endswith(".egg-info") for part in parts
    ):
        return False
    groups = {name.partition("/")[0] for name in names if "/" in name}
    every_group = {name.partition("/")[0] for name in course.names if "/" in name}
    if path in TOP or len(parts) == 1:
        return path in TOP
    if parts[0] == "src":
        return parts[1] == "lockstep" and not path.endswith(".pyc")
    if parts[0] == "chapters":
        return parts[1] != "source" and path.endswith(CHAPTER_FILES)
    if parts[0] == "exercises":  # its Python is made from the solutions
        return path.endswith(".md") and (len(parts) == 2 or parts[1] in groups)
    if parts[0] != "autograder" or not path.endswith((".py", ".toml", ".md")) or parts[1] in ("stubs", "contracts"):
        return False
    if parts[-1].startswith("test_") and path.endswith(".py"):
        return course.of_checks(course.root / path) in names
    if parts[1] in ("hints", "scenarios", "judging"):
        stem = PurePosixPath(*parts[2:]).with_suffix("").as_posix()
        if stem in course.names or parts[1] == "hints":
            return stem in names
        return stem not in every_group or stem in groups
    return len(parts) == 2 or parts[1] not in every_group or parts[1] in groups


def _solution(course: Course, name: str) -> Path:
    file = course.solutions / f"{name}.py"
    if not file.is_file():
        raise CourseError(f"there is no solution of {name} to make its stub from: release from the teacher's copy")
    if with_canary(text := file.read_text(encoding="utf-8"), name) != text:
        raise CourseError(f"solutions/{name}.py has no canary: ./lockstep author stubs puts it in")
    return file


def _with_imports(course: Course, names: list[str]) -> list[str]:
    """These exercises and those that they, their checks or their scenarios import, in reading order."""
    found: set[str] = set()
    pending = list(names)
    while pending:
        name = pending.pop()
        if name in found:
            continue
        found.add(name)
        for file in (_solution(course, name), course.checks(name), course.scenario(name)):
            if file.is_file():
                pending += [module for module in imported(file) if module in course.names]
    return [name for name in course.names if name in found]


def _table_of_contents(course: Course, names: list[str]) -> str:
    lines = ["# The course's table of contents: chapters in reading order, each with its exercises."]
    for chapter in course.chapters:
        kept = [name for name in chapter.exercises if name in names]
        lines += ["", "[[chapter]]", f"name = {json.dumps(chapter.name)}"]
        lines += [f"title = {json.dumps(chapter.title, ensure_ascii=False)}", f"exercises = {json.dumps(kept)}"]
    return "\n".join(lines) + "\n"


def find_leaks(course: Course, files: Files) -> list[str]:
    """The parts of any solution that show in these files: one readable line each, sorted."""
    found = []
    everybodys: set[str] = set()
    own: dict[str, set[str]] = {}
    canaries: dict[str, bytes] = {}
    for name, path in solved(course.solutions).items():
        parts = [part for part in (path, path.with_suffix(SCRIPT)) if part.is_file()]
        texts = [part.read_text(encoding="utf-8") for part in parts]
        for part, text in zip(parts, texts, strict=True):
            everybodys |= set(_long_lines(make_stub(text, name if part == path else part.name)))
        write_up = path.with_suffix(".md")
        more = [write_up.read_text(encoding="utf-8")] if write_up.is_file() else []
        own[name] = {line for text in [*map(without_markers, texts), *more] for line in _long_lines(text)}
        canaries[name] = canary(name).encode()
    for place, content in sorted(files.items()):
        found += [f"{place} has the canary of {name}" for name, word in canaries.items() if word in content]
        lines = set(_long_lines(_as_text(place, content))) - everybodys
        for name in own if lines else ():
            shared = sorted(own[name] & lines)
            if len(shared) > (IN_HINTS if place == f"autograder/hints/{name}.md" else BY_CHANCE):
                found.append(f"{place} has {len(shared)} lines of the solution of {name}, such as: {shared[0]}")
    return found


def _long_lines(text: str) -> Iterator[str]:
    for line in text.splitlines():
        plain = " ".join(line.split()).lstrip("#> ")
        if len(plain) >= LONG:
            yield plain


def _as_text(path: str, content: bytes) -> str:
    text = content.decode("utf-8", "replace")
    if not path.endswith(".ipynb"):
        return text
    try:
        return "\n".join(_strings(json.loads(text)))
    except ValueError:
        return text


def _strings(value: Any) -> Iterator[str]:
    """Every text in a notebook: cells, outputs, metadata. A list of texts is one text, as notebooks store lines."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list) and all(isinstance(item, str) for item in value):
        yield "".join(value)
        yield from value
    elif isinstance(value, (list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings(item)


def _require_free(place: Path | None) -> None:
    if place is None:
        return
    if place.is_symlink() or (place.exists() and not place.is_dir()):
        raise CourseError(f"{place} is there already: remove it, or give another name")
    if place.is_dir() and any(place.iterdir()):
        raise CourseError(f"{place} is not empty: nothing is written over it. Remove it, or give another folder")


def _mode(path: str) -> int:
    return 0o755 if path in EXECUTABLE or path.endswith("/lockstep") else 0o644


EXECUTABLE = ("lockstep", "setup.sh", "run_autograder")


def _write_folder(place: Path, files: Files) -> Path:
    def fill(temporary: Path) -> None:
        for path, content in files.items():
            target = temporary / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
            target.chmod(_mode(path))
            os.utime(target, (TIME, TIME))
        for folder in (temporary, *(path for path in temporary.rglob("*") if path.is_dir())):
            folder.chmod(0o755)
            os.utime(folder, (TIME, TIME))

    return _atomically(place, fill)


def _write_zip(place: Path, files: Files) -> Path:
    def fill(temporary: Path) -> None:
        with zipfile.ZipFile(temporary / "zip", "w", zipfile.ZIP_DEFLATED) as archive:
            for path, content in sorted(files.items()):
                entry = zipfile.ZipInfo(path, (1980, 1, 1, 0, 0, 0))
                entry.compress_type = zipfile.ZIP_DEFLATED
                entry.create_system = 3  # Unix, so that the mode counts
                entry.external_attr = (0o100000 | _mode(path)) << 16
                archive.writestr(entry, content)

    return _atomically(place, fill, "zip")


def _atomically(place: Path, fill: Callable[[Path], None], part: str = "") -> Path:
    """Build in a temporary place and rename: the final name has everything or does not exist."""
    place = place.absolute()
    temporary = None
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{place.name}-", dir=place.parent))
        fill(temporary)
        os.rename(temporary / part, place)
    except OSError as error:
        raise CourseError(f"{place} could not be written: {error.strerror}") from None
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
    return place


def gradescope_files(files: Files) -> Files:
    """A Gradescope autograder: its two scripts, and the course below `course/`.

    To have each exercise graded with the reference's other files, put a `solutions` folder into `course/`.
    """
    return {
        "setup.sh": (HANDOUT / "setup.sh").read_bytes(),
        "run_autograder": (HANDOUT / "run_autograder").read_bytes(),
        **{f"course/{path}": content for path, content in files.items()},
    }
