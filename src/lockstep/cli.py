"""`lockstep …`: every command, each a few lines that hand over to the room that does the work."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Annotated, NoReturn, TypeVar

import typer

from .grading.course import Course, CourseError, find, leaf, short

app = typer.Typer(
    name="lockstep",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Distributed training with PyTorch DDP, taught by running it.",
)
author = typer.Typer(no_args_is_help=True, help="For those who write the course.")
app.add_typer(author, name="author")

Answer = TypeVar("Answer")
Names = Annotated[list[str] | None, typer.Argument(help="exercises, such as train_ddp", show_default=False)]
Name = Annotated[str, typer.Argument(help="an exercise, such as train_ddp")]


class Device(str, Enum):
    """Where ranks compute."""

    cpu = "cpu"
    cuda = "cuda"


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def lab(context: typer.Context) -> None:
    """Open the course in JupyterLab. Options such as --no-browser and --port are JupyterLab's."""
    from .lab import open_lab

    raise typer.Exit(open_lab(_course(), context.args))


@app.command()
def check(
    exercises: Names = None,
    every: Annotated[bool, typer.Option("--all", help="all exercises of the course")] = False,
    submission: Annotated[Path | None, typer.Option(help="a file, or a folder of files named after exercises")] = None,
    device: Annotated[Device, typer.Option(help="where the ranks compute")] = Device.cpu,
    seed: Annotated[int | None, typer.Option(help="repeat a grading with the seed that it reported")] = None,
    isolated: Annotated[
        bool, typer.Option(help="keep the submission apart from checks and answers (a sandbox)")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object on stdout and nothing else")] = False,
) -> None:
    """Grade exercises: 0 all passed, 1 something failed, 2 usage, 3 our own fault."""
    from .checking import check as run_check

    course = _course()
    if submission is not None and not submission.exists():
        _usage(f"there is no file or folder {submission}")
    names = _choose(course, exercises, every, submission)
    if submission is not None and submission.is_file() and len(names) != 1:
        _usage(f"{submission} is one file: name the exercise that it solves")
    raise typer.Exit(run_check(course, names, submission, device.value, seed, as_json, isolated))


@app.command()
def watch(exercises: Names = None) -> None:
    """Check an exercise again each time its file is saved. Ctrl-C stops."""
    from .checking import watch as run_watch

    course = _course()
    raise typer.Exit(run_watch(course, _choose(course, exercises, not exercises, None)))


@app.command()
def hint(exercise: Name) -> None:
    """Show the next hint, one more each time."""
    from .grading.help import next_hint

    course = _course()
    number, of, text = _asked(lambda: next_hint(course, *course.require([exercise])))
    from .terminal import show_markdown

    last = "" if number < of else "\n\n*That was the last one. The solution is next.*"
    show_markdown(f"**Hint {number} of {of}**\n\n{text}{last}")


@app.command()
def solution(exercise: Name, yes: Annotated[bool, typer.Option("--yes", "-y", help="do not ask")] = False) -> None:
    """Show the reference solution; asks first unless the exercise has passed."""
    from .grading import help, progress

    course = _course()
    name = _asked(lambda: course.require([exercise]))[0]
    if not yes and not progress.of(course, name).get("passed"):
        left = f"./lockstep hint {name} has hints left. " if progress.of(course, name).get("hints", 0) < 3 else ""
        if not typer.confirm(f"{name} has not passed yet. {left}Show the solution?"):
            raise typer.Exit(1)
    from .terminal import show_code, show_markdown

    for suffix in help.suffixes(course, name):
        show_code(_asked(partial(help.solution, course, name, suffix)), "python" if suffix == ".py" else "bash")
    write_up = help.write_up(course, name)
    if write_up:
        show_markdown(write_up)


@app.command()
def reset(exercise: Name) -> None:
    """Put the stub back; what you wrote is kept as a backup."""
    from .grading import help

    course = _course()
    name = _asked(lambda: course.require([exercise]))[0]
    for suffix in help.suffixes(course, name):
        kept = _asked(partial(help.reset, course, name, suffix))
        where = short(course.exercises / f"{name}{suffix}")
        typer.echo(f"{where} is the stub again. Yours is kept at {short(kept)}." if kept else f"{where} is the stub.")


@app.command()
def status() -> None:
    """Where you are in the course, and a table of its exercises: what has passed, how often it was tried."""
    from .terminal import show_status

    show_status(_course())


@app.command()
def doctor() -> None:
    """What this machine has, what runs here and what does not, with remedies."""
    from .doctor import State, examine
    from .terminal import show_finding

    bad = False
    for finding in examine():
        show_finding(finding)
        bad = bad or finding.state is State.BAD
    raise typer.Exit(1 if bad else 0)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def run(context: typer.Context) -> None:
    """Run any script on N ranks, with torchrun's flags, and explain its hangs and failures: run -n 4 train.py …"""
    from .running import main as run_script

    raise typer.Exit(_guarded(lambda: run_script(context.args)))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def test(context: typer.Context) -> None:
    """Run the course's own tests. Options are pytest's."""
    from .testing import run_tests

    raise typer.Exit(_guarded(lambda: run_tests(_course().root, context.args)))


@app.command()
def book(
    out: Annotated[
        Path | None, typer.Argument(help="a folder for the pages; book/ if none is named", show_default=False)
    ] = None,
) -> None:
    """Build the chapters as pages that read offline, on a phone and in print: book/index.html."""
    from .authoring.book import write_book

    course = _course()
    folder = out or course.root / "book"
    written = _asked(lambda: write_book(course, folder))
    typer.echo(f"{short(folder / 'index.html')}: {sum(path.suffix == '.html' for path in written) - 1} chapters")


@app.command()
def release(
    folder: Annotated[
        Path | None, typer.Argument(help="a new folder for the learner's copy", show_default=False)
    ] = None,
    exercises: Annotated[str | None, typer.Option(help="only these, with commas between them")] = None,
    gradescope: Annotated[Path | None, typer.Option(help="write a Gradescope autograder: FILE.zip")] = None,
    classroom: Annotated[Path | None, typer.Option(help="a new folder for a GitHub template with a workflow")] = None,
) -> None:
    """For teachers: a learner's copy of the course, without solutions; refused where anything of one shows."""
    from .release import release as write

    course = _course()
    if not (folder or gradescope or classroom):
        _usage("where to? Give a folder, --gradescope FILE.zip or --classroom FOLDER")
    named = _listed(exercises, "--exercises")
    only = list(named) if named is not None else None
    done = _asked(lambda: write(course, only, folder=folder, gradescope=gradescope, classroom=classroom))
    if done.added:
        typer.echo(f"also needed, so included: {', '.join(done.added)}")
    for path in done.written:
        typer.echo(f"{short(path)}: {len(done.exercises)} exercises, no solution in it")


@app.command()
def grade(
    submissions: Annotated[
        Path | None, typer.Argument(help="a folder, or the zip or tar that was downloaded", show_default=False)
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="where results go; the same again goes on", show_default=False)
    ] = None,
    jobs: Annotated[
        int | None, typer.Option("-j", "--jobs", min=1, help="so many at once (default: one for each core)")
    ] = None,
    exercises: Annotated[str | None, typer.Option(help="these, handed in or not, with commas between them")] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="what inputs are drawn from; drawn and kept by default")
    ] = None,
    device: Annotated[Device, typer.Option(help="where the ranks compute")] = Device.cpu,
    only: Annotated[
        str | None, typer.Option(help="grade these learners again, by id, with the seed that is kept")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="grade everybody anew")] = False,
    slurm: Annotated[bool, typer.Option("--slurm", help="send the class as a job array, of -j tasks")] = False,
    allow_unisolated: Annotated[
        bool, typer.Option("--allow-unisolated", help="also where nothing keeps submissions from this machine")
    ] = False,
    policy: Annotated[
        Path | None,
        typer.Option(help="points, late days, accommodations (default: autograder/policy.toml)", show_default=False),
    ] = None,
    part: Annotated[str | None, typer.Option("--slice", hidden=True)] = None,
) -> None:
    """For teachers: grade a class. 0 all graded, 1 somebody's grading broke on our side, 2 usage, 3 our own fault."""
    from . import classes
    from .grading.bulk import Order

    course = _course()
    if out is None:
        _usage("where to? Give --out FOLDER")
    if part is not None:
        raise typer.Exit(_asked(lambda: classes.grade_slice(course, out, part, jobs, allow_unisolated)))
    if submissions is None:
        _usage("whose work? Give a folder, or the zip or tar that was downloaded")
    named = _listed(exercises, "--exercises")
    order = Order(named, seed, device.value, _listed(only, "--only") or (), again, allow_unisolated)
    raise typer.Exit(_asked(lambda: classes.grade(course, submissions, out, order, jobs, slurm, policy)))


