"""`author mutants`: how much of a reference solution the checks hold."""

from __future__ import annotations

import typer

from ..authoring import contracts
from ..authoring.mutant_grading import Examined, examine, solution
from ..authoring.mutants import Mutant, mutants
from ..course import Course


def show(course: Course, names: list[str]) -> int:
    """Every mutant of these exercises; nothing is graded."""
    for name in names:
        known = contracts.equivalents(course, name)
        for mutant in mutants(solution(course, name)):
            typer.echo(f"{name}, line {mutant.line}, {mutant.id}{'  (equivalent)' if mutant.id in known else ''}")
    return 0


def grade(course: Course, names: list[str], jobs: int, again: bool) -> int:
    """Grade them and say which ones no check notices: 0 when each of those is in a ledger as equivalent, else 1."""
    known = {name: contracts.equivalents(course, name) for name in names}
    examined = examine(course, names, jobs, again, lambda one: _tell(one, known[one.name]))
    if len(examined) > 1:
        typer.echo("\n" + "\n".join(_table(examined, known)))
    return int(any(_unexplained(one, known[one.name]) or _wrongly(one, known[one.name]) for one in examined))


def _unexplained(one: Examined, known: dict[str, str]) -> list[Mutant]:
    return [mutant for mutant in one.survivors if mutant.id not in known]


def _wrongly(one: Examined, known: dict[str, str]) -> list[Mutant]:
    """Entered as equivalent, and noticed."""
    return [mutant for mutant in one.mutants if mutant.id in known and one.verdicts[mutant.id].noticed]


def _counts(one: Examined, known: dict[str, str]) -> tuple[int, int, int, int]:
    """How many were noticed, of how many; how many are equivalent, and how many were not noticed."""
    open_ = len(_unexplained(one, known))
    return len(one.mutants) - len(one.survivors), len(one.mutants), len(one.survivors) - open_, open_


def _tell(one: Examined, known: dict[str, str]) -> None:
    noticed, of, equivalent, open_ = _counts(one, known)
    typer.echo(f"{one.name}: {noticed} of {of} noticed, {equivalent} equivalent, {open_} not noticed")
    for mutant in _unexplained(one, known):
        by = one.verdicts[mutant.id].by
        typer.echo(f"  line {mutant.line}, {mutant.id}{f' ({by})' if by else ''}")
    for mutant in _wrongly(one, known):
        by = one.verdicts[mutant.id].by
        typer.echo(f"  line {mutant.line}, {mutant.id}: entered as equivalent, and noticed by {by}")


def _table(examined: list[Examined], known: dict[str, dict[str, str]]) -> list[str]:
    """One line for each exercise, and the sum."""
    rows = [(one.name, *_counts(one, known[one.name])) for one in examined]
    rows.append(("all", *(sum(column) for column in zip(*(row[1:] for row in rows), strict=True))))  # type: ignore[arg-type]
    width = max(len("exercise"), *(len(row[0]) for row in rows))
    head = f"{'exercise':<{width}}  mutants  noticed  equivalent  not noticed"
    return [head, *(f"{row[0]:<{width}}  {row[2]:>7}  {row[1]:>7}  {row[3]:>10}  {row[4]:>11}" for row in rows)]
