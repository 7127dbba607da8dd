"""Case `bypassed`: the loss is computed by `model.module`, so DDP prepares no reduction and the ranks train apart."""

from __future__ import annotations

import pytest
from clinic.case import cases, judge_diagnosis, judge_equal, other_ticket, samples, steps, treat

from lockstep.grading import Grader

CASE = cases()["bypassed"]
FORWARD = r"\.module\. || \.module\( || loss = || DDP\("
REFUTED = {
    "same-data-everywhere": "The sampler gives each rank other records, and the printed losses differ for that reason alone.",
    "missed-synchronization": "There is no no_sync in the file; and not some steps go without an all-reduce, but all.",
    "different-settings": "Both ranks were given the same learning rate; compare what they sent each other in a step instead.",
}


def test_diagnosis(grader: Grader) -> None:
    """the diagnosis names the cause and the rank"""
    judge_diagnosis(grader, CASE, REFUTED)


def test_equal(grader: Grader) -> None:
    """the ranks train one model together"""
    for world_size in (CASE.ranks, 3):
        run = treat(grader, CASE, other_ticket(grader, CASE, world_size), world_size)
        reduced = steps(run)
        said = (
            f"After training, {{tensor}} of {{ranks}} differs from rank 0's: DDP averaged gradients {reduced[0]} times."
        )
        judge_equal(grader, run, said, FORWARD, id="still-broken")
        if not reduced[0]:
            grader.fail(
                "symptom-hidden",
                "The models are equal at the end, and yet no gradient was ever averaged by DDP: equal is not trained together.",
                at=r"broadcast || all_reduce || manual_seed || " + FORWARD,
            )


@pytest.mark.needs("test_equal")
def test_all_records(grader: Grader) -> None:
    """the ranks share the records between them"""
    run = treat(grader, CASE, other_ticket(grader, CASE, CASE.ranks))
    first = [set(seen[: len(seen) // 2]) for seen in samples(run)]
    common = first[0] & first[1]
    if common:
        grader.fail(
            "another-illness",
            f"Both ranks read {len(common)} of the 48 records in epoch 0: now they do the same work twice.",
            at=r"Sampler || DataLoader",
        )