@author.command()
def stubs() -> None:
    """Write the stubs anew from the solutions, and into each solution the canary that shows a leak."""
    from .authoring.stubs import write_canaries, write_stubs, write_support

    course = _course()
    changed = write_canaries(course.solutions) + write_stubs(course.solutions, course.exercises)
    for path in changed + write_support(course.autograder, course.solutions, course.exercises):
        typer.echo(short(path))


@author.command("check")
def author_check(
    names: Names = None,
    bank: Annotated[bool, typer.Option("--bank", help="grade the exercise's whole bank too")] = False,
) -> None:
    """What exercises still lack, each with what to do: 0 nothing, 1 something. Names may be new to the course."""
    from .authoring.review import review

    course = _course()
    chosen = [name for one in names or course.names for name in course.group(one) or (one,)]
    count = 0
    for lack in review(course, chosen, bank):
        typer.echo(str(lack))
        count += 1
    if not count:
        of = "1 exercise" if len(chosen) == 1 else f"{len(chosen)} exercises"
        typer.echo(f"{of}: nothing is missing")
    raise typer.Exit(1 if count else 0)


@author.command()
def chapters(
    names: Annotated[list[str] | None, typer.Argument(help="chapters, such as 02_setup", show_default=False)] = None,
    back: Annotated[bool, typer.Option("--back", help="take edits made in JupyterLab into the sources")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="store the times of this run (a quiet machine's)")] = False,
) -> None:
    """Build the chapters: run their sources and store the outputs. An output that says the same but for its times stays."""
    from .authoring import chapters as building

    unknown = sorted(set(names or ()) - set(building.names()))
    if unknown:
        _usage(f"there is no chapter {unknown[0]!r}. There are: {', '.join(building.names())}")
    done = building.update_sources(names) if back else building.build(names, fresh=fresh)
    for path in done or ():
        typer.echo(short(path))
    if back and done:
        edited = " ".join(path.stem for path in done)
        typer.echo(f"To run what was edited and store its outputs: ./lockstep author chapters {edited}")


