"""What every case of the clinic is judged by: the diagnosis here, the mend in the case's own checks.

The diagnosis stands in the learner's file as two constants, which are read and never run:

    CAUSE = "uneven-data"    an id of causes.toml
    RANK = 1                 the guilty rank under the learner's ticket, or "all"

Which answer is right is in `cases.toml`. The ticket lies beside the file, or in a folder above it.
"""

from __future__ import annotations

import ast
import hashlib
import itertools
import json
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from msgspec import toml

from lockstep.grading import CheckNotRun, Diagnosis, Failed, Grader, Run, evidence, parse, sentence

HERE = Path(__file__).resolve().parent
UNANSWERED = "?"
FOLDERS_UP = 3
DATA = r"Sampler || DataLoader || Records"
TRAINING = r"def train || def main"
NUMBERED = r"rank (==|!=|in|not in) [\d(\[{] || \]\[rank\] || def main"


@dataclass(frozen=True)
class Case:
    """One broken job. `guilty` is `drawn` (the ticket decides), `all`, or a rank; `shows` is what a run of it shows."""

    name: str
    ranks: int
    cause: str
    guilty: str | int
    shows: str
    title: str

    def rank(self, ticket: int) -> int | str:
        """The right answer to RANK under this ticket."""
        return draw(ticket, self.name, self.ranks) if self.guilty == "drawn" else self.guilty


@cache
def cases() -> dict[str, Case]:
    """Every case, by name, from `cases.toml`."""
    raw = toml.decode((HERE / "cases.toml").read_bytes())
    return {name: Case(name, **item) for name, item in raw.items()}


@cache
def causes() -> dict[str, str]:
    """What can be wrong: id to one line."""
    return toml.decode((HERE / "causes.toml").read_bytes(), type=dict[str, str])


def draw(ticket: int, case: str, choices: int) -> int:
    """As `clinic_data.draw`, for a given ticket."""
    return int.from_bytes(hashlib.sha256(f"{ticket}/{case}".encode()).digest()[:4], "big") % choices


def other_ticket(grader: Grader, case: Case, world_size: int, besides: int | None = None) -> int:
    """A ticket of the grader's own, under which another rank is guilty than under `besides` (or any rank)."""
    numbers = grader.random(f"{case.name}/{world_size}")
    while True:
        ticket = numbers.randrange(1_000_000)
        if besides is None or draw(ticket, case.name, world_size) != draw(besides, case.name, world_size):
            return ticket


def environment(ticket: int, odd: dict[str, Any] | None = None) -> dict[str, str]:
    """Of a run under this ticket. The odd host's settings differ by `odd`, whatever the file says."""
    return {"CLINIC_TICKET": str(ticket)} | ({"CLINIC_ODD": json.dumps(odd)} if odd else {})


def treat(
    grader: Grader,
    case: Case,
    ticket: int,
    world_size: int | None = None,
    odd: dict[str, Any] | None = None,
    **more: Any,
) -> Run:
    """Run the submission's `main()` under this ticket; a run that ends badly is a failed check."""
    return grader.run("treat", world_size or case.ranks, environment=environment(ticket, odd), **more)


def treat_further(
    grader: Grader,
    case: Case,
    ticket: int,
    told: str,
    at: str,
    id: str = "mended-halfway",
    *,
    world_size: int | None = None,
    odd: dict[str, Any] | None = None,
    **more: Any,
) -> Run:
    """As `treat`, for a job that has ended well elsewhere: `told` says what is different here, where it ends badly."""
    run = grader.attempt("treat", world_size or case.ranks, environment=environment(ticket, odd), **more)
    if run.cause is not None:
        grader.fail(id, f"{told} {sentence(run.cause.headline)}", of=run.cause.ranks, at=at)
    return run


def learners_ticket(grader: Grader) -> int:
    """The ticket that lies with the submission; drawn now where a learner checks before any run. CheckNotRun without one."""
    original = grader.submission.original
    for folder in list(original.parents)[:FOLDERS_UP]:
        found = folder / "ticket.txt"
        if found.is_file():
            try:
                return int(found.read_text(encoding="utf-8"))
            except (OSError, ValueError):
                raise CheckNotRun(
                    f"{found.name} holds no number: delete it, run the job again, and answer again"
                ) from None
    home = grader.course.exercises / "clinic"
    if original.parent != home:
        raise CheckNotRun("there is no ticket.txt with the submission, so it isn't known which job it was")
    ticket = secrets.randbelow(1_000_000)
    (home / "ticket.txt").write_text(f"{ticket}\n", encoding="utf-8")
    return ticket


