"""Case `register_order`: one host registers two layers of equal shape in another order, and DDP pairs by order."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from clinic.case import cases, digests, draw, judge_diagnosis, judge_sets, tickets, treat, unequal, zero_is_odd
from clinic.retrain import Job, State, apart, as_read, reductions
from clinic.support import clinic_data
from clinic.trained import judge_shares, judge_training

from lockstep.grading import Grader, Hypothesis, Run, names

CASE = cases()["register_order"]
RECORDS, EPOCHS, BATCH = 48, 2, 8
SIDES, KINDS = ("left", "right"), ("weight", "bias")
Hear = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
ORDER = r"ModuleDict || towers || Ears\("
HEARING = r"\.abs\( || def forward"


def as_told(features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What left and right hear."""
    return features, features.abs()


HEARD: dict[str, Hear] = {
    "Both towers hear the features as they are: mixing them up does no harm.": lambda x: (x, x),
    "Both towers hear the absolute features: mixing them up does no harm.": lambda x: (
        x.abs(),
        x.abs(),
    ),
    "Left and right have changed places: left hears the absolute features.": lambda x: (x.abs(), x),
}
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
    for ticket in (mine, other, zero_is_odd(CASE)):
        run = treat(grader, CASE, ticket)
        odd = draw(ticket, CASE.name, CASE.ranks)
        well = "" if ticket == mine else " Under your own ticket all is well."
        states = digests(run)
        orders = [tuple(name for name in state if name.endswith("weight")) for state in states]
        if different := unequal(run):
            tensor, ranks = different
            if len(set(orders)) > 1:
                why = f"rank {odd} starts with {orders[odd][0]}, in a different order from the rest, and gradients are averaged by order."
            elif not min(reductions(run)):
                why = "it isn't the order, which is the same on all ranks: no gradient is averaged."
            else:
                why = "all ranks have one order at the end; where the gradients were averaged, they did not."
            grader.fail(
                "still-broken" if ticket == mine else "mended-halfway",
                f"After training, {tensor} of {names(ranks)} differs from rank 0's; {why}{well}",
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
        _judge_towers(grader, run, len(set(orders)))
    judge_sets(grader, CASE, mine, ORDER)


class Ears(torch.nn.Module):
    """The model of the job. `first` is the tower that is made first."""

    def __init__(self, first: str) -> None:
        super().__init__()
        for name in sorted(SIDES, key=lambda side: side != first):
            self.add_module(name, torch.nn.Linear(clinic_data.FEATURES, clinic_data.CLASSES))

    def forward(self, features: torch.Tensor, hear: Hear = as_told) -> torch.Tensor:
        """`hear` says what each tower is given."""
        left, right = hear(features)
        return self.left(left) + self.right(right)  # type: ignore[no-any-return]


def _judge_towers(grader: Grader, run: Run, orders: int) -> None:
    """Equal towers: are they those of one process that trains on the same records?"""
    towers = [_by_side(state) for state in digests(run)]
    jobs = [Job(partial(Ears, first), 0.1, as_read(run, BATCH, RECORDS, EPOCHS), EPOCHS) for first in SIDES]
    job = min(jobs, key=lambda job: apart(towers[0], job.state(run.world_size)))
    mixed = (
        f"The ranks had {orders} orders in training, and left was averaged with right: that they are equal at the end is "
        "a copy or an exchange of what was mixed up."
    )
    changed = [
        Hypothesis(
            "another-illness",
            said,
            partial(one.going(lambda model, features, rank, step, hear=hear: model(features, hear)).state, CASE.ranks),
            HEARING,
        )
        for one in jobs
        for said, hear in HEARD.items()
    ]
    unlike = Hypothesis(
        "symptom-hidden", mixed if orders > 1 else "", None, r"broadcast || all_reduce || load_state || " + ORDER
    )
    judge_training(
        grader, run, job, changed, ORDER, otherwise=unlike, untrained="untrained-weights-returned", seen=towers
    )


def _by_side(state: State) -> State:
    """`left.weight` and so on, whatever the job calls them; in the order of the state where it names no side."""
    named = {
        f"{side}.{kind}": value
        for name, value in state.items()
        for side in SIDES
        for kind in KINDS
        if side in name and name.endswith(kind)
    }
    places = [f"{side}.{kind}" for side in SIDES for kind in KINDS]
    return named if len(named) == len(state) else dict(zip(places, state.values(), strict=False))


def _twins(state: dict[str, Any]) -> tuple[str, str] | None:
    """Two tensors of a model that are bit for bit the same, or None."""
    pairs = itertools.combinations(state, 2)
    return next((pair for pair in pairs if torch.equal(state[pair[0]], state[pair[1]])), None)


@pytest.mark.needs("test_equal")
def test_all_records(grader: Grader) -> None:
    """the ranks share the records between them"""
    judge_shares(grader, treat(grader, CASE, tickets(grader, CASE)[0]), RECORDS, EPOCHS)
