"""Case `same_data`: the sampler is built before the process group, takes itself for the only one, and gives all to everybody."""

from __future__ import annotations

import pytest
from clinic.case import cases, judge_diagnosis, judge_equal, other_ticket, samples, treat

from lockstep.grading import Cause, Diagnosis, Grader, Run, names

CASE = cases()["same_data"]
OTHER_WORLD = 3
RECORDS, EPOCHS = 48, 2
DATA = r"Sampler\( || DataLoader\("
REFUTED = {
    "wrapper-bypassed": "DDP averages the gradients in every step; the ranks have nothing different to bring.",
    "same-randomness": "The only random thing is the shuffling, and all ranks have to shuffle in the same way, to take different parts of one order.",
    "stale-shuffle": "set_epoch is called, and epoch 1 has a different order from epoch 0: on every rank the same one.",
    "slow-rank": "No rank waits for another. Count the steps of an epoch, and multiply by the batch.",
}


def read_failure(grader: Grader, run: Run, cause: Cause) -> Diagnosis | None:
    """A mend that knows how many ranks there were."""
    if run.world_size == CASE.ranks or cause.kind not in ("raised", "hang"):
        return None
    return grader.diagnosis(
        "mended-halfway",
        f"With {run.world_size} ranks instead of {CASE.ranks}: {cause.headline}",
        of=cause.ranks,
        at=r"num_replicas= || " + DATA,
    )


def test_diagnosis(grader: Grader) -> None:
    """the diagnosis names the cause and the rank"""
    judge_diagnosis(grader, CASE, REFUTED)


def test_parts(grader: Grader) -> None:
    """the ranks share the records between them"""
    for world_size in (CASE.ranks, OTHER_WORLD):
        run = treat(grader, CASE, other_ticket(grader, CASE, world_size), world_size)
        first = [[index for _, index in seen[: len(seen) // EPOCHS]] for seen in samples(run)]
        read = set().union(*map(set, first))
        twice = sum(len(set(seen)) for seen in first) - len(read)
        if world_size != CASE.ranks and (twice or len(read) < RECORDS):
            grader.fail(
                "mended-halfway",
                f"With {world_size} ranks instead of {CASE.ranks}, {twice} records of epoch 0 are read more than once and "
                f"{RECORDS - len(read)} by no rank.",
                at=r"num_replicas= || " + DATA,
            )
        if len(read) < RECORDS:
            grader.fail(
                "symptom-hidden",
                f"The epoch is shorter because {RECORDS - len(read)} of {RECORDS} records are read by no rank.",
                at=r"islice || break || Subset || " + DATA,
            )
        same = [rank for rank, seen in enumerate(first) if seen == first[0]]
        if len(same) > 1:
            grader.fail(
                "still-broken",
                f"{names(same).capitalize()} read the same {len(first[0])} of {RECORDS} records in epoch 0, in the same order: "
                f"{', '.join(map(str, first[0][:4]))}, …",
                of=same,
                at=DATA,
            )
        if twice:
            grader.fail(
                "symptom-hidden",
                f"{names(range(world_size)).capitalize()} read {len(first[0])} records each in epoch 0, {twice} of them more than once: "
                "their batches differ now, and the work is still done twice.",
                at=r"generator || shuffle || seed || " + DATA,
            )


@pytest.mark.needs("test_parts")
def test_equal(grader: Grader) -> None:
    """all ranks end with the same model, and every epoch has a new order"""
    run = treat(grader, CASE, other_ticket(grader, CASE, CASE.ranks), CASE.ranks)
    judge_equal(grader, run, at=r"DDP\(")
    seen = samples(run)[0]
    half = len(seen) // EPOCHS
    if seen[:half] == seen[half:]:
        grader.fail(
            "another-illness",
            f"Rank 0 reads its {half} records in the same order in both epochs now.",
            at=r"set_epoch || " + DATA,
        )
