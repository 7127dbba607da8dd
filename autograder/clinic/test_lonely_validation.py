"""Case `lonely_validation`: one rank alone calls the DDP wrapper, whose forward broadcasts the BatchNorm statistics."""

from __future__ import annotations

import pytest
from clinic.case import cases, draw, judge_diagnosis, treat_widely, unmended, wrapped_with

from lockstep.grading import Cause, Diagnosis, Grader, Run, names

CASE = cases()["lonely_validation"]
MEASURING = r"accuracy\(model[,.] || accuracies\.append || DDP\( || def main"
STEPS = 8
REFUTED = {
    "collective-on-some-ranks": "You are near, but there is no collective in that branch's code. Which call in it communicates even so, and why?",
    "different-settings": "The hosts' settings do differ, and may: one is meant to measure.",
    "buffers-of-one-rank": "That would give a wrong number, not none at all.",
    "slow-rank": "The measuring takes a millisecond; the rank that measures hasn't even started.",
}


def read_failure(grader: Grader, run: Run, cause: Cause) -> Diagnosis | None:
    """Still waiting: who sent or awaited statistics that nobody else did."""
    calls = [sum(call.kind == "broadcast" for call in one) for one in run.collectives]
    if len(set(calls)) == 1:
        return None
    few = [rank for rank, count in enumerate(calls) if count == min(calls)]
    many = [rank for rank, count in enumerate(calls) if count == max(calls)]
    seen = (
        f"{names(many).capitalize()} called {max(calls)} broadcasts, {names(few)} only {min(calls)}, and the job's code has none: "
        f"{cause.headline}"
    )
    return unmended(grader, run, seen, MEASURING, many)


def test_diagnosis(grader: Grader) -> None:
    """the diagnosis names the cause and the rank"""
    judge_diagnosis(grader, CASE, REFUTED)


def test_it_ends(grader: Grader) -> None:
    """the job ends, whichever host measures"""
    treat_widely(grader, CASE)


@pytest.mark.needs("test_it_ends")
def test_measured(grader: Grader) -> None:
    """the host that measures returns an accuracy for each epoch"""
    import torch
    from clinic.support import clinic_data

    held_out = clinic_data.Records(64, seed=100)
    for ticket, run in treat_widely(grader, CASE):
        host = draw(ticket, CASE.name, CASE.ranks)
        result = run.observed("result")[host] or {}
        found = result.get("accuracies")
        if not isinstance(found, list) or len(found) != 2 or not all(isinstance(one, float) for one in found):
            grader.fail(
                "symptom-hidden",
                f"It ends, and rank {host}, whose settings ask for it, has measured {found!r} instead of two accuracies.",
                of=[host],
                at=MEASURING,
            )
        model = torch.nn.Sequential(
            torch.nn.Linear(clinic_data.FEATURES, 16),
            torch.nn.BatchNorm1d(16),
            torch.nn.ReLU(),
            torch.nn.Linear(16, clinic_data.CLASSES),
        )
        model.load_state_dict(result["model"])
        model.eval()
        right = (model(held_out.features).argmax(1) == held_out.classes).float().mean().item()
        if abs(right - found[1]) > 0.15:
            grader.fail(
                "another-illness",
                f"Rank {host} says that {found[1]:.0%} are right after epoch 1; its model, in eval mode, has {right:.0%} right.",
                of=[host],
                at=MEASURING,
            )


@pytest.mark.needs("test_it_ends")
def test_statistics(grader: Grader) -> None:
    """the training is what it was: the ranks share weights and running statistics"""
    import torch

    run = treat_widely(grader, CASE)[0][1]
    copied = sum(
        call.kind == "broadcast" and call.dtype == "float32" and call.inside == "forward" for call in run.collectives[0]
    )
    if copied < STEPS - 2:
        given = wrapped_with(run)
        option = f" ({', '.join(f'{key}={value}' for key, value in given[0].items())})" if given and given[0] else ""
        grader.fail(
            "symptom-hidden",
            f"It ends because DDP copies the running statistics at {copied} of {STEPS} forwards now{option}: "
            "each rank normalizes by its own, and the accuracy depends on which host measures it.",
            at=r"broadcast_buffers || forward_sync_buffers || DDP\( || model\.module",
        )
    states = [(result or {}).get("model") or {} for result in run.observed("result")]
    for name, value in states[0].items():
        if "running" in name or "num_batches" in name:
            continue
        other = [rank for rank, state in enumerate(states) if not torch.equal(state[name], value)]
        if other:
            grader.fail(
                "another-illness",
                f"It ends, but {name} of {names(other)} is no longer that of rank 0.",
                of=other,
                at=MEASURING,
            )
