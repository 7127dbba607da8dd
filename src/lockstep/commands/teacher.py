"""For teachers: `lockstep release`, `grade`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..course import CourseError, find, short
from .options import Device, DeviceOption, listed

commands = typer.Typer()


@commands.command()
def release(
    folder: Annotated[
        Path | None, typer.Argument(help="a new folder for the learner's copy", show_default=False)
    ] = None,
    exercises: Annotated[str | None, typer.Option(help="only these, with commas between them")] = None,
    gradescope: Annotated[Path | None, typer.Option(help="write a Gradescope autograder: FILE.zip")] = None,
    classroom: Annotated[Path | None, typer.Option(help="a new folder for a GitHub template with a workflow")] = None,
) -> None:
    """A learner's copy of the course, without solutions; refused if part of one shows."""
    from ..authoring.release import release

    if not (folder or gradescope or classroom):
        raise CourseError("where to? Give a folder, --gradescope FILE.zip or --classroom FOLDER")
    only = listed(exercises, "--exercises")
    done = release(find(), only, folder=folder, gradescope=gradescope, classroom=classroom)
    if done.added:
        typer.echo(f"also needed, so included: {', '.join(done.added)}")
    for path in done.written:
        typer.echo(f"{short(path)}: {len(done.exercises)} exercises, no solution in it")


@commands.command()
def grade(
    submissions: Annotated[
        Path | None, typer.Argument(help="a folder, or the zip or tar that was downloaded", show_default=False)
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="where results go; the same folder again continues", show_default=False)
    ] = None,
    jobs: Annotated[
        int | None, typer.Option("-j", "--jobs", min=1, help="how many at once (default: one for each core)")
    ] = None,
    exercises: Annotated[str | None, typer.Option(help="these, handed in or not, with commas between them")] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="what inputs are drawn from; drawn and kept by default")
    ] = None,
    device: DeviceOption = Device.cpu,
    only: Annotated[
        str | None, typer.Option(help="grade these learners again, by id, with the seed that is kept")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="grade everybody again")] = False,
    slurm: Annotated[bool, typer.Option("--slurm", help="send the class as a job array, of -j tasks")] = False,
    allow_unisolated: Annotated[
        bool, typer.Option("--allow-unisolated", help="even if nothing keeps submissions from this machine")
    ] = False,
    policy: Annotated[
        Path | None,
        typer.Option(help="points, late days, accommodations (default: autograder/policy.toml)", show_default=False),
    ] = None,
    part: Annotated[str | None, typer.Option("--slice", hidden=True)] = None,
) -> int:
    """Grade a class: a page for you, a report for each learner, and files for the gradebook.

    Exit status: 0 all graded, 1 a grading broke on our side, 2 usage, 3 our own fault.
    """
    from ..grading.bulk import ClassRequest
    from . import grade_class

    course = find()
    if out is None:
        raise CourseError("where to? Give --out FOLDER")
    if part is not None:
        return grade_class.grade_slice(course, out, part, jobs, allow_unisolated)
    if submissions is None:
        raise CourseError("whose work? Give a folder, or the zip or tar that was downloaded")
    named, learners = listed(exercises, "--exercises"), listed(only, "--only") or ()
    request = ClassRequest(named, seed, device.value, learners, again, allow_unisolated)
    return grade_class.grade(course, submissions, out, request, jobs, slurm, policy)
