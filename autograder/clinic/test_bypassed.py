"""Case `bypassed`: the loss is computed by `model.module`, so DDP prepares no reduction and the ranks train apart."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial

import pytest
from clinic.case import cases, judge_diagnosis, judge_equal, other_ticket, steps, treat
from clinic.retrain import Job, reductions, sampled
from clinic.support import clinic_data
from clinic.trained import alone, judge_loss, judge_training
from torch import nn

from lockstep.grading import Grader, Hypothesis, Run

CASE = cases()["bypassed"]
WORLDS, EPOCHS, BATCH, RATE = (CASE.ranks, 3), 2, 8, 0.1
FORWARD = r"\.module\. || \.module\( || loss = || DDP\("
REFUTED = {
    "same-data-everywhere": "The sampler gives each rank other records, and the printed losses differ for that reason alone.",
    "missed-synchronization": "There is no no_sync in the file; and not some steps go without an all-reduce, but all.",
    "different-settings": "Both ranks were given the same learning rate; compare what they sent each other in a step instead.",
}


def network() -> nn.Module:
    """The classifier under the names that the stub gives it."""
    return nn.Sequential(OrderedDict(layer=nn.Linear(clinic_data.FEATURES, clinic_data.CLASSES)))


JOB = Job(network, RATE, sampled(BATCH, EPOCHS), EPOCHS)
STALE = Job(network, RATE, sampled(BATCH, EPOCHS, told=False), EPOCHS)


def _runs(grader: Grader) -> list[Run]:
    return [treat(grader, CASE, other_ticket(grader, CASE, world_size), world_size) for world_size in WORLDS]


def test_diagnosis(grader: Grader) -> None:
    """the diagnosis names the cause and the rank"""
    judge_diagnosis(grader, CASE, REFUTED)


def test_equal(grader: Grader) -> None:
    """the ranks train one model together"""
    for run in _runs(grader):
        took = len(JOB.shares(run.world_size)[0])
        reduced, others = steps(run)[0], reductions(run)[0] - steps(run)[0]
        said = f"After training, {{tensor}} of {{ranks}} differs from rank 0's: DDP averaged gradients in {reduced} of {took} steps"
        if alone(run, JOB):
            said += ", and each rank has the model that its own gradients give"
            if others:
                said += f". The {others} all-reduces besides came too late for optimizer.step(), or what they gave was not used"
        judge_equal(grader, run, f"{said}.", FORWARD, id="still-broken")


@pytest.mark.needs("test_equal")
def test_training(grader: Grader) -> None:
    """it is the model that the records of all ranks give in two epochs"""
    for run in _runs(grader):
        stale = Hypothesis(
            "missing-set-epoch",
            "The records come in the same order in both epochs.",
            partial(STALE.state, run.world_size),
            r"set_epoch || Sampler\(",
        )
        judge_training(grader, run, JOB, [stale], FORWARD)
        judge_loss(grader, run, JOB)
