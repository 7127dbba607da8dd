"""Where a learner stands in the course: the chapters' outlines, laid over what has been recorded.

A question counts when it was answered right once, an exercise when it has passed once. A chapter is complete when its
reader says so; nobody has to answer everything first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .grading import progress
from .grading.course import Course, CourseError
from .outline import Outline, Section, outlines

COMPLETE = "complete"


@dataclass(frozen=True)
class Standing:
    """A section: how much it asks, how much of that is done, and whether anything was tried."""

    section: Section
    done: int
    of: int
    tried: bool

    @property
    def is_done(self) -> bool:
        """All that it asks; a section that asks nothing is never done nor open."""
        return 0 < self.of == self.done


@dataclass(frozen=True)
class ChapterStanding:
    """A chapter: its sections, and the sums over them."""

    outline: Outline
    sections: tuple[Standing, ...]
    answered: int
    questions: int
    passed: int
    exercises: int
    complete: bool


@dataclass(frozen=True)
class CourseStanding:
    """All chapters. `here` is the next section to look at, as (chapter, section title); None before the first try."""

    chapters: tuple[ChapterStanding, ...]
    here: tuple[str, str] | None


def standing(course: Course) -> CourseStanding:
    """Where the learner stands now. Raises CourseError when a chapter cannot be read."""
    known = progress.load(course)
    chapters = tuple(_chapter(outline, known) for outline in outlines(course))
    return CourseStanding(chapters, _here(chapters))


def mark(course: Course, chapter: str, complete: bool) -> None:
    """Record that a chapter is complete, or no longer. Raises CourseError for a chapter that does not exist."""
    if chapter not in [one.name for one in course.chapters]:
        raise CourseError(f"there is no chapter {chapter!r}. There are: {', '.join(c.name for c in course.chapters)}")
    progress.update("chapters", chapter, COMPLETE if complete else "", course)


def _chapter(outline: Outline, known: dict[str, Any]) -> ChapterStanding:
    answers, graded = known.get("quizzes", {}), known.get("exercises", {})
    right = {key for key, value in answers.items() if value == "right"}
    passed = {name for name, value in graded.items() if value.get("passed")}
    exercises = [name for section in outline.sections for name in section.exercises]
    sections = tuple(
        Standing(
            section,
            len(right & set(section.quizzes)) + len(passed & set(section.exercises)),
            len(section.quizzes) + len(section.exercises),
            any(key in answers for key in section.quizzes) or any(name in graded for name in section.exercises),
        )
        for section in outline.sections
    )
    return ChapterStanding(
        outline,
        sections,
        answered=len(right & set(outline.quizzes)),
        questions=len(outline.quizzes),
        passed=len(passed & set(exercises)),
        exercises=len(exercises),
        complete=known.get("chapters", {}).get(outline.name) == COMPLETE,
    )


def _here(chapters: tuple[ChapterStanding, ...]) -> tuple[str, str] | None:
    """The furthest section in which something was tried, if it is not done; else the next one that asks something.

    Chapters that were marked as complete are behind the reader.
    """
    asking = [(chapter, one) for chapter in chapters for one in chapter.sections if one.of]
    begun = [number for number, (chapter, one) in enumerate(asking) if one.tried or chapter.complete]
    for chapter, one in asking[max(begun) :] if begun else ():
        if not (one.is_done or chapter.complete):
            return chapter.outline.name, one.section.title
    return None
