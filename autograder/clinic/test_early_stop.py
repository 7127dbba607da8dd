"""Case `early_stop`: each rank stops when its own validation loss is low enough, which is another epoch for each."""

from __future__ import annotations

from functools import cache

import pytest
from clinic.case import cases, judge_diagnosis, judge_equal, other_ticket, steps, treat, treat_widely, unmended

from lockstep.grading import Cause, Diagnosis, Grader, Run, names

CASE = cases()["early_stop"]
GOOD_ENOUGH, EPOCHS, BATCH, RECORDS, PART = 0.7, 30, 8, 48, 24
STOP = r"GOOD_ENOUGH:|< GOOD_ENOUGH || break || validation_loss\(model || for epoch || def main"
REFUTED = {
    "uneven-data": "The sampler gives every rank two batches an epoch. Count the epochs.",
    "collective-on-some-ranks": "Every rank reaches every collective of an epoch. Ask how many epochs each has, and who says so.",
    "slow-rank": "No rank is slow: the rank that the others wait for says itself that it is done.",
    "metric-of-one-rank": "No number of one rank is reported as that of all; each keeps its own, and acts on it.",
}


def read_failure(grader: Grader, run: Run, cause: Cause) -> Diagnosis | None:
    """Still waiting: who stopped after which step, and who went on."""
    took = steps(run)
    if len(set(took)) == 1:
        return None
    first = [rank for rank, count in enumerate(took) if count == min(took)]
    rest = [rank for rank in range(len(took)) if rank not in first]
    seen = f"{names(first).capitalize()} stopped after {min(took)} steps, but {names(rest)} had not decided to stop: {cause.headline}"
    return unmended(grader, run, seen, STOP, first)


def test_diagnosis(grader: Grader) -> None:
    """the diagnosis names the cause and the rank"""
    judge_diagnosis(grader, CASE, REFUTED)


def test_it_ends(grader: Grader) -> None:
    """the job ends, whichever rank has the easy records"""
    treat_widely(grader, CASE)


@pytest.mark.needs("test_it_ends")
def test_stops(grader: Grader) -> None:
    """all ranks stop after the same epoch, and because the model is good enough"""
    run = treat_widely(grader, CASE)[0][1]
    trained = [(result or {}).get("epochs") for result in run.observed("result")]
    if len({str(one) for one in trained}) > 1:
        grader.fail(
            "symptom-hidden",
            f"It ends, and still each rank decides for itself: they trained {trained} epochs. "
            "The last steps were averages over the ranks that were left.",
            at=r"Join || join\( || " + STOP,
        )
    took, per_epoch = steps(run), RECORDS // CASE.ranks // BATCH
    if trained[0] != took[0] / per_epoch:
        grader.fail(
            "another-illness",
            f"The job says {trained[0]!r} epochs, and DDP averaged the gradients of {took[0]} steps, {per_epoch} an epoch.",
            at=r"\"epochs\" || return",
        )
    _in_time(grader, CASE.ranks, trained[0], "symptom-hidden")
    alone = treat(grader, CASE, other_ticket(grader, CASE, CASE.ranks), 1)
    _in_time(grader, 1, (alone.observed("result")[0] or {}).get("epochs"), "mended-halfway")


@pytest.mark.needs("test_it_ends")
def test_equal(grader: Grader) -> None:
    """all ranks end with the same model"""
    run = treat_widely(grader, CASE)[0][1]
    said = "It ends, but {tensor} of {ranks} is no longer that of rank 0."
    judge_equal(grader, run, said, r"no_sync || \.module || " + STOP)


def _in_time(grader: Grader, world_size: int, trained: object, id: str) -> None:
    """The epoch at which the ranks stopped, against those at which the parts of the validation set become easy."""
    each = _good_enough_after(world_size)
    if isinstance(trained, int) and min(each) <= trained <= max(each):
        return
    parts = f"the parts of the validation set are below {GOOD_ENOUGH} after {', '.join(map(str, each))} epochs"
    if world_size == 1:
        parts = f"the validation loss is below {GOOD_ENOUGH} after {each[0]}"
    on = f"on {world_size} ranks" if world_size > 1 else "on one rank"
    grader.fail(
        id,
        f"{on.capitalize()} it trained {trained} epochs; {parts}. It no longer stops when the model is good enough.",
        at=STOP,
    )


@cache
def _good_enough_after(world_size: int) -> tuple[int, ...]:
    """After how many epochs the loss on each part of the validation set is low enough, computed in one process."""
    import torch
    from clinic.support import clinic_data
    from judging.sampling import orders
    from torch import nn

    torch.manual_seed(0)
    model = nn.Linear(clinic_data.FEATURES, clinic_data.CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    records = clinic_data.Records(RECORDS)
    parts = [clinic_data.Records(PART, seed=100 + part) for part in range(world_size)]
    after: dict[int, int] = {}
    for epoch, dealt in enumerate(orders(RECORDS, world_size, EPOCHS)):
        for first in range(0, len(dealt[0]), BATCH):
            chosen = [order[first : first + BATCH] for order in dealt]
            losses = [nn.functional.cross_entropy(model(records.features[one]), records.classes[one]) for one in chosen]
            optimizer.zero_grad()
            torch.stack(losses).mean().backward()
            optimizer.step()
        with torch.no_grad():
            for number, part in enumerate(parts):
                if nn.functional.cross_entropy(model(part.features), part.classes) < GOOD_ENOUGH:
                    after.setdefault(number, epoch + 1)
    return tuple(after.get(number, EPOCHS) for number in range(world_size))