def answers(source: str) -> dict[str, Any]:
    """The literal values of CAUSE and RANK at the file's top level."""
    found: dict[str, Any] = {}
    tree = parse(source)
    for node in tree.body if tree is not None else ():
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        for target in targets:
            if isinstance(target, ast.Name) and target.id in ("CAUSE", "RANK"):
                value = node.value if isinstance(node, (ast.Assign, ast.AnnAssign)) else None
                found[target.id] = value.value if isinstance(value, ast.Constant) else None
    return found


def judge_diagnosis(grader: Grader, case: Case, refuted: dict[str, str] | None = None) -> None:
    """CAUSE and RANK against the truth. `refuted` tells for a plausible wrong cause what in the run speaks against it."""
    given = answers(grader.submission.text)
    cause, rank = given.get("CAUSE"), given.get("RANK")
    command = f"./lockstep run -n {case.ranks} exercises/clinic/{case.name}.py"
    if cause in (None, UNANSWERED) or rank in (None, UNANSWERED):
        grader.fail(
            "not-diagnosed",
            f"CAUSE is {cause!r} and RANK is {rank!r}: say what is wrong before you fix it. Run {command} and read what it shows.",
            at=r"^CAUSE || ^RANK",
        )
    ticket = learners_ticket(grader)
    if cause not in causes():
        grader.fail(
            "unknown-cause",
            f"CAUSE is {cause!r}, which is not in the list: exercises/clinic/README.md has {len(causes())} to choose from.",
            at=r"^CAUSE",
        )
    if cause != case.cause:
        against = (refuted or {}).get(str(cause), "")
        grader.fail(
            "wrong-cause",
            f"CAUSE is {cause!r}, which is not the cause. {against or f'Run {command} again and ask what the ranks do differently.'}",
            at=r"^CAUSE",
        )
    right = case.rank(ticket)
    if rank != right:
        what = "but no single rank is at fault" if right == "all" else "but a different rank is at fault"
        if rank == "all":
            what = 'but "all" is for what every rank does in the same way: one rank alone is at fault'
        grader.fail("wrong-rank", f"RANK is {rank!r}, {what} under your ticket, {ticket}.", at=r"^RANK")


def digests(run: Run) -> list[dict[str, Any]]:
    """The state dict of the model that each rank returned."""
    return [dict((returned or {}).get("model") or {}) for returned in run.observed("result")]


def unequal(run: Run) -> tuple[str, list[int]] | None:
    """The first tensor of the returned model that is not bit for bit that of rank 0, and the ranks where; or None."""
    import torch

    states = digests(run)
    for tensor, value in states[0].items():
        other = [
            rank for rank, state in enumerate(states) if tensor not in state or not torch.equal(state[tensor], value)
        ]
        if other:
            return tensor, other
    return None


def judge_equal(
    grader: Grader,
    run: Run,
    said: str = "After training, {tensor} of {ranks} differs from rank 0's.",
    at: str = TRAINING,
    id: str = "another-illness",
) -> None:
    """The models that the ranks returned have to be equal, bit for bit. `{tensor}` and `{ranks}` say what isn't."""
    if different := unequal(run):
        tensor, ranks = different
        grader.fail_on(ranks, id, said.replace("{tensor}", tensor), at=at)


def zero_is_odd(case: Case, world_size: int | None = None) -> int:
    """The first ticket under which rank 0 is the guilty one."""
    return next(ticket for ticket in itertools.count() if draw(ticket, case.name, world_size or case.ranks) == 0)


def judge_sets(grader: Grader, case: Case, ticket: int, at: str, key: str = "") -> None:
    """What the ranks make of a set of texts must not depend on its order: each process has its own.

    A run in which the ranks' orders differ has to end with equal models, and with equal values of `key` in the results.
    """
    tree = parse(grader.submission.text)
    kinds = (ast.Set, ast.SetComp)
    nodes = ast.walk(tree) if tree is not None else ()
    if not any(isinstance(node, kinds) or (isinstance(node, ast.Name) and node.id == "set") for node in nodes):
        return
    told = "Each process has its own order of a set of texts. Where the orders differ, as under torchrun, "
    at = rf"set\( || {{.* for .*}} || {at}"
    run = treat_further(grader, case, ticket, f"{told}the job breaks.", at, "loops-over-a-set", own_orders=True)
    values = [(result or {}).get(key) for result in run.observed("result")]
    other = [rank for rank, value in enumerate(values) if value != values[0]]
    grader.fail_on(other, "loops-over-a-set", f"{told}the {key} of {{ranks}} is not rank 0's.", at=at)
    judge_equal(grader, run, f"{told}{{tensor}} of {{ranks}} is not rank 0's after training.", at, "loops-over-a-set")


