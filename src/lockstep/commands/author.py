"""For authors: `lockstep test`, `book`, `author stubs`, `author check`, `author mutants`, `author chapters`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..course import CourseError, find, short
from . import bank
from .options import PASSED_THROUGH, Names, choose

commands = typer.Typer()
author = typer.Typer(no_args_is_help=True, help="For those who write the course.")
commands.add_typer(author, name="author")
author.add_typer(bank.commands, name="bank")


@commands.command(context_settings=PASSED_THROUGH)
def test(context: typer.Context) -> int:
    """Run the course's own tests. Options are pytest's."""
    from .testing import run_tests

    return run_tests(find().root, context.args)


@commands.command()
def book(
    out: Annotated[
        Path | None, typer.Argument(help="a folder for the pages; book/ if none is named", show_default=False)
    ] = None,
    slides: Annotated[bool, typer.Option("--slides", help="slides for teaching too, in the folder slides/")] = False,
) -> None:
    """Build the chapters as pages that read offline, on a phone and in print: book/index.html."""
    from ..authoring.book import write_book

    course = find()
    folder = out or course.root / "book"
    chapters = write_book(course, folder, slides)
    typer.echo(f"{short(folder / 'index.html')}: {len(chapters)} chapters")
    if slides:
        from ..authoring.slides import write_slides

        for file, number in write_slides(course, folder / "slides", chapters).items():
            typer.echo(f"{short(file)}: {number} slides")


@author.command()
def stubs() -> None:
    """Write the stubs from the solutions, and into each solution the canary that shows a leak."""
    from ..course.stubs import write_canaries, write_stubs, write_support

    course = find()
    changed = write_canaries(course.solutions) + write_stubs(course.solutions, course.exercises)
    for path in changed + write_support(course.autograder, course.solutions, course.exercises):
        typer.echo(short(path))


@author.command()
def check(
    names: Names = None,
    with_bank: Annotated[bool, typer.Option("--bank", help="grade the exercise's whole bank too")] = False,
) -> int:
    """What exercises still lack, each with what to do: 0 nothing, 1 something. Names may be new to the course."""
    from ..authoring.review import review

    course = find()
    chosen = [name for one in names or course.names for name in course.group(one) or (one,)]
    complete = True
    for lack in review(course, chosen, with_bank):
        typer.echo(str(lack))
        complete = False
    if complete:
        of = "1 exercise" if len(chosen) == 1 else f"{len(chosen)} exercises"
        typer.echo(f"{of}: nothing is missing")
    return 0 if complete else 1


@author.command()
def mutants(
    names: Names = None,
    every: Annotated[bool, typer.Option("--all", help="every exercise, and each case of the clinic")] = False,
    again: Annotated[bool, typer.Option("--again", help="grade those too whose result is known")] = False,
    jobs: Annotated[int, typer.Option("-j", min=0, help="how many are graded at once (0: one for each core)")] = 0,
    listed: Annotated[bool, typer.Option("--list", help="only list them")] = False,
) -> int:
    """Change the solution in one place at a time: does a check notice? 0 yes, always; 1 if one goes unnoticed."""
    from ..ranks.processes import cores
    from .mutants import grade, show

    course = find()
    chosen = choose(course, names, every)
    return show(course, chosen) if listed else grade(course, chosen, jobs or cores(), again)


@author.command()
def chapters(
    names: Annotated[list[str] | None, typer.Argument(help="chapters, such as 02_setup", show_default=False)] = None,
    back: Annotated[bool, typer.Option("--back", help="take edits made in JupyterLab into the sources")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="store the times of this run (a quiet machine's)")] = False,
) -> None:
    """Build the chapters: run their sources and store the outputs. An output that differs only in its times stays."""
    from ..authoring import chapters as building

    unknown = sorted(set(names or ()) - set(building.names()))
    if unknown:
        raise CourseError(f"there is no chapter {unknown[0]!r}. There are: {', '.join(building.names())}")
    done = building.update_sources(names) if back else building.build(names, fresh=fresh)
    for path in done:
        typer.echo(short(path))
    if back and done:
        edited = " ".join(path.stem for path in done)
        typer.echo(f"To run what was edited and store its outputs: ./lockstep author chapters {edited}")
