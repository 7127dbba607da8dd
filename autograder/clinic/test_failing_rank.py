"""Case `failing_rank`: a decimal comma in one rank's part raises there; the others only lose their connection to it."""

from __future__ import annotations

import pytest
import torch
from clinic.case import cases, judge_diagnosis, judge_equal, other_ticket, steps, treat, treat_widely, unequal
from clinic.retrain import Batch, Job, start
from clinic.support import clinic_data
from clinic.trained import judge_training

from lockstep.grading import Cause, Diagnosis, Grader, Hypothesis, Run, names, sentence

CASE = cases()["failing_rank"]
COUNT, BATCH, RATE, MORE = 48, 4, 0.5, 5
READING = r"float\( || split\( || __getitem__"
SWALLOWED = r"except || suppress || continue || isdigit || re\. || " + READING
REFUTED = {
    "network-fault": "The connections were closed by the other end, whose process had died by then. Read its log, not theirs.",
    "uneven-data": "Each rank has 12 measurements, 3 batches. One of them does not get through its second.",
    "slow-rank": "No rank waits for long: the connections break as soon as one process has died. Which died first, of what?",
    "different-shapes": "No rank was killed by SIGABRT, and all bring the same gradients. One stops before it brings its second.",
}


def read_failure(grader: Grader, run: Run, cause: Cause) -> Diagnosis | None:
    """The same error still, or a rank that now leaves out a batch."""
    if cause.kind == "raised" and cause.error and cause.error.type == "ValueError":
        return grader.diagnosis("still-broken", sentence(cause.headline), of=cause.ranks, at=READING)
    took = steps(run)
    if len(set(took)) == 1:
        return None
    fewest = [rank for rank, count in enumerate(took) if count == min(took)]
    return grader.diagnosis(
        "symptom-hidden",
        f"{names(fewest).capitalize()} took {min(took)} steps of backward where others started {max(took)}: what raised before is "
        "left out now, and the steps of the ranks no longer fit.",
        of=fewest,
        at=SWALLOWED,
    )


def _shares(world_size: int) -> list[list[Batch]]:
    """Of all measurements, as they are in the file."""
    records = clinic_data.Records(COUNT)
    features = torch.tensor([[float(f"{value:.3f}") for value in row] for row in records.features.tolist()])
    mine = [torch.arange(rank, COUNT, world_size).split(BATCH) for rank in range(world_size)]
    return [[(features[numbers], records.classes[numbers]) for numbers in part] for part in mine]


JOB = Job(start, RATE, _shares)


def test_diagnosis(grader: Grader) -> None:
    """the diagnosis names the cause and the rank"""
    judge_diagnosis(grader, CASE, REFUTED)


def test_it_ends(grader: Grader) -> None:
    """the job ends, whichever rank has the odd line, and on 2 ranks too"""
    treat_widely(grader, CASE, 2)
    treat(grader, CASE, other_ticket(grader, CASE, MORE), MORE)


@pytest.mark.needs("test_it_ends")
def test_all_measurements(grader: Grader) -> None:
    """it trains on all 48 measurements, as they are in the file"""
    for world_size in (CASE.ranks, 2, MORE):
        run = treat(grader, CASE, other_ticket(grader, CASE, world_size), world_size)
        used = [int(result["used"]) for result in run.observed("result")]
        if sum(used) < COUNT:
            fewest = [rank for rank, count in enumerate(used) if count == min(used)]
            grader.fail(
                "symptom-hidden",
                f"It ends because {COUNT - sum(used)} of {COUNT} measurements are left out: {names(fewest)} used {min(used)}.",
                of=fewest,
                at=SWALLOWED,
            )
        for rank, count in enumerate(used):
            if count != len(range(rank, COUNT, world_size)):
                said = f"Rank {rank} of {world_size} returns {count} measurements; its share is {len(range(rank, COUNT, world_size))}."
                grader.fail("another-illness", said, of=[rank], at=r"used \+?= || return")
        if unequal(run):
            return
        said = f"Training on the {COUNT} measurements in the file gives a different model: one was read as something else, or has another in its place."
        judge_training(grader, run, JOB, at=SWALLOWED, otherwise=Hypothesis("symptom-hidden", said, None))


@pytest.mark.needs("test_it_ends")
def test_equal(grader: Grader) -> None:
    """all ranks end with the same model"""
    run = treat(grader, CASE, other_ticket(grader, CASE, 2), 2)
    said = "It ends, but {tensor} of {ranks} differs from rank 0's: steps are missing from the average."
    judge_equal(grader, run, said, r"no_sync || \.module\( || DDP\( || for .* in ")
