"""Hints, solutions and fresh stubs: what a learner can ask for besides a verdict."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from . import progress
from .course import Course
from .stubs import SCRIPT, make_stub, without_markers
from .toml import CourseError

FEWEST = 3  # How many hints an exercise must have
FOR = re.compile(r"^<!--\s*(?:for:)?(.*?)-->\n?", re.MULTILINE | re.DOTALL)  # A line `<!-- for: test_a, test_b -->`


@dataclass(frozen=True)
class Hint:
    """A hint as the learner reads it, and the ids of the checks that it is for."""

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

    It is one for a check that failed last time, if there is one, else the next in order; the last of all comes last.
    After that, the same again.
    """
    every, why = hints(course, name), ""
    with progress.change_exercise(course, name) as known:
        order = [number for number in known.order if number < len(every)]
        left = [number for number in range(len(every)) if number not in order]
        while len(order) < known.hints and left:  # taken when only their count was kept
            order.append(left.pop(0))
        if left:
            early = [number for number in left if number + 1 < len(every)] or left
            fitting = [(check, number) for check in known.failed for number in early if check in every[number].checks]
            check, number = fitting[0] if fitting else ("", early[0])
            order.append(number)
            why = f"for the check that failed: {course.titles(name).get(check, check)}" if check else ""
        known.order, known.hints = order, len(order)
    return [_titled(every[number].text) for number in order], len(every), why


def to_come(number: int, of: int, how: str) -> str:
    """What to do for the next hint, and how much the last one tells; `how` is what to do, as a sentence's beginning."""
    if number == of:
        return "That was the last hint."
    last = "It is the last and gives" if number + 1 == of else f"Hint {of}, the last, gives"
    return f"{how}. {last} away almost the whole answer."


def _titled(hint: str) -> str:
    """The hint with its title as a line in bold: a heading would be larger than the chapter's."""
    return re.sub(r"^#+ +(.+)$", r"**\1**", hint, flags=re.MULTILINE)


def solution(course: Course, name: str, suffix: str = ".py") -> str:
    """The reference solution's text. Raises CourseError in a copy of the course that has no solutions."""
    file = course.solutions / f"{name}{suffix}"
    if not file.is_file():
        raise CourseError("this copy of the course has no solutions")
    return without_markers(file.read_text(encoding="utf-8"))


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
