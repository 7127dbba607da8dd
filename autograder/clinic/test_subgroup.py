"""Case `subgroup`: groups of neighboring ranks are made, and every rank then picks one by another rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from clinic.case import cases, digests, judge_diagnosis, other_ticket, treat, unmended

from lockstep.grading import Cause, Diagnosis, Grader, Run, names, sentence

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
    import torch

    half = world_size // 2
    weights = [state.get("weight") for state in digests(run)]
    halves = [range(half), range(half, world_size)]
    expected = _trained(world_size, halves, half)
    everybody = [_trained(world_size, [range(world_size)], divisor) for divisor in (half, world_size)]
    alone = _trained(world_size, [[rank] for rank in range(world_size)], 1)
    for rank, weight in enumerate(weights):
        if weight is None or weight.shape != expected[rank].shape:
            grader.fail(
                "another-illness",
                f'Rank {rank} returned no such model under "model".',
                of=[rank],
                at=r"return || def main",
            )
        if torch.allclose(weight, expected[rank], atol=1e-5):
            continue
        if any(torch.allclose(weight, one[rank], atol=1e-5) for one in everybody):
            grader.fail(
                "symptom-hidden",
                f"It ends because the gradients of all {world_size} ranks are averaged: rank {rank} trains on the records and "
                "with the model of both teams.",
                of=[rank],
                at=r"all_reduce || " + TEAM,
            )
        mate = next(one for one in halves[rank // half] if one != rank)
        if torch.allclose(weight, alone[rank], atol=1e-5):
            grader.fail(
                "symptom-hidden",
                f"No rank waits any more, because rank {rank} of {world_size} trains alone: "
                f"it doesn't have its teammate's model, rank {mate}'s.",
                of=[rank],
                at=r"if .*(get_rank|rank in) || all_reduce || " + TEAM,
            )
        same = "has the model of" if torch.equal(weight, weights[mate]) else "doesn't have the model of"
        grader.fail(
            "another-illness",
            f"It ends, but of {world_size} ranks rank {rank} {same} its team mate, rank {mate}, "
            f"and not the one that the records of ranks {halves[rank // half][0]} to {halves[rank // half][-1]} give.",
            of=[rank],
            at=TEAM,
        )


def _trained(world_size: int, groups: Sequence[Sequence[int]], divisor: int) -> list[Any]:
    """Each rank's weight in the end, when gradients are summed over these groups and divided by `divisor`."""
    import torch
    from clinic.support import clinic_data
    from torch import nn

    models = []
    for rank in range(world_size):
        torch.manual_seed(rank // (world_size // 2))
        models.append(nn.Linear(clinic_data.FEATURES, clinic_data.CLASSES))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    parts = [clinic_data.Records(24, seed=rank) for rank in range(world_size)]
    for first in range(0, 24, 8):
        now = slice(first, first + 8)
        for model, part in zip(models, parts, strict=True):
            model.zero_grad()
            nn.functional.cross_entropy(model(part.features[now]), part.classes[now]).backward()
        for group in groups:
            for same in zip(*(models[rank].parameters() for rank in group), strict=True):
                mean = torch.stack([one.grad for one in same if one.grad is not None]).sum(0) / divisor
                for one in same:
                    one.grad = mean.clone()
        for optimizer in optimizers:
            optimizer.step()
    return [model.weight.detach() for model in models]
