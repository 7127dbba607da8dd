"""Case `rank_metric`: the rank that talks to the tracker sends its own accuracy around as that of all."""

from __future__ import annotations

import itertools

import pytest
from clinic.case import cases, digests, draw, judge_diagnosis, judge_equal, tickets, treat
from clinic.retrain import start
from clinic.support import clinic_data

from lockstep.grading import Grader, Run, names

CASE = cases()["rank_metric"]
RECORDS = 50
EXACT = 1e-6
WHERE = r"accuracy = || all_reduce || evaluate\("
REFUTED = {
    "padding-counted": "Nothing pads the test set here: the three parts have 17, 17 and 16 records, 50 together.",
    "mean-of-means": "No average of averages is taken, though 17, 17 and 16 would make it wrong: look at which numbers enter at all.",
    "buffers-of-one-rank": "The model is linear and has no buffers, and the replicas are equal.",
    "lonely-evaluation": "All ranks evaluate, each its part.",
}


def test_diagnosis(grader: Grader) -> None:
    """the diagnosis names the cause and the rank"""
    judge_diagnosis(grader, CASE, REFUTED)


def test_accuracy(grader: Grader) -> None:
    """the accuracy is what an auditor counts, whichever rank talks to the tracker"""
    mine, other = tickets(grader, CASE)
    for ticket in (mine, other):
        run = treat(grader, CASE, ticket)
        tracker = draw(ticket, CASE.name, CASE.ranks)
        own, every = _counted(run)
        for rank in (tracker, *(rank for rank in range(CASE.ranks) if rank != tracker)):
            _judge(grader, run, rank, tracker, own, every, halfway=ticket == other)


def _judge(grader: Grader, run: Run, rank: int, tracker: int, own: list[int], every: int, halfway: bool) -> None:
    told = (run.observed("result")[rank] or {}).get("accuracy")
    if told is None and rank != tracker:
        return
    try:
        accuracy = float(told)
    except (TypeError, ValueError):
        grader.fail(
            "another-illness", f'Rank {rank} returned {told!r} as "accuracy".', of=[rank], at=r"\"accuracy\" || return"
        )
    if abs(accuracy - every / RECORDS) < EXACT:
        return
    sizes = [len(range(one, RECORDS, CASE.ranks)) for one in range(CASE.ranks)]
    shares = [right / size for right, size in zip(own, sizes, strict=True)]
    truth = f"the model gets {every} of {RECORDS} right, {every / RECORDS:.4f}"
    counted = ", ".join(f"{right} of {size}" for right, size in zip(own, sizes, strict=True))
    some = [chosen for count in range(1, CASE.ranks) for chosen in itertools.combinations(range(CASE.ranks), count)]
    whose = next(
        (
            chosen
            for chosen in some
            if abs(accuracy - sum(own[one] for one in chosen) / sum(sizes[one] for one in chosen)) < EXACT
        ),
        (),
    )
    if abs(accuracy - sum(shares) / CASE.ranks) < EXACT:
        grader.fail(
            "another-illness",
            f"Rank {rank} has {accuracy:.4f}, the mean of the ranks' accuracies; {truth}. The parts are not equal ({counted}), "
            "so their shares may not have the same weight.",
            at=r"/ *world_size || AVG || mean || " + WHERE,
        )
    if whose:
        grader.fail(
            "mended-halfway" if halfway else "still-broken" if len(whose) == 1 else "another-illness",
            f"Rank {rank} has {accuracy:.4f}, the accuracy of {names(whose)} alone; {truth}. The ranks counted {counted}.",
            of=whose,
            at=WHERE,
        )
    padded = -RECORDS % CASE.ranks
    if any(abs(accuracy - (every + right) / (RECORDS + padded)) < EXACT for right in range(padded + 1)):
        said = f"Rank {rank} has {accuracy:.4f}, which is {RECORDS + padded} records counted; {truth}. A sampler that gives all ranks as many repeats {padded} of them."
        grader.fail("another-illness", said, at=r"Sampler\( || " + WHERE)
    grader.fail("another-illness", f"Rank {rank} has {accuracy:.4f}; {truth}. The ranks counted {counted}.", at=WHERE)


def _counted(run: Run) -> tuple[list[int], int]:
    """How many records of each part, and of all, the returned model gets right."""
    model = start()
    state = digests(run)[0]
    if state.keys() != model.state_dict().keys():
        return [0] * CASE.ranks, 0
    model.load_state_dict(state)
    test = clinic_data.Records(RECORDS, seed=11)
    right = model(test.features).argmax(1) == test.classes
    return [int(right[rank :: CASE.ranks].sum()) for rank in range(CASE.ranks)], int(right.sum())


@pytest.mark.needs("test_accuracy")
def test_equal(grader: Grader) -> None:
    """all ranks end with the same model"""
    run = treat(grader, CASE, tickets(grader, CASE)[0])
    judge_equal(grader, run, at=r"DDP\(")
