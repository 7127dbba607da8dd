"""Hints, solutions and fresh stubs: what a learner can ask for besides a verdict."""

from __future__ import annotations

import ast
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from . import progress
from .course import Course, short
from .stubs import SCRIPT, make_stub, without_markers
from .toml import CourseError

FEWEST = 3  # How many hints an exercise must have
FOR = re.compile(r"^<!--\s*(?:for:)?(.*?)-->\n?", re.MULTILINE | re.DOTALL)  # A line `<!-- for: test_a, test_b -->`


@dataclass(frozen=True)
class Hint:
    """A hint as the learner reads it, and the ids of the checks and diagnoses that it is for."""

    text: str
    checks: tuple[str, ...] = ()


def hints(course: Course, name: str) -> list[Hint]:
    """All hints of an exercise, from a nudge to almost the answer."""
    file = course.autograder / "hints" / f"{name}.md"
    if not file.is_file():
        raise CourseError(f"there are no hints for {name}")
    return [_hint(part) for part in file.read_text(encoding="utf-8").split("\n---\n") if part.strip()]


def _hint(part: str) -> Hint:
    named = re.findall(r"[^\s,]+", " ".join(FOR.findall(part)))
    return Hint(FOR.sub("", part).strip(), tuple(named))


def take_hint(course: Course, name: str) -> tuple[list[str], int, str]:
    """One more hint each time: (all taken so far, in that order; how many there are; why this one came, or nothing).

    It is one for what failed last time, and where to start while nothing has passed: others are for what works, or was
    not reached. If none is for what failed, it is the next in order. The last of all comes last.
    After the last, the same again. Raises CourseError, and takes none, while the learner's file is not valid Python.
    """
    every, why = hints(course, name), ""
    _refuse_unless_python(course.exercises / f"{name}.py")
    with progress.change_exercise(course, name) as known:
        order = [number for number in known.order if number < len(every)]
        left = [number for number in range(len(every)) if number not in order]
        while len(order) < known.hints and left:  # taken when only their count was kept
            order.append(left.pop(0))
        last = len(every) - 1
        fitting: dict[int, str] = {}
        for id, number in product(known.failed, left):
            if id in every[number].checks:
                fitting.setdefault(number, id)
        coming = [*fitting]
        if set(known.failed).isdisjoint(id for hint in every[:last] for id in hint.checks):  # none is for it
            coming = left
        elif not known.best:  # nothing works yet: where to start
            coming += [one for one in left if one not in fitting and not every[one].checks]
        coming = [number for number in coming if number < last] + [last] * (last in left)
        if coming:
            order.append(coming[0])
            why = _why(course, name, fitting[coming[0]]) if coming[0] in fitting else ""
        why = "although the exercise has passed" if known.passed and not known.failed else why
        known.order, known.hints = order, len(order)
    return [_titled(every[number].text) for number in order], len(order) + len(coming[1:]), why


def _why(course: Course, name: str, id: str) -> str:
    """That a hint is for a check that failed, or for what was found there."""
    if found := course.catalogue.get(id):
        return f"for what was found: {found.title}"
    return f"for the check that failed: {course.titles(name).get(id, id)}"


def _refuse_unless_python(file: Path) -> None:
    """Raises CourseError if the file is there and no Python. A file that cannot be read is no obstacle."""
    try:
        ast.parse(file.read_bytes())
    except (SyntaxError, ValueError) as error:  # a ValueError for a null byte, before Python 3.12
        line = getattr(error, "lineno", None)
        at, said = f"{short(file)}:{line}" if line else short(file), getattr(error, "msg", error)
        raise CourseError(f"{at} is not valid Python: {said}. Correct that first; no hint was taken.") from None
    except (OSError, RecursionError, MemoryError):
        pass


def to_come(number: int, of: int, how: str) -> str:
    """What to do for the next hint, and how much the last one tells; `how` is what to do, as a sentence's beginning."""
    if number == of:
        return "That was the last hint."
    last = "It is the last and gives" if number + 1 == of else f"Hint {of}, the last, gives"
    return f"{how}. {last} away almost the whole answer."


def _titled(hint: str) -> str:
    """The hint with its title as a line in bold: a heading would be larger than the chapter's."""
    return re.sub(r"\A#+ +(.+)$", r"**\1**", hint, flags=re.MULTILINE)


def solution(course: Course, name: str, suffix: str = ".py") -> str:
    """The reference solution's text. Raises CourseError in a copy of the course that has no solutions."""
    file = course.solutions / f"{name}{suffix}"
    if not file.is_file():
        raise CourseError("this copy of the course has no solutions")
    return without_markers(file.read_text(encoding="utf-8"))


def code_of(text: str) -> str:
    """A Python file without its contract, the docstrings of more than a line, and without its `__main__`."""
    tree = ast.parse(text)
    scopes = (node for node in ast.walk(tree) if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef))
    told = [one.body[0] for one in scopes if ast.get_docstring(one) and len(one.body) > 1]
    parts = [one for one in told if one.lineno != one.end_lineno]
    parts += [one for one in tree.body if isinstance(one, ast.If) and "__name__" in ast.unparse(one.test)]
    dropped = {number for one in parts for number in range(one.lineno, (one.end_lineno or 0) + 1)}
    kept = "\n".join(line for number, line in enumerate(text.splitlines(), 1) if number not in dropped)
    return re.sub(r"\n{4,}", "\n\n\n", kept).strip() + "\n"


def write_up(course: Course, name: str) -> str:
    """The write-up of a solution (`solutions/NAME.md`); empty when there is none."""
    file = course.solutions / f"{name}.md"
    return file.read_text(encoding="utf-8") if file.is_file() else ""


def to_compare(course: Course, passed: Sequence[str], command: str) -> str:
    """After one exercise has passed: where the course's own solution is. Empty for several, and where there is none."""
    one = passed[0] if len(passed) == 1 else ""
    return f"To compare: {command} {one}" if one and (course.solutions / f"{one}.py").is_file() else ""


def suffixes(course: Course, name: str) -> tuple[str, ...]:
    """The suffixes of an exercise's files: `.py`, and `.sbatch` if a batch script belongs to it."""
    return (".py", SCRIPT) if course.has_script(name) else (".py",)


def reset(course: Course, name: str, suffix: str = ".py") -> Path | None:
    """Put the stub back. Returns where the file that was there is kept; None when there was nothing to keep."""
    file = course.exercises / f"{name}{suffix}"
    fresh = stub(course, name, suffix)
    kept = None
    if file.is_file():
        if file.read_text(encoding="utf-8", errors="replace") == fresh:
            return None
        folder = course.workspace / "backups"
        folder.mkdir(parents=True, exist_ok=True)
        label = f"{name.replace('/', '-')}-{time.strftime('%Y%m%d-%H%M%S')}"
        kept, number = folder / f"{label}{suffix}", 1
        while kept.exists():
            kept = folder / f"{label}-{(number := number + 1)}{suffix}"
        kept.write_bytes(file.read_bytes())
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(fresh, encoding="utf-8")
    return kept


def stub(course: Course, name: str, suffix: str = ".py") -> str:
    """The file as it was handed out. Raises CourseError in a copy of the course that has none."""
    solved = course.solutions / f"{name}{suffix}"
    if solved.is_file():
        return make_stub(solved.read_text(encoding="utf-8"), name if suffix == ".py" else solved.name)
    stored = course.autograder / "stubs" / f"{name}{suffix}"
    if stored.is_file():
        return stored.read_text(encoding="utf-8")
    raise CourseError(f"this copy of the course has no stub for {name}{suffix if suffix != '.py' else ''}")
