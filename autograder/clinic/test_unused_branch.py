"""Case `unused_branch`: the second hidden layer is built and never used, so DDP waits for its gradients for ever."""

from __future__ import annotations

import re
from functools import cache

import pytest
import torch
from clinic.case import cases, judge_diagnosis, judge_equal, other_ticket, treat, wrapped_with
from torch import nn

from lockstep.grading import Cause, Diagnosis, Grader, Run, names

CASE = cases()["unused_branch"]
FORWARD = r"self\.hidden\[ || for layer in || \.hidden || def forward"
FLAG = r"find_unused_parameters || static_graph || DDP\("
REFUTED = {
    "failing-rank": "All ranks fail, in the same line of the same step, and each for itself.",
    "reentrant-checkpoint": "Nothing is recomputed here: the file does not use torch.utils.checkpoint.",
    "changed-after-wrapping": "Nothing touches the model between DDP() and the first step; the parameters that are missed were there from the start.",
    "missed-synchronization": "There is no no_sync in the file. DDP waits for gradients in every step, and some never come.",
}


def read_failure(grader: Grader, run: Run, cause: Cause) -> Diagnosis | None:
    """Still the same complaint: which parameters got no gradient."""
    said = cause.error.message if cause.error else ""
    if "Expected to have finished reduction" not in said:
        return None
    missed = re.search(r"did not receive grad for rank \d+: ([\d ]+)", said)
    which = f"parameters {', '.join(missed[1].split())}" if missed else "some parameters"
    return grader.diagnosis(
        "still-broken",
        f"{names(cause.ranks).capitalize()} failed in step 2, because {which} got no gradient in step 1.",
        of=cause.ranks,
        at=FORWARD,
    )


@cache
def untrained() -> dict[str, torch.Tensor]:
    """What the six parameters are before the first step."""
    torch.manual_seed(0)
    hidden = nn.ModuleList([nn.Linear(8, 6), nn.Linear(6, 6)])
    return nn.ModuleDict({"hidden": hidden, "head": nn.Linear(6, 3)}).state_dict()


def test_diagnosis(grader: Grader) -> None:
    """the diagnosis names the cause and the rank"""
    judge_diagnosis(grader, CASE, REFUTED)


def test_it_ends(grader: Grader) -> None:
    """the job takes all its steps, on 3 ranks and on 2"""
    for world_size in (CASE.ranks, 2):
        treat(grader, CASE, other_ticket(grader, CASE, world_size), world_size)


@pytest.mark.needs("test_it_ends")
def test_all_layers(grader: Grader) -> None:
    """both hidden layers are trained"""
    run = treat(grader, CASE, other_ticket(grader, CASE, CASE.ranks))
    state = run.observed("result")[0]["model"]
    before = untrained()
    if sum(value.numel() for value in state.values()) < sum(value.numel() for value in before.values()):
        grader.fail(
            "symptom-hidden",
            f"It ends because a layer has been taken out: the model has {len(state)} parameters, and with two hidden layers {len(before)}.",
            at=r"self\.hidden = || def __init__",
        )
    idle = [
        name for name, value in state.items() if any(torch.equal(value, one) for one in before.values() if one.any())
    ]
    if idle:
        flags = ", ".join(
            f"{key}=True"
            for key in ("find_unused_parameters", "static_graph")
            if wrapped_with(run)[:1] and wrapped_with(run)[0].get(key)
        )
        because = f"DDP no longer minds ({flags})" if flags else "DDP doesn't look any more"
        grader.fail(
            "symptom-hidden",
            f"It ends because {because}, and {', '.join(idle)} {'has' if len(idle) == 1 else 'have'} still the values of "
            "before the first step: the second hidden layer is not trained.",
            at=f"{FLAG if flags else FORWARD}",
        )


@pytest.mark.needs("test_it_ends")
def test_equal(grader: Grader) -> None:
    """all ranks end with the same model"""
    run = treat(grader, CASE, other_ticket(grader, CASE, CASE.ranks))
    said = "It ends, but {tensor} of {ranks} differs from rank 0's: its gradients are not averaged."
    judge_equal(grader, run, said, r"no_sync || \.module\( || DDP\( || loss = ")