def main() -> NoReturn:
    """Entry point. Whatever goes wrong on our side is one line, not a traceback; LOCKSTEP_DEBUG=1 shows the rest."""
    sys.exit(_guarded(_run_app))


def _run_app() -> int:
    try:
        result = app(prog_name="./lockstep", standalone_mode=False)
    except typer.Exit as exit:
        return exit.exit_code
    except typer.Abort:
        return 130
    except Exception as error:
        if hasattr(error, "show") and hasattr(error, "exit_code"):  # click's usage errors
            error.show()
            return int(error.exit_code)
        raise
    return int(result or 0)


def _guarded(action: Callable[[], int]) -> int:
    try:
        return int(action() or 0)
    except KeyboardInterrupt:
        return 130
    except CourseError as error:
        print(f"lockstep: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141
    except SystemExit as exit:
        return exit.code if isinstance(exit.code, int) else 1
    except Exception as error:
        if os.environ.get("LOCKSTEP_DEBUG"):
            raise
        print(f"lockstep: {type(error).__name__}: {error}", file=sys.stderr)
        print(
            "This is Lockstep's fault. LOCKSTEP_DEBUG=1 shows where; ./lockstep doctor looks at this machine.",
            file=sys.stderr,
        )
        return 3


def _course() -> Course:
    return find()


def _choose(course: Course, names: list[str] | None, every: bool, submission: Path | None) -> list[str]:
    if names and every:
        _usage("name exercises, or give --all, not both")
    if names:
        return _asked(lambda: course.require(names))
    if submission is not None and submission.is_file():
        alike = [name for name in course.names if leaf(name) == submission.stem]
        if len(alike) == 1:
            return alike
    if submission is not None and submission.is_dir():
        places = {name: (submission / f"{name}.py", submission / f"{leaf(name)}.py") for name in course.names}
        found = [name for name, files in places.items() if any(file.is_file() for file in files)]
        if not found:
            _usage(f"{submission} has no file named after an exercise ({course.listed})")
        return found
    if not every:
        _usage(f"which exercise? {course.listed}; or --all")
    return list(course.names)


def _listed(text: str | None, option: str) -> tuple[str, ...] | None:
    """What stands between the commas; None where the option was not given."""
    if text is None:
        return None
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        _usage(f"{option} names none")
    return names


def _asked(action: Callable[[], Answer]) -> Answer:
    try:
        return action()
    except CourseError as error:
        _usage(str(error))


def _usage(message: str) -> NoReturn:
    print(f"lockstep: {message}", file=sys.stderr)
    raise typer.Exit(2)
