"""For learners: `lockstep lab`, `check`, `watch`, `hint`, `solution`, `reset`, `status`."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from ..course import Course, CourseError, find, hints, progress, short
from .options import PASSED_THROUGH, Device, DeviceOption, Name, Names, choose

if TYPE_CHECKING:
    from ..authoring.bank import Entry

commands = typer.Typer()


@commands.command(context_settings=PASSED_THROUGH)
def lab(context: typer.Context) -> int:
    """Open the course in JupyterLab. Options such as --no-browser and --port are JupyterLab's."""
    from .lab import open_lab

    return open_lab(find(), context.args)


@commands.command()
def check(
    exercises: Names = None,
    every: Annotated[bool, typer.Option("--all", help="all exercises of the course")] = False,
    submission: Annotated[
        Path | None,
        typer.Option(help="a file, a folder of files named after exercises, or an entry of the bank: EXERCISE/NAME"),
    ] = None,
    device: DeviceOption = Device.cpu,
    seed: Annotated[int | None, typer.Option(help="repeat a grading with the seed that it reported")] = None,
    isolated: Annotated[
        bool, typer.Option(help="keep the submission apart from checks and answers (a sandbox)")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object on stdout and nothing else")] = False,
) -> int:
    """Grade exercises: what is right, what is wrong, and why.

    Exit status: 0 all passed, 1 something failed, 2 usage, 3 our own fault.
    """
    from ..grading.request import GradeRequest
    from .check import check, isolate

    course = find()
    with TemporaryDirectory(prefix="lockstep-bank-") as folder:
        directory = Path.cwd()
        if submission is not None and not submission.exists():
            entry = _of_the_bank(course, submission)
            submission, exercises = entry.hand_in(course, Path(folder)), exercises or [entry.exercise]
            directory = Path(folder).resolve()  # of which nobody knows
        names = choose(course, exercises, every, submission)
        if submission is not None and submission.is_file() and len(names) != 1:
            raise CourseError(f"{submission} is one file: name the exercise that it solves")
        request = GradeRequest(tuple(names), submission, seed, device.value, directory=directory)
        return check(course, isolate(request) if isolated else request, as_json)


def _of_the_bank(course: Course, label: Path) -> Entry:
    from ..authoring.bank import find as find_entry

    entry = find_entry(course.root, label.as_posix())
    if entry is None:
        raise CourseError(f"there is no file or folder {label}")
    return entry


@commands.command()
def watch(exercises: Names = None) -> int:
    """Check an exercise again each time its file is saved. Ctrl-C stops."""
    from .check import watch

    course = find()
    return watch(course, choose(course, exercises, every=not exercises))


@commands.command()
def hint(exercise: Name) -> None:
    """Show the next hint, one more each time."""
    from .terminal import show_markdown

    course = find()
    taken, of, why = hints.take_hint(course, *course.require([exercise]))
    more = hints.to_come(len(taken), of, f"`./lockstep hint {exercise}` shows the next hint")
    show_markdown(f"**Hint {len(taken)} of {of}**{f', {why}' if why else ''}\n\n{taken[-1]}\n\n{more}")


@commands.command()
def solution(exercise: Name, yes: Annotated[bool, typer.Option("--yes", "-y", help="do not ask")] = False) -> int:
    """Show the reference solution; asks first unless the exercise has passed."""
    from .terminal import show_code, show_markdown

    course = find()
    name = course.require([exercise])[0]
    known = progress.of(course, name)
    if not yes and not known.passed:
        left = f"./lockstep hint {name} has hints left. " if known.hints < hints.FEWEST else ""
        if not typer.confirm(f"{name} has not passed yet. {left}Show the solution?"):
            return 1
    for suffix in hints.suffixes(course, name):
        show_code(hints.solution(course, name, suffix), "python" if suffix == ".py" else "bash")
    if write_up := hints.write_up(course, name):
        show_markdown(write_up)
    return 0


@commands.command()
def reset(exercise: Name) -> None:
    """Put the stub back; what you wrote is kept as a backup."""
    course = find()
    name = course.require([exercise])[0]
    for suffix in hints.suffixes(course, name):
        kept = hints.reset(course, name, suffix)
        where = short(course.exercises / f"{name}{suffix}")
        typer.echo(f"{where} is the stub again. Yours is kept at {short(kept)}." if kept else f"{where} is the stub.")


@commands.command()
def status() -> None:
    """Where you are in the course: what has passed, what you have begun, and what comes next."""
    from .terminal import show_status

    show_status(find())
