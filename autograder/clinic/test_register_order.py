"""Case `register_order`: one host registers two layers of equal shape in another order, and DDP pairs by order."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from clinic.case import cases, digests, draw, judge_diagnosis, samples, tickets, treat, unequal
from clinic.retrain import reductions

from lockstep.grading import Grader, names

CASE = cases()["register_order"]
STEPS = 4
ORDER = r"ModuleDict || towers || Ears\("
REFUTED = {
    "different-settings": "A settings file does differ, and no number in it: learning rate and all the rest are equal. What is done with the list that differs?",
    "loaded-after-wrapping": "Nothing is loaded. What DDP() itself did when it made all ranks equal is worth a look.",
    "different-order": "All ranks call the same collectives in the same order; what is in them is another matter.",
    "missed-synchronization": "The gradients are averaged in every step, each with the one in the same place.",
}


def test_diagnosis(grader: Grader) -> None:
    """the diagnosis names the cause and the rank"""
    judge_diagnosis(grader, CASE, REFUTED)


def test_equal(grader: Grader) -> None:
    """each tower is the same on all ranks, whichever host has the other list"""
    mine, other = tickets(grader, CASE)
    for ticket in (mine, other):
        run = treat(grader, CASE, ticket)
        different = unequal(run)
        states = digests(run)
        if different:
            tensor, ranks = different
            odd = draw(ticket, CASE.name, CASE.ranks)
            keys = list(states[odd])
            grader.fail(
                "still-broken" if ticket == mine else "mended-halfway",
                f"After training, {tensor} of {names(ranks)} differs from rank 0's; rank {odd} starts with {keys[0] if keys else 'nothing'}, "
                "in a different order from the rest, and DDP pairs by order."
                + ("" if ticket == mine else " Under your own ticket all is well."),
                of=[odd],
                at=ORDER,
            )
        if len(states[0]) < 4:
            grader.fail(
                "symptom-hidden",
                f"The model has {len(states[0])} tensors left of 4: without two towers nothing can be mixed up.",
                at=ORDER,
            )
        if twins := _twins(states[0]):
            grader.fail(
                "symptom-hidden",
                f"The two towers are one layer: {twins[0]} and {twins[1]} hold the same numbers, so nothing can be mixed up.",
                at=ORDER,
            )
        if min(reductions(run)) < STEPS:
            grader.fail(
                "symptom-hidden",
                f"The towers are equal at the end, after {STEPS} steps with {min(reductions(run))} all-reduces: equal is not trained together.",
                at=r"broadcast || all_reduce || DDP\(",
            )
        copies = [
            sum(call.inside not in ("DDP()", "backward", "forward") for call in calls) for calls in run.collectives
        ]
        orders = {tuple(state) for state in states}
        if len(orders) > 1 and min(copies) > 0:
            grader.fail(
                "symptom-hidden",
                f"The towers are equal at the end because {min(copies)} collectives copied them; in training the ranks still "
                f"had {len(orders)} orders, and DDP averaged left with right.",
                at=r"broadcast || all_reduce || load_state_dict || " + ORDER,
            )


def _twins(state: dict[str, Any]) -> tuple[str, str] | None:
    """Two tensors of a model that are bit for bit the same, or None."""
    pairs = itertools.combinations(state, 2)
    return next((pair for pair in pairs if torch.equal(state[pair[0]], state[pair[1]])), None)


@pytest.mark.needs("test_equal")
def test_all_records(grader: Grader) -> None:
    """the ranks share the records between them"""
    run = treat(grader, CASE, tickets(grader, CASE)[0])
    first = [set(seen[: len(seen) // 2]) for seen in samples(run)]
    twice = sum(map(len, first)) - len(set().union(*first))
    if twice:
        grader.fail(
            "another-illness",
            f"In epoch 0 the ranks read {twice} of the 48 records more than once.",
            at=r"Sampler\( || DataLoader\(",
        )
