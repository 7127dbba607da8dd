"""`lockstep …`: the whole command line. Each command is a few lines in a module for one kind of user."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import typer

from ..course import CourseError
from . import author, learner, project, teacher

app = typer.Typer(
    name="lockstep",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Distributed training with PyTorch DDP, taught by running it. Start with lab.",
)
for title, kind in (
    ("The course", learner),
    ("Your own jobs, and this machine", project),
    ("For teachers", teacher),
    ("For authors", author),
):
    for one in (*kind.commands.registered_commands, *kind.commands.registered_groups):
        one.rich_help_panel = title
    app.add_typer(kind.commands)


def main() -> NoReturn:
    """Entry point. Whatever goes wrong on our side is one line, not a traceback; LOCKSTEP_DEBUG=1 shows the rest."""
    sys.exit(_run())


def _run() -> int:
    try:
        return int(app(prog_name=_program(), standalone_mode=False) or 0)
    except (KeyboardInterrupt, typer.Abort):
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
        if hasattr(error, "show") and hasattr(error, "exit_code"):  # click's usage errors
            _keep_hidden(error)
            error.show()
            return int(error.exit_code)
        if os.environ.get("LOCKSTEP_DEBUG"):
            raise
        if isinstance(error, ModuleNotFoundError) and not _in_checkout():
            print(
                f"lockstep: this command belongs to the course and needs {error.name}. Go to a checkout of Lockstep "
                "and type ./lockstep there; what pip has installed is run, attach and explain.",
                file=sys.stderr,
            )
            return 2
        print(f"lockstep: {type(error).__name__}: {error}", file=sys.stderr)
        print(
            "This is Lockstep's fault. LOCKSTEP_DEBUG=1 shows where; ./lockstep doctor looks at this machine.",
            file=sys.stderr,
        )
        return 3


def _in_checkout() -> bool:
    """False for a tool that was installed with pip, without the course."""
    return (Path(__file__).resolve().parents[3] / "pyproject.toml").is_file()


def _keep_hidden(error: Any) -> None:
    """A mistyped option is answered with those that are near it, except for those that `--help` does not show."""
    if near := getattr(error, "possibilities", None):
        hidden = {name for one in error.ctx.command.params if getattr(one, "hidden", False) for name in one.opts}
        error.possibilities = [name for name in near if name not in hidden]


def _program() -> str:
    """The name that was typed. A checkout's launcher calls `python -m lockstep`, an installation its own script."""
    called = Path(sys.argv[0]).name
    return "./lockstep" if called == "__main__.py" else called
