"""`author bank …`: the wrong submissions as files, for those who write them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..course import find as find_course
from ..course import short

commands = typer.Typer(no_args_is_help=True, help="The wrong submissions of the grader's own exam.")

Exercise = Annotated[str, typer.Argument(help="an exercise, such as train_ddp")]
Label = Annotated[str, typer.Argument(help="EXERCISE/NAME, such as train_ddp/no_set_epoch")]


@commands.command("list")
def list_entries(exercise: Exercise) -> None:
    """Name, diagnosis and reason of each wrong submission of an exercise."""
    from ..authoring.bank import BankError, WrongSubmissions

    wrong = WrongSubmissions(find_course().root, exercise)
    if not wrong.file.is_file():
        raise BankError(f"there are no wrong submissions of {exercise!r}: no {short(wrong.file)}")
    exam = wrong.read()
    rows = [(entry.label.rpartition("/")[2], entry.mistake) for entry in exam.entries]
    names = max((len(name) for name, _ in rows), default=0)
    ids = max((len(mistake.diagnosis) for _, mistake in rows if mistake), default=0)
    for name, mistake in rows:
        if mistake:
            typer.echo(f"{name:<{names}}  {mistake.diagnosis:<{ids}}  {mistake.why}")
    if exam.problems:
        raise BankError("\n".join(problem.text for problem in exam.problems))


@commands.command()
def show(
    label: Label, out: Annotated[Path | None, typer.Option(help="write it into this file instead of stdout")] = None
) -> None:
    """Write a wrong submission out as the whole file that is graded."""
    from ..authoring.bank import BankError, find

    entry = find(find_course().root, label)
    if entry is None:
        raise BankError(f"there is no entry {label!r}: ./lockstep author bank list {label.rpartition('/')[0]}")
    if out is None:
        typer.echo(entry.text, nl=False)
    else:
        out.write_text(entry.text, encoding="utf-8")


@commands.command()
def add(
    exercise: Exercise,
    file: Annotated[Path, typer.Argument(help="a whole file; its first lines say # diagnosis: ID and # why: …")],
    replace: Annotated[bool, typer.Option("--replace", help="put it in the place of the entry of that name")] = False,
) -> None:
    """Store a wrong submission under the file's name: only its difference from a right one is kept."""
    from ..authoring.bank import BankError
    from ..authoring.bank_writing import add as store

    if not file.is_file():
        raise BankError(f"there is no file {file}")
    entry = store(find_course(), exercise, file, replace=replace)
    typer.echo(f"{entry.label} is in {short(entry.place)}")
