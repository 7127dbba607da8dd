"""Case `subgroup`: groups of neighboring ranks are made, and every rank then picks one by another rule."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from clinic.case import cases, digests, judge_diagnosis, other_ticket, treat, treat_further, unmended
from clinic.retrain import Batch, Groups, Job, batch, cut, mean
from clinic.support import clinic_data
from clinic.trained import CLOSE
from torch import nn

from lockstep.grading import Cause, Diagnosis, Each, Grader, Hypothesis, Run, names

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
    told = f"On {CASE.ranks} ranks it ends, on {MORE} it does not."
    run = treat_further(grader, CASE, 1, told, TEAM, world_size=MORE)
    _teams(grader, run, MORE)


def _teams(grader: Grader, run: Run, world_size: int) -> None:
    """Each half has one model, the one that its ranks' mean gradients give."""
    half, ranks = world_size // 2, range(world_size)
    halves = [range(half), range(half, world_size)]
    parities = [range(0, world_size, 2), range(1, world_size, 2)]

    alone: Groups = [[rank] for rank in ranks]

    def job(
        first: Callable[[int], int] = lambda rank: rank // half, reads: Callable[[int], int] = lambda rank: rank
    ) -> Job:
        """A rank starts from the seed `first(rank)`, its team's number, and reads the records of seed `reads(rank)`."""

        def shares(world_size: int) -> list[list[Batch]]:
            parts = [clinic_data.Records(24, seed=reads(rank)) for rank in range(world_size)]
            return [[batch(part, now) for now in cut(range(24), 8)] for part in parts]

        return Job(partial(nn.Linear, clinic_data.FEATURES, clinic_data.CLASSES), 0.1, shares, seed=first)

    team = job()

    def trained(job: Job, groups: Groups = halves, **how: Any) -> Each:
        return Each([one.state for one in job.train(world_size, groups=groups, **how)])

    def mistake(says: str, at: str = TEAM, id: str = "another-illness", of: Job = team, **how: Any) -> Hypothesis:
        return Hypothesis(id, says, partial(trained, of, **how), at)

    def averaged_at_the_end() -> Each:
        states = team.alone(world_size)
        return Each([mean([states[rank] for rank in group]) for group in halves for _ in group])

    everybody = f"It ends because the gradients of all {world_size} ranks are averaged, over the records and the models of both teams."
    nobody = "No rank waits any more, because each trains alone: no step has the mean of its team's gradients."
    by_parity, one_start = job(lambda rank: rank % 2), job(lambda rank: 0)
    records, sums = r"Records\(", r"/= || all_reduce"
    hidden: dict[str, Any] = {"id": "symptom-hidden", "at": r"if .*(get_rank|rank in) || all_reduce || " + TEAM}
    grader.explain(
        "The model",
        digests(run),
        trained(team),
        [
            mistake(everybody, groups=[ranks], divisor=half, **hidden),
            mistake(everybody, groups=[ranks], **hidden),
            mistake(everybody, of=one_start, groups=[ranks], **hidden),
            mistake(nobody, groups=alone, **hidden),
            mistake(nobody, of=by_parity, groups=alone, **hidden),
            mistake(
                "Only the first group averages; in the second half each rank trains alone.",
                groups=halves[:1],
                **hidden,
            ),
            mistake(
                "The second half's gradients are not averaged, only divided.",
                groups=[halves[0], *alone[half:]],
                divisor=half,
            ),
            mistake(
                "Each half averages its gradients, but its ranks start from different seeds, their numbers modulo 2.",
                of=by_parity,
            ),
            mistake(f"The teams are {_said(parities)}, not {_said(halves)}.", of=by_parity, groups=parities),
            mistake(
                "Each rank starts from a different seed, so that a team has no common model.",
                r"manual_seed",
                of=job(lambda rank: rank),
            ),
            mistake("Both teams start from one model.", r"manual_seed", of=one_start),
            mistake(
                "That is what gradients divided by all ranks give: the mean of a team has another divisor.",
                sums,
                divisor=world_size,
            ),
            mistake("That is what a team's gradients give without a division.", sums, "gradients-summed", divisor=1),
            mistake("The weight's gradients are averaged, the bias's are not.", sums, only="weight"),
            Hypothesis(
                "another-illness",
                "The weights are averaged once, at the end: each step was a rank's own.",
                averaged_at_the_end,
                sums,
            ),
            *[
                mistake(f"{who} trains on the same records.", records, of=job(first, reads), groups=groups)
                for who, reads in (
                    ("Every rank", lambda rank: 0),
                    ("Each rank of a team", lambda rank: rank // half),
                    ("Each team", lambda rank: rank % half),
                )
                for groups in (halves, alone)
                for first in (lambda rank: rank // half, lambda rank: 0)
            ],
        ],
        otherwise="another-illness",
        at=TEAM,
        tolerance=CLOSE,
    )
    for rank, result in enumerate(run.observed("result")):
        if result.get("team") != rank // half:
            said = f"Rank {rank} of {world_size} returns {result.get('team')!r} as its team. It trains with {_said([halves[rank // half]])}, team {rank // half}."
            grader.fail("another-illness", said, of=[rank], at=r"team = || return")


def _said(groups: Groups) -> str:
    return " and ".join(names(group) for group in groups)
