"""Where a learner is in the course: the chapters' outlines, compared with what has been recorded.

A question counts when it was answered right once, an exercise when it has passed once. A chapter is complete when its
reader says so, whether or not everything in it was answered.
"""

from __future__ import annotations

from dataclasses import dataclass

from . import progress
from .course import Course
from .outline import Outline, Section, outlines
from .toml import CourseError


@dataclass(frozen=True)
class Standing:
    """A section: how much it asks, how much of that is done, and whether anything was tried.

    `begun` is the best try of each exercise that was tried and has not passed: the checks that passed, of how many.
    """

    section: Section
    done: int
    of: int
    tried: bool
    begun: tuple[tuple[int, int], ...] = ()

    @property
    def is_done(self) -> bool:
        """True when all that it asks is done; a section that asks nothing is neither done nor open."""
        return 0 < self.of == self.done


@dataclass(frozen=True)
class ChapterStanding:
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

    @property
    def upcoming(self) -> tuple[Outline, Section] | None:
        """Where to go on: at `here`; before the first try at the beginning; None when all is behind the reader."""
        asking = [(one, part) for one in self.chapters for part in one.sections if part.of]
        if self.here is None and any(part.tried or one.complete for one, part in asking):
            return None
        there = (
            (one.outline, part.section)
            for one, part in asking
            if self.here in (None, (one.outline.name, part.section.title))
        )
        return next(there, None)


@dataclass(frozen=True)
class NextUp:
    """What is not done yet: the section that comes first, and the exercise that does (in that section or later).

    `here` is set when that section is the one just left: its question is still open.
    """

    number: int
    section: str
    exercise: str
    is_there: bool
    here: bool

    def said(self, check: str) -> str:
        """A line, for a place where `check` grades an exercise: `./lockstep check`, `%check`."""
        place = f'chapter {self.number}, "{self.section}"'
        command = f"{check} {self.exercise}"
        if self.is_there:
            return f"Next: {self.exercise}, {place} · {command}"
        then = f" · then {self.exercise}: {command}" if self.exercise else ""
        return f"Next: {'the question in ' if self.here else ''}{place}{then}"


def next_up(course: Course, exercise: str = "") -> NextUp | None:
    """The first thing after this exercise, in reading order, that is not done; after the last one, from the beginning.

    Without an exercise it is where the learner goes on. None when all is done, and when no chapter has this exercise or
    one cannot be read.
    """
    known = progress.load(course)
    try:
        now = standing(course, known)
    except CourseError:
        return None
    things = [
        (chapter.outline, part.section, name)
        for chapter in now.chapters
        for part in chapter.sections
        for name in (*part.section.exercises, *part.section.quizzes)
    ]
    places = [
        number
        for number, (chapter, section, name) in enumerate(things)
        if (name == exercise if exercise else (chapter.name, section.title) == now.here)
    ]
    if exercise and not places:
        return None
    at = places[0] if places else 0
    done = {name for name, one in known.exercises.items() if one.passed}
    done |= {key for key, answer in known.quizzes.items() if answer == progress.RIGHT}
    behind = {chapter.outline.name for chapter in now.chapters if chapter.complete}
    order = things[at:] + things[:at]
    left = [one for one in order if one[2] not in {exercise, *done} and one[0].name not in behind]
    if not left:
        return None
    chapter, section, _ = left[0]
    upcoming = next((name for _, section, name in left if name in section.exercises), "")
    here = bool(exercise) and section is things[at][1]
    return NextUp(chapter.number, section.plain, upcoming, upcoming in section.exercises, here)


def standing(course: Course, known: progress.Progress | None = None) -> CourseStanding:
    """Where the learner is now, or with `known` done. Raises CourseError when a chapter cannot be read."""
    known = known or progress.load(course)
    chapters = tuple(_chapter(outline, known) for outline in outlines(course))
    return CourseStanding(chapters, _here(chapters))


def mark(course: Course, chapter: str, complete: bool) -> None:
    """Record that a chapter is complete, or no longer complete. Raises CourseError for one that does not exist."""
    if chapter not in [one.name for one in course.chapters]:
        raise CourseError(f"there is no chapter {chapter!r}. There are: {', '.join(c.name for c in course.chapters)}")
    with progress.change(course) as known:
        known.chapters[chapter] = progress.COMPLETE if complete else ""


def _chapter(outline: Outline, known: progress.Progress) -> ChapterStanding:
    answers, graded = known.quizzes, known.exercises
    right = {key for key, answer in answers.items() if answer == progress.RIGHT}
    passed = {name for name, exercise in graded.items() if exercise.passed}
    # Who took a hint may only be looking ahead.
    tried = {name for name, exercise in graded.items() if exercise.attempts}
    exercises = [name for section in outline.sections for name in section.exercises]
    sections = tuple(
        Standing(
            section,
            len(right & set(section.quizzes)) + len(passed & set(section.exercises)),
            len(section.quizzes) + len(section.exercises),
            any(key in answers for key in section.quizzes) or any(name in tried for name in section.exercises),
            tuple(
                (one.best, one.max_score)
                for one in map(graded.get, section.exercises)
                if one is not None and one.attempts and not one.passed
            ),
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
        complete=known.chapters.get(outline.name) == progress.COMPLETE,
    )


def _here(chapters: tuple[ChapterStanding, ...]) -> tuple[str, str] | None:
    """The furthest section in which something was tried, if it is not done; else the next one that asks something.

    The reader is past every chapter that was marked as complete.
    """
    asking = [(chapter, one) for chapter in chapters for one in chapter.sections if one.of]
    begun = [number for number, (chapter, one) in enumerate(asking) if one.tried or chapter.complete]
    for chapter, one in asking[max(begun) :] if begun else ():
        if not (one.is_done or chapter.complete):
            return chapter.outline.name, one.section.title
    return None
