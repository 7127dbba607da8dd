"""Case `reentrant`: activation checkpointing in its reentrant form gives the hidden layers no gradients; DDP waits for them."""

from __future__ import annotations

import re
from collections import OrderedDict

import pytest
from clinic.case import cases, judge_diagnosis, judge_equal, other_ticket, treat
from clinic.retrain import Job, sampled
from clinic.support import clinic_data
from clinic.trained import flags, judge_loss, judge_shares, judge_training, unmoved
from torch import nn

from lockstep.grading import Cause, Diagnosis, Grader, Hypothesis, Run, names

CASE = cases()["reentrant"]
WIDTH, HIDDEN, STEPS = 6, 2, 4
RECOMPUTED = r"checkpoint\( || use_reentrant || def forward"
FLAG = r"find_unused_parameters || static_graph || "
REFUTED = {
    "unused-parameters": "forward uses every layer, and without the recomputing every layer gets its gradients. Read the warning above the error.",
    "failing-rank": "All ranks fail, in the same line of the same step, and each for itself.",
    "changed-after-wrapping": "Nothing touches the model between DDP() and the first step.",
    "missed-synchronization": "There is no no_sync in the file. DDP waits for gradients in every step, and some never come.",
}


def read_failure(grader: Grader, run: Run, cause: Cause) -> Diagnosis | None:
    """DDP's two complaints about the reentrant form."""
    said = cause.error.message if cause.error else ""
    who = names(cause.ranks).capitalize()
    if "Expected to have finished reduction" in said:
        missed = re.search(r"did not receive grad for rank \d+: ([\d ]+)", said)
        which = f"parameters {', '.join(missed[1].split())}" if missed else "some parameters"
        return grader.diagnosis(
            "still-broken",
            f"{who} failed in step 2, because {which} got no gradient in step 1.",
            of=cause.ranks,
            at=RECOMPUTED,
        )
    if "mark a variable ready only once" in said:
        return grader.diagnosis(
            "symptom-hidden",
            f"{who} failed differently: DDP looked for unused parameters, and the recomputing's own backward passes then gave it "
            "gradients that it had already crossed off.",
            of=cause.ranks,
            at=FLAG + RECOMPUTED,
        )
    return None


def network() -> nn.Module:
    """The network of the stub, with nothing recomputed."""
    first, second = (nn.Sequential(nn.Linear(width, WIDTH), nn.Tanh()) for width in (clinic_data.FEATURES, WIDTH))
    return nn.Sequential(OrderedDict(first=first, second=second, head=nn.Linear(WIDTH, clinic_data.CLASSES)))


JOB = Job(network, 0.2, sampled(4))


def test_diagnosis(grader: Grader) -> None:
    """the diagnosis names the cause and the rank"""
    judge_diagnosis(grader, CASE, REFUTED)


def _run(grader: Grader) -> Run:
    return treat(grader, CASE, other_ticket(grader, CASE, CASE.ranks), count_linear=True)


def test_it_ends(grader: Grader) -> None:
    """the job takes all its steps"""
    _run(grader)


@pytest.mark.needs("test_it_ends")
def test_all_layers(grader: Grader) -> None:
    """all layers are trained, as they would be without recomputing"""
    run = _run(grader)
    said = "It ends, but {tensor} of {ranks} differs from rank 0's: its gradients are not averaged."
    judge_equal(grader, run, said, r"no_sync || \.module\( || DDP\( || loss = ")
    judge_shares(grader, run, 48)
    otherwise = unmoved(run, JOB) or Hypothesis("symptom-hidden", flags(run).lstrip(), None)
    judge_training(grader, run, JOB, at=FLAG + RECOMPUTED, otherwise=otherwise)
    judge_loss(grader, run, JOB)


@pytest.mark.needs("test_all_layers")
def test_recomputes(grader: Grader) -> None:
    """the hidden layers are still recomputed"""
    run, needed = _run(grader), STEPS * (2 * HIDDEN + 1)
    calls = run.observed("linear_calls")
    few = [rank for rank, count in enumerate(calls) if count < needed]
    if few:
        grader.fail(
            "symptom-hidden",
            f"Linear layers ran {calls[few[0]]} times in {STEPS} steps on {names(few)}; with {HIDDEN} hidden layers recomputed it takes {needed}. "
            "The memory that was to be saved is held again.",
            of=few,
            at=r"checkpoint\( || for layer in || def forward",
        )
