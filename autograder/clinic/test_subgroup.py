"""Case `subgroup`: groups of neighboring ranks are made, and every rank then picks one by another rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from clinic.case import cases, digests, judge_diagnosis, other_ticket, treat, unmended
from clinic.retrain import NEAR, State, start
from clinic.support import clinic_data

from lockstep.grading import Cause, Diagnosis, Each, Grader, Hypothesis, Run, names, sentence

Groups = Sequence[Sequence[int]]

CASE = cases()["subgroup"]
TEAM = r"team = || groups\[ || new_group || def main"
MORE = 6
REFUTED = {
    "collective-on-some-ranks": "Every rank calls all_reduce for every parameter. The question is with whom.",
    "failing-rank": "No rank fails. Two get a warning, and it says what they did.",
    "uneven-data": "Every rank has 24 records and 3 batches.",
    "different-order": "The order is the same everywhere: two all-reduces a step, then the barrier.",
}


def read_failure(grader: Grader, run: Run, cause: Cause) -> Diagnosis | None:
    """Still waiting: which ranks called in which group."""
    if cause.kind not in ("hang", "mismatch", "exited"):
        return None
    half = run.world_size // 2
    made = [sum(call.kind == "all_reduce" for call in calls) for calls in run.collectives]
    idle = [rank for rank, count in enumerate(made) if not count]
    if not idle:
        return None
    waiting = [rank for rank in range(run.world_size) if rank not in idle]
    seen = (
        f"{names(idle).capitalize()} joined no all-reduce at all, and {names(waiting)} waited for them in one. "
        f"The groups are {[*range(half)]} and {[*range(half, run.world_size)]}."
    )
    return unmended(grader, run, seen, TEAM, idle)


def test_diagnosis(grader: Grader) -> None:
    """the diagnosis names the cause and the rank"""
    judge_diagnosis(grader, CASE, REFUTED)


def test_it_ends(grader: Grader) -> None:
    """the job ends"""
    treat(grader, CASE, other_ticket(grader, CASE, CASE.ranks))


@pytest.mark.needs("test_it_ends")
def test_teams(grader: Grader) -> None:
    """each half of the ranks trains its own model"""
    _teams(grader, treat(grader, CASE, other_ticket(grader, CASE, CASE.ranks)), CASE.ranks)


@pytest.mark.needs("test_teams")
def test_more_ranks(grader: Grader) -> None:
    """with six ranks as well"""
    run = grader.attempt("treat", MORE, environment={"CLINIC_TICKET": "1"})
    if run.cause is not None:
        grader.fail(
            "mended-halfway",
            f"On {CASE.ranks} ranks it ends, on {MORE} it does not: {sentence(run.cause.headline)}",
            of=run.cause.ranks,
            at=TEAM,
        )
    _teams(grader, run, MORE)


def _teams(grader: Grader, run: Run, world_size: int) -> None:
    """Each half has one model, the one that its ranks' mean gradients give."""
    half, ranks = world_size // 2, range(world_size)
    halves = [range(half), range(half, world_size)]
    parities = [range(0, world_size, 2), range(1, world_size, 2)]

    def trained(groups: Groups = halves, divisor: int = half, **how: Any) -> Each:
        return Each(_trained(world_size, groups, divisor, **how))

    def mistake(says: str, at: str = TEAM, id: str = "another-illness", **how: Any) -> Hypothesis:
        return Hypothesis(id, says, partial(trained, **how), at)

    alone: Groups = [[rank] for rank in ranks]
    everybody = f"It ends because the gradients of all {world_size} ranks are averaged, over the records and the models of both teams."
    records, sums = r"Records\(", r"/= || all_reduce"
    hidden: dict[str, Any] = {"id": "symptom-hidden", "at": r"if .*(get_rank|rank in) || all_reduce || " + TEAM}
    grader.explain(
        "The model",
        digests(run),
        trained(),
        [
            mistake(everybody, groups=[ranks], divisor=half, **hidden),
            mistake(everybody, groups=[ranks], divisor=world_size, **hidden),
            mistake(everybody, groups=[ranks], divisor=world_size, first=lambda rank: 0, **hidden),
            mistake(
                "No rank waits any more, because each trains alone: no step has the mean of its team's gradients.",
                groups=alone,
                divisor=1,
                **hidden,
            ),
            mistake(
                "No rank waits any more, because each trains alone: no step has the mean of its team's gradients.",
                groups=alone,
                divisor=1,
                first=lambda rank: rank % 2,
                **hidden,
            ),
            mistake(
                "Only the first group averages; in the second half each rank trains alone.",
                groups=[halves[0], *alone[half:]],
                **hidden,
            ),
            mistake(
                "The second half's gradients are not averaged, only divided.",
                groups=[halves[0], *alone[half:]],
                divisor=half,
            ),
            mistake(
                f"The teams are {_said(parities)}, not {_said(halves)}.", groups=parities, first=lambda rank: rank % 2
            ),
            mistake(
                "Each rank starts from a different seed, so that a team has no common model.",
                r"manual_seed",
                first=lambda rank: rank,
            ),
            mistake("Both teams start from one model.", r"manual_seed", first=lambda rank: 0),
            mistake(
                "That is what gradients divided by all ranks give: the mean of a team has another divisor.",
                sums,
                divisor=world_size,
            ),
            mistake("That is what a team's gradients give without a division.", sums, "gradients-summed", divisor=1),
            mistake("The weight's gradients are averaged, the bias's are not.", sums, only="weight"),
            mistake(
                "The weights are averaged once, at the end: each step was a rank's own.",
                sums,
                groups=alone,
                divisor=1,
                at_end=halves,
            ),
            *[
                mistake(
                    f"{who} trains on the same records.",
                    records,
                    groups=groups,
                    divisor=divisor,
                    reads=reads,
                    first=first,
                )
                for who, reads in (
                    ("Every rank", lambda rank: 0),
                    ("Each rank of a team", lambda rank: rank // half),
                    ("Each team", lambda rank: rank % half),
                )
                for groups, divisor in ((halves, half), (alone, 1))
                for first in (lambda rank: rank // half, lambda rank: 0)
            ],
        ],
        otherwise="another-illness",
        at=TEAM,
        tolerance=NEAR,
    )
    for rank, result in enumerate(run.observed("result")):
        if result.get("team") != rank // half:
            said = f"Rank {rank} of {world_size} returns {result.get('team')!r} as its team. It trains with {_said([halves[rank // half]])}, team {rank // half}."
            grader.fail("another-illness", said, of=[rank], at=r"team = || return")


def _said(groups: Groups) -> str:
    return " and ".join(names(group) for group in groups)


def _trained(
    world_size: int,
    groups: Groups,
    divisor: int,
    first: Callable[[int], int] | None = None,
    reads: Callable[[int], int] = lambda rank: rank,
    only: str = "",
    at_end: Groups = (),
) -> list[State]:
    """Each rank's model in the end, when gradients are summed over these groups and divided by `divisor`.

    A rank starts from the seed `first(rank)`, its team's number, and reads the records of seed `reads(rank)`. Gradients of
    other parameters than `only` stay the rank's own. The weights are averaged over the groups `at_end`.
    """
    models = [start(first(rank) if first else rank // (world_size // 2)) for rank in range(world_size)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    parts = [clinic_data.Records(24, seed=reads(rank)) for rank in range(world_size)]
    for begin in range(0, 24, 8):
        now = slice(begin, begin + 8)
        for model, part in zip(models, parts, strict=True):
            model.zero_grad()
            torch.nn.functional.cross_entropy(model(part.features[now]), part.classes[now]).backward()
        for group in groups:
            for name in [only] if only else ["weight", "bias"]:
                same = [models[rank].get_parameter(name) for rank in group]
                mean = torch.stack([one.grad for one in same if one.grad is not None]).sum(0) / divisor
                for one in same:
                    one.grad = mean.clone()
        for optimizer in optimizers:
            optimizer.step()
    states = [{name: value.detach().clone() for name, value in model.state_dict().items()} for model in models]
    means = {
        rank: {name: torch.stack([states[one][name] for one in group]).mean(0) for name in states[rank]}
        for group in at_end
        for rank in group
    }
    return [means.get(rank, state) for rank, state in enumerate(states)]
