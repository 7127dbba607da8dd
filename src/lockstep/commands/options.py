"""What the commands share: their options' types, and how exercises are chosen."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from ..course import Course, CourseError, leaf

Names = Annotated[list[str] | None, typer.Argument(help="exercises, such as train_ddp", show_default=False)]
Name = Annotated[str, typer.Argument(help="an exercise, such as train_ddp")]
PASSED_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True}
"""For a command whose options are those of the program that it calls."""


class Device(str, Enum):
    cpu = "cpu"
    cuda = "cuda"


DeviceOption = Annotated[Device, typer.Option("--device", help="where the ranks compute")]


def choose(course: Course, names: list[str] | None, every: bool = False, submission: Path | None = None) -> list[str]:
    """The exercises that are meant: those named, all, or those that the submission has files for.

    Raises CourseError when that names none.
    """
    if names and every:
        raise CourseError("name exercises, or give --all, not both")
    if names:
        return course.require(names)
    if submission is not None and submission.is_file():
        alike = [name for name in course.names if leaf(name) == submission.stem]
        if len(alike) == 1:
            return alike
    if submission is not None and submission.is_dir():
        places = {name: (submission / f"{name}.py", submission / f"{leaf(name)}.py") for name in course.names}
        found = [name for name, files in places.items() if any(file.is_file() for file in files)]
        if not found:
            raise CourseError(f"{submission} has no file named after an exercise ({course.listed})")
        return found
    if not every:
        raise CourseError(f"which exercise? {course.listed}; or --all")
    return list(course.names)


def listed(text: str | None, option: str) -> tuple[str, ...] | None:
    """The names between the commas; None when the option was not given. Raises CourseError when there is no name."""
    if text is None:
        return None
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise CourseError(f"{option} names none")
    return names
