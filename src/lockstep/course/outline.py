"""What a chapter says of itself: its goals, its minutes, its sections with their questions and exercises.

All of it is read from the notebook, so that the course map and the book's table of contents always agree with the
chapter. It is read without Jupyter, so that `lockstep status` works where Jupyter is not installed.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .course import Chapter, Course
from .toml import CourseError

QUIZ = re.compile(r"^quiz\([\"'](.+?)[\"']\)", re.MULTILINE)
CHECK = re.compile(r"^%check +(.+)$", re.MULTILINE)
HEADING = re.compile(r"^(#{1,6}) +(.+?) *$")
FENCE = re.compile(r"^(```|~~~)")
MINUTES = re.compile(r"\babout ((?:\w+ )?[\w–-]+ (?:minutes|hours?))\b", re.IGNORECASE)
NEEDS = re.compile(r"\bYou\s+need\s+(.+?)\.(?=\s|$)", re.DOTALL)
EFFORT = re.compile(r"^\*((?:Easy|Medium|Hard)\b[^*]*?)\.?\*", re.MULTILINE)

SAVING = 3.0  # Seconds that a notebook may take to be saved


@dataclass
class Section:
    """A second-level heading and what is asked below it. `effort` is its exercise's: "Easy, 15 minutes"."""

    title: str
    quizzes: list[str] = field(default_factory=list)
    exercises: list[str] = field(default_factory=list)
    effort: str = ""

    @property
    def plain(self) -> str:
        """The title without Markdown."""
        return plain(self.title)

    @property
    def anchor(self) -> str:
        return section_anchor(self.plain)


def plain(title: str) -> str:
    """A heading in one line, without Markdown."""
    return " ".join(title.split()).replace("`", "")


def section_anchor(title: str) -> str:
    """What JupyterLab calls a heading in an address."""
    return title.replace(" ", "-")


def page_anchor(heading: str) -> str:
    """What the book calls a heading in an address."""
    return re.sub(r"[^\w.-]+", "-", heading).strip("-").lower()


@dataclass(frozen=True)
class Outline:
    """A chapter. `goals` and `needs` are Markdown; `minutes` is a phrase such as "100 minutes"."""

    name: str
    number: int
    title: str
    goals: tuple[str, ...]
    minutes: str
    needs: str
    sections: tuple[Section, ...]
    file: Path

    @property
    def quizzes(self) -> tuple[str, ...]:
        """The keys of all its questions, in reading order."""
        return tuple(key for section in self.sections for key in section.quizzes)


def outlines(course: Course) -> list[Outline]:
    """The chapters that are there, in reading order. Raises CourseError when one cannot be read."""
    chapters = enumerate(course.chapters, 1)
    return [_outline(course, chapter, number) for number, chapter in chapters if course.page(chapter.name).is_file()]


def section_of(course: Course, exercise: str) -> tuple[Outline, Section] | None:
    """Where an exercise is set. None where no chapter has it, or one cannot be read."""
    try:
        found = [
            (one, section) for one in outlines(course) for section in one.sections if exercise in section.exercises
        ]
    except CourseError:
        return None
    return found[0] if found else None


def _outline(course: Course, chapter: Chapter, number: int) -> Outline:
    intro: list[str] = []
    sections: list[Section] = []
    listed = [name for name in chapter.exercises if name in course.names]
    for kind, text in _cells(course.page(chapter.name)):
        for heading, body in _parts(text) if kind == "markdown" else ():
            if heading:
                sections.append(Section(heading))
            if not sections:
                intro.append(body)
            elif effort := EFFORT.search(body):
                sections[-1].effort = sections[-1].effort or effort[1]
        if kind == "code" and sections:
            sections[-1].quizzes += QUIZ.findall(text)
            for name in (name for line in CHECK.findall(text) for name in line.split()):
                sections[-1].exercises += [one for one in with_group(name, listed) if one not in _placed(sections)]
    left = [name for name in listed if name not in _placed(sections)]
    if left and sections:
        sections[-1].exercises += left
    said = "\n\n".join(intro)
    minutes, needs = MINUTES.search(said), NEEDS.search(said)
    return Outline(
        chapter.name,
        number,
        chapter.title,
        tuple(_goals(said)),
        minutes[1] if minutes else "",
        " ".join(needs[1].split()) if needs else "",
        tuple(sections),
        course.page(chapter.name),
    )


def _read(file: Path) -> list[dict[str, Any]]:
    """The notebook's cells. JupyterLab writes a notebook in place, so it may be read while it is half written: a file
    that cannot be parsed is read again for up to `SAVING` seconds.
    """
    until = time.monotonic() + SAVING
    while True:
        try:
            cells: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["cells"]
            return cells
        except (OSError, ValueError, KeyError, TypeError) as error:
            if time.monotonic() > until or isinstance(error, OSError):
                remedy = "restore it with git checkout -- chapters"
                raise CourseError(f"{file.name} cannot be read ({error}): {remedy}") from None
        time.sleep(0.05)


def _cells(file: Path) -> Iterator[tuple[str, str]]:
    for cell in _read(file):
        source = cell.get("source", "")
        yield cell.get("cell_type", ""), source if isinstance(source, str) else "".join(source)


def _parts(text: str) -> Iterator[tuple[str, str]]:
    """The text cut before each second-level heading: the heading ("" for what comes before the first), and its body."""
    heading, fenced = "", False
    lines: list[str] = []
    for line in text.splitlines():
        fenced ^= bool(FENCE.match(line))
        found = None if fenced else HEADING.match(line)
        if found and len(found[1]) == 2:
            if heading or lines:
                yield heading, "\n".join(lines)
            heading, lines = found[2], []
        else:
            lines.append(line)
    yield heading, "\n".join(lines)


def with_group(name: str, listed: Iterable[str]) -> list[str]:
    """The exercise; one of a group stands for the whole group."""
    group = f"{name.partition('/')[0]}/"
    return [one for one in listed if one == name or one.startswith(group)]


def _placed(sections: list[Section]) -> set[str]:
    return {name for section in sections for name in section.exercises}


def _goals(said: str) -> Iterator[str]:
    """The first list."""
    block = re.search(r"(?:^[-*] .+\n?(?:^ +\S.*\n?)*)+", said, re.MULTILINE)
    for item in re.split(r"^[-*] ", block[0], flags=re.MULTILINE)[1:] if block else ():
        yield " ".join(item.split()).rstrip(";.,")
