"""What a learner has done so far: one JSON file in the workspace, replaced atomically and backed up."""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from .course import Course, find
from .files import write

FILE = "progress.json"
RIGHT, WRONG = "right", "wrong"
COMPLETE = "complete"


@dataclass
class ExerciseProgress:
    """One exercise: the best score of all attempts, how many hints were taken. `last` is when it was graded last.

    `failed` are the checks that failed then, each after its diagnosis. `order` has the hints taken, counted from 0 as
    they stand in their file; a file written before it was kept has `hints` alone.
    """

    passed: bool = False
    best: int = 0
    max_score: int = 0
    attempts: int = 0
    last: str = ""
    hints: int = 0
    failed: list[str] = field(default_factory=list)
    order: list[int] = field(default_factory=list)


@dataclass
class Progress:
    """Everything recorded: exercises by name, answers (`RIGHT`, `WRONG`) by question, `COMPLETE` by chapter."""

    exercises: dict[str, ExerciseProgress] = field(default_factory=dict)
    quizzes: dict[str, str] = field(default_factory=dict)
    chapters: dict[str, str] = field(default_factory=dict)


def load(course: Course | None = None) -> Progress:
    """What is recorded. A file that cannot be read is set aside as `progress.json.broken-N`, and its backup is used."""
    path = _path(course)
    for candidate in (path, path.with_suffix(".json.backup")):
        try:
            return msgspec.json.decode(candidate.read_bytes(), type=Progress)
        except FileNotFoundError:
            continue
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            with contextlib.suppress(OSError):
                candidate.rename(candidate.with_name(f"{candidate.name}.broken-{time.time_ns()}"))
    return Progress()


def of(course: Course, name: str) -> ExerciseProgress:
    """What is recorded of an exercise; all zero when it was never tried."""
    return load(course).exercises.get(name, ExerciseProgress())


@contextlib.contextmanager
def change(course: Course | None = None) -> Iterator[Progress]:
    """What is recorded, to be changed in the block and written after it.

    Nothing fails when the workspace cannot be written: the change is then lost.
    """
    path = _path(course)
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            fcntl.flock(held.enter_context(open(path.with_suffix(".lock"), "w")), fcntl.LOCK_EX)
        progress = load(course)
        yield progress
        with contextlib.suppress(OSError):
            if path.is_file():
                write(path.with_suffix(".json.backup"), path.read_bytes())
            write(path, msgspec.json.format(msgspec.json.encode(progress, order="sorted"), indent=1))


@contextlib.contextmanager
def change_exercise(course: Course, name: str) -> Iterator[ExerciseProgress]:
    """As `change`, for one exercise."""
    with change(course) as progress:
        yield progress.exercises.setdefault(name, ExerciseProgress())


def record(course: Course, name: str, score: int, max_score: int, failed: Sequence[str] = ()) -> None:
    """Note a grading: one more attempt, the best score, whether the exercise has ever passed, and what failed now."""
    with change_exercise(course, name) as known:
        known.passed |= 0 < max_score == score
        known.best = max(known.best, score)
        known.max_score = max_score
        known.attempts += 1
        known.failed = list(failed)
        known.last = time.strftime("%Y-%m-%dT%H:%M:%S%z")


def _path(course: Course | None) -> Path:
    return (course or find()).workspace / FILE
