"""For anybody's own project and machine: `lockstep doctor`, `run`, `attach`, `explain`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from .options import PASSED_THROUGH

commands = typer.Typer()


@commands.command()
def doctor() -> int:
    """What this machine has, what runs here and what does not, with remedies."""
    from .doctor import State, examine, show

    bad = False
    for finding in examine():
        show(finding)
        bad |= finding.state is State.BAD
    return 1 if bad else 0


@commands.command(context_settings={**PASSED_THROUGH, "help_option_names": []})
def run(context: typer.Context) -> int:
    """Run any script on N ranks, with torchrun's flags, and explain its hangs and failures: run -n 4 train.py …"""
    return run_script(context.args, context.command_path)


def run_script(arguments: Sequence[str], program: str = "lockstep run") -> int:
    """`run.main`, with what the course adds to it: where to read on about what it explains."""
    from ..course.runs import read_on
    from .run import main

    return main(arguments, read_on(), program)


@commands.command()
def attach(
    pids: Annotated[
        list[int] | None, typer.Argument(help="ranks, or torchrun itself; all your jobs if none", show_default=False)
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="how long to look at the job")] = 2.0,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON array on stdout and nothing else")] = False,
    slurm: Annotated[str, typer.Option(metavar="JOB", help="ask all nodes of this SLURM job", show_default=False)] = "",
    hosts: Annotated[
        str, typer.Option(metavar="NAMES", help="ask these machines over ssh: a,b,c", show_default=False)
    ] = "",
    answer: Annotated[bool, typer.Option(hidden=True)] = False,
) -> int:
    """Explain a job that hangs now, from outside: which ranks wait, where and for whom. It only reads the processes."""
    if answer:
        from ..outside import machines

        typer.echo(machines.answer(seconds))
        return 0
    if sum(map(bool, (pids, slurm, hosts))) > 1:
        raise typer.BadParameter("give process ids, --slurm or --hosts, not several of them")
    from .attach import main

    return main(pids or [], seconds, as_json, slurm, [host for host in hosts.split(",") if host])


@commands.command()
def explain(
    files: Annotated[list[Path], typer.Argument(help="flight-recorder dumps, error files, py-spy dumps; or folders")],
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object on stdout and nothing else")] = False,
) -> int:
    """Explain a job that is gone from the files that it left: at which call its ranks diverged, and who is missing."""
    from .explain import main

    return main(files, as_json)
