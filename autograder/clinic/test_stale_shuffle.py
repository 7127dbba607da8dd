"""Case `stale_shuffle`: nobody tells the sampler which epoch it is, so all epochs have the order of epoch 0."""

from __future__ import annotations

import pytest
from clinic.case import cases, judge_diagnosis, judge_equal, other_ticket, samples, treat

from lockstep.grading import Grader, names

CASE = cases()["stale_shuffle"]
WORLD, RECORDS, EPOCHS = 3, 48, 3
SHUFFLE = r"set_epoch || Sampler\( || DataLoader\( || for epoch"
REFUTED = {
    "same-data-everywhere": "The ranks share the records: no index is read by both in one epoch.",
    "same-randomness": "All ranks have to shuffle in the same way, to take different parts of one order. Compare one rank's epochs instead.",
    "different-settings": "The ranks have the same settings, and the replicas are equal.",
    "missed-synchronization": "The gradients are averaged in every step, and the replicas are equal bit for bit.",
}


def test_diagnosis(grader: Grader) -> None:
    """the diagnosis names the cause and the rank"""
    judge_diagnosis(grader, CASE, REFUTED)


def test_order(grader: Grader) -> None:
    """every epoch has a new order, across the ranks"""
    run = treat(grader, CASE, other_ticket(grader, CASE, WORLD), WORLD)
    length = RECORDS // WORLD
    read = [[index for _, index in seen] for seen in samples(run)]
    epochs = [[seen[begin : begin + length] for begin in range(0, EPOCHS * length, length)] for seen in read]
    for rank, parts in enumerate(epochs):
        if len(read[rank]) != EPOCHS * length:
            grader.fail(
                "another-illness",
                f"Rank {rank} read {len(read[rank])} records in {EPOCHS} epochs on {WORLD} ranks; its share is {length} an epoch.",
                of=[rank],
                at=SHUFFLE,
            )
        again = [(a, b) for b in range(EPOCHS) for a in range(b) if parts[a] == parts[b]]
        if again:
            a, b = again[0]
            start = ", ".join(map(str, parts[a][:4]))
            grader.fail(
                "still-broken" if len(again) == EPOCHS * (EPOCHS - 1) // 2 else "mended-halfway",
                f"Rank {rank} read its {length} records in epoch {b} in the same order as in epoch {a}: {start}, …",
                of=[rank],
                at=SHUFFLE,
            )
    for epoch in range(EPOCHS):
        together = set().union(*(parts[epoch] for parts in epochs))
        if len(together) < RECORDS:
            grader.fail(
                "another-illness",
                f"In epoch {epoch} the {WORLD} ranks read {len(together)} of {RECORDS} records, some of them more than once: "
                "they no longer cut one common order.",
                at=r"seed || " + SHUFFLE,
            )
    fixed = [rank for rank, parts in enumerate(epochs) if len({frozenset(part) for part in parts}) == 1]
    if fixed:
        grader.fail(
            "symptom-hidden",
            f"The order changes, but {names(fixed)} never see{'s' if len(fixed) == 1 else ''} other records: "
            f"the same {length} of {RECORDS} in all {EPOCHS} epochs.",
            of=fixed,
            at=r"shuffle || Subset || " + SHUFFLE,
        )


@pytest.mark.needs("test_order")
def test_equal(grader: Grader) -> None:
    """all ranks end with the same model"""
    run = treat(grader, CASE, other_ticket(grader, CASE, WORLD), WORLD)
    judge_equal(grader, run, at=r"DDP\(")