def timeouts(run: Run) -> list[float]:
    """The longest timeout, in seconds, that each rank gave to a process group; 0 where it gave none."""
    return [max([0.0, *(seen or [])]) for seen in run.observed("timeouts")]


def wrapped_with(run: Run) -> list[dict[str, Any]]:
    """The options that rank 0 gave to DDP, one dictionary a wrapper."""
    return list(run.observed("wrapped")[0] or [])


def samples(run: Run) -> list[list[tuple[int, int]]]:
    """What each rank read from `clinic_data.Records`, in order: (the set's seed, the index in it)."""
    return [[(seed, index) for seed, index in seen or []] for seen in run.observed("samples")]


def tickets(grader: Grader, case: Case, choose: Callable[[Grader, int], int] | None = None) -> tuple[int, int]:
    """The learner's ticket, or one for a submission without, and another under which another rank is guilty.

    `choose(grader, mine)` finds the other where more than the rank has to differ.
    """
    try:
        mine = learners_ticket(grader)
    except CheckNotRun:
        mine = other_ticket(grader, case, case.ranks)
    return mine, choose(grader, mine) if choose else other_ticket(grader, case, case.ranks, besides=mine)


def treat_widely(
    grader: Grader,
    case: Case,
    world_size: int | None = None,
    choose: Callable[[Grader, int], int] | None = None,
    zero_says: dict[str, Any] | None = None,
    **how: Any,
) -> list[tuple[int, Run]]:
    """(ticket, run) under both `tickets` and, where `world_size` is given, on so many ranks too; all ended well.

    With `zero_says` once more with rank 0 as the odd one, whose settings say that. `how` is for all runs.
    A mend that holds under the first alone knows a number of that run: `mended-halfway`.
    """
    mine, other = tickets(grader, case, choose)
    runs = [(mine, treat(grader, case, mine, **how))]
    odd = case.rank(other)
    where = f", where rank {odd} is the odd one" if odd != "all" else ""
    more: list[tuple[int, int, str, dict[str, Any] | None]] = [
        (other, case.ranks, f"under ticket {other}{where}", None)
    ]
    if world_size is not None:
        more.append((other_ticket(grader, case, world_size), world_size, f"on {world_size} ranks", None))
    if zero_says:
        said = " and ".join(f"{key} {value}" for key, value in zero_says.items())
        more.append((zero_is_odd(case), case.ranks, f"where rank 0's host says {said}", zero_says))
    for ticket, size, when, says in more:
        try:
            runs.append((ticket, treat(grader, case, ticket, size, says, **how)))
        except Failed as failed:
            found = failed.diagnosis
            message = (
                f"Under ticket {mine}, on {case.ranks} ranks, the job ends; {when}, it is still broken. {found.message}"
            )
            halfway = grader.diagnosis("mended-halfway", message, evidence=found.proof, of=found.ranks, at=NUMBERED)
            if found.source:
                halfway = replace(halfway, line=found.line, source=found.source)
            raise Failed(halfway) from None
    return runs


def unmended(grader: Grader, run: Run, seen: str, at: str, of: Iterable[int] = ()) -> Diagnosis:
    """A run that ends as badly as before. `seen` says how, with its numbers; a timeout that was added is told first."""
    longest = max(timeouts(run))
    if longest:
        return grader.diagnosis(
            "symptom-hidden",
            f"The timeout is now {longest:g} s, and the cause is still there. {seen}",
            evidence=evidence(run),
            of=of,
            at=rf"timeout || {at}",
        )
    return grader.diagnosis("still-broken", seen, evidence=evidence(run), of=of, at=at)


def steps(run: Run) -> list[int]:
    """How many gradient all-reduces each rank began, for a model of one bucket: its steps."""
    return [sum(call.inside == "backward" for call in calls) for calls in run.collectives]
