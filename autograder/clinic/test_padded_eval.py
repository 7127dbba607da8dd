"""Case `padded_eval`: DistributedSampler repeats records to give all ranks equally many, and the evaluation counts them."""

from __future__ import annotations

from typing import Any

import pytest
from clinic.case import cases, digests, judge_diagnosis, other_ticket, samples, treat
from clinic.retrain import start
from clinic.support import clinic_data

from lockstep.grading import Cause, Diagnosis, Grader, Run, names

CASE = cases()["padded_eval"]
WORLDS = (CASE.ranks, 4)
RECORDS, TEST_SEED = 49, 20
EXACT = 1e-9
SHARING = r"Sampler\( || Subset\( || range\( || drop_last || counts \+= || counts"
REFUTED = {
    "metric-of-one-rank": "The counts of all ranks are added before the division: three numbers go in, one comes out.",
    "mean-of-means": "Counts are added and divided once; no average of averages is taken.",
    "same-data-everywhere": "The sampler gives each rank a different part, nearly.",
    "uneven-data": "Every rank has the same number of records: 49 on 3 ranks. Think about that.",
}


def read_failure(grader: Grader, run: Run, cause: Cause) -> Diagnosis | None:
    """Parts of unequal length, with a collective in the loop."""
    if cause.kind != "hang":
        return None
    return grader.diagnosis(
        "another-illness",
        f"The parts differ in length now, and with them the number of collectives: {cause.headline}",
        of=cause.ranks,
        at=r"all_reduce || for ",
    )


def test_diagnosis(grader: Grader) -> None:
    """the diagnosis names the cause and the rank"""
    judge_diagnosis(grader, CASE, REFUTED)


def test_counts(grader: Grader) -> None:
    """every record counts once, on any number of ranks"""
    for world_size in WORLDS:
        run = treat(grader, CASE, other_ticket(grader, CASE, world_size), world_size)
        returned: list[dict[str, Any]] = [one or {} for one in run.observed("result")]
        right = _right(run)
        for rank, told in enumerate(returned):
            accuracy, seen = told.get("accuracy"), told.get("records")
            if rank and accuracy is None:
                continue
            if not isinstance(accuracy, (int, float)) or not isinstance(seen, (int, float)):
                grader.fail(
                    "another-illness",
                    f'Rank {rank} returned {accuracy!r} as "accuracy" and {seen!r} as "records".',
                    of=[rank],
                    at=r"return",
                )
            if seen == RECORDS and abs(accuracy - right / RECORDS) < EXACT:
                continue
            what = f"On {world_size} ranks it counts {seen:g} records and says {accuracy:.6f}"
            truth = f"the test set has {RECORDS}, of which the model gets {right} right: {right / RECORDS:.6f}"
            if seen < RECORDS:
                grader.fail("symptom-hidden", f"{what}; {truth}. {RECORDS - seen:g} are left out.", at=SHARING)
            if seen == RECORDS:
                grader.fail(
                    "symptom-hidden",
                    f"{what}; {truth}. The number of records is right now, and the repeated ones still count as answers.",
                    at=r"len\(test\) || accuracy || " + SHARING,
                )
            grader.fail(
                "still-broken" if world_size == CASE.ranks else "mended-halfway",
                f"{what}; {truth}. {seen - RECORDS:g} are counted twice.",
                at=SHARING,
            )
        _judge_coverage(grader, run)


def _judge_coverage(grader: Grader, run: Run) -> None:
    """Right numbers may come from 49 records of which one is another, where the model is as right about both."""
    read = [index for seen in samples(run) for seed, index in seen if seed == TEST_SEED]
    missing = sorted({*range(RECORDS)} - {*read})
    if read and missing:
        twice = sorted(index for index in {*read} if read.count(index) > 1)
        grader.fail(
            "symptom-hidden",
            f"On {run.world_size} ranks no rank reads record {missing[0]}, and record {twice[0] if twice else read[0]} is read "
            f"{read.count(twice[0]) if twice else 1} times; {len(missing)} of {RECORDS} records are left out.",
            at=SHARING,
        )


def _right(run: Run) -> int:
    """How many records of the test set the returned model gets right."""
    model, state = start(), digests(run)[0]
    if state.keys() != model.state_dict().keys():
        return 0
    model.load_state_dict(state)
    test = clinic_data.Records(RECORDS, seed=TEST_SEED)
    return int((model(test.features).argmax(1) == test.classes).sum())


@pytest.mark.needs("test_counts")
def test_shared(grader: Grader) -> None:
    """the ranks still share the work"""
    run = treat(grader, CASE, other_ticket(grader, CASE, CASE.ranks), CASE.ranks)
    read = [len(seen) for seen in samples(run)]
    whole = [rank for rank, count in enumerate(read) if count >= RECORDS]
    if whole:
        grader.fail(
            "another-illness",
            f"{names(whole).capitalize()} read all {RECORDS} records: the number is right, and {CASE.ranks} ranks take as long as one.",
            of=whole,
            at=r"rank == 0 || DataLoader\(",
        )
