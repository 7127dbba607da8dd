"""Case `nan_batch`: one rank leaves out a batch alone, so its later gradients meet those of the others' batch before."""

from __future__ import annotations

import pytest
import torch
from clinic.case import (
    TRAINING,
    cases,
    digests,
    draw,
    judge_diagnosis,
    judge_equal,
    steps,
    tickets,
    treat_widely,
    unmended,
)
from clinic.retrain import CLOSE, VALUES, apart, averaged, cut, start
from clinic.support import clinic_data

from lockstep.grading import Cause, Diagnosis, Grader, Run, names

CASE = cases()["nan_batch"]
BATCHES = 8
SKIP = r"continue || isfinite|isnan || .backward\( || def main"
FEWEST = BATCHES - 1
NOT_MEASURED = {
    "zeros": "Rank {rank} trains on a record that was never measured: {count} values that are not numbers in batch {batch} are zeros now, "
    "with the class of the record that failed.",
    "before": "Rank {rank} trains on batch {before} twice: it stands for batch {batch} too, whose sensor failed.",
}
REFUTED = {
    "uneven-data": "Every rank has 32 records and 8 batches; count the steps that each takes instead, which the job prints.",
    "network-fault": "Every connection is alive; a rank that waits says in which call.",
    "slow-rank": "No rank is slow: the rank that the others wait for has finished its epoch and waits in the barrier.",
    "own-decision": "You are near: a rank does decide alone. But no rank stops or takes a different branch for good; ask what is left out once.",
}


def read_failure(grader: Grader, run: Run, cause: Cause) -> Diagnosis | None:
    """Still waiting at the end: by how many gradients the ranks differ."""
    took = steps(run)
    if len(set(took)) == 1:
        return None
    fewest = [rank for rank, count in enumerate(took) if count == min(took)]
    most = [rank for rank, count in enumerate(took) if count == max(took)]
    seen = (
        f"{names(fewest).capitalize()} brought gradients of {min(took)} batches, {names(most)} started on number {max(took)}: "
        "from the first batch that was left out, the average was one of different batches."
    )
    return unmended(grader, run, seen, SKIP, fewest)


def _other_record(grader: Grader, mine: int) -> int:
    """A ticket under which another rank is guilty, and the bad record lies in another batch."""
    numbers = grader.random("nan_batch/other")
    while True:
        ticket = numbers.randrange(1_000_000)
        rank, batch = (draw(ticket, name, count) for name, count in ((CASE.name, CASE.ranks), ("nan_batch: when", 24)))
        if rank != draw(mine, CASE.name, CASE.ranks) and batch // 4 != draw(mine, "nan_batch: when", 24) // 4:
            return ticket


def test_diagnosis(grader: Grader) -> None:
    """the diagnosis names the cause and the rank"""
    judge_diagnosis(grader, CASE, REFUTED)


def test_it_ends(grader: Grader) -> None:
    """the job ends, whichever sensor failed and when"""
    (_, mine), (_, other) = treat_widely(grader, CASE, choose=_other_record)
    bad = _not_numbers(mine)
    if bad:
        grader.fail(
            "another-illness", f"It ends, and {bad}: the gradient of one batch has got into every weight.", at=SKIP
        )
    bad = _not_numbers(other)
    if bad:
        grader.fail(
            "mended-halfway",
            f"It is fixed for your ticket's batch. If the sensor fails at a different moment, {bad}.",
            at=SKIP,
        )


def _not_numbers(run: Run) -> str:
    """Which weights are NaN or infinite, in words; empty when none is."""
    for rank, state in enumerate(digests(run)):
        for tensor, value in state.items():
            bad = int((~torch.isfinite(value)).sum())
            if bad:
                return f"{bad} of {value.numel()} values of {tensor} on rank {rank} are not numbers"
    return ""


@pytest.mark.needs("test_it_ends")
def test_whole_epoch(grader: Grader) -> None:
    """the ranks train to the end of the epoch, and stay equal"""
    run = treat_widely(grader, CASE, choose=_other_record)[1][1]
    # A communication hook may reduce outside of the backward pass.
    took = list(map(max, steps(run), map(int, averaged(run, VALUES))))
    if min(took) < FEWEST:
        few = took.index(min(took))
        grader.fail(
            "symptom-hidden",
            f"It ends because rank {few} brings gradients of only {min(took)} of {BATCHES} batches; "
            f"one batch cannot be used, the {FEWEST} others can.",
            of=[few],
            at=r"break || islice || return || " + SKIP,
        )
    said = "It ends, but {tensor} of {ranks} is no longer that of rank 0: a step was not taken by all."
    judge_equal(grader, run, said, r"\.step\( || no_sync || " + TRAINING)
    _judge_records(grader, run)


def _judge_records(grader: Grader, run: Run) -> None:
    """What stands in for the batch that can't be used, where it is nothing that was measured on it."""
    ticket = tickets(grader, CASE, _other_record)[1]
    rank, bad = (draw(ticket, name, count) for name, count in ((CASE.name, CASE.ranks), ("nan_batch: when", 24)))
    batch = (4 + bad) // 4
    for mistake, said in NOT_MEASURED.items():
        if apart(digests(run)[0], _trained(rank, 4 + bad, mistake)) <= CLOSE:
            grader.fail(
                "another-illness",
                said.format(rank=rank, batch=batch, before=batch - 1, count=clinic_data.FEATURES),
                of=[rank],
                at=r"nan_to_num|where\( || before || " + SKIP,
            )


def _trained(odd: int, bad: int, mistake: str) -> dict[str, torch.Tensor]:
    """The model after the epoch, on one process, where this stands in for record `bad` of rank `odd`."""
    model, batches = start(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for rank in range(CASE.ranks):
        records = clinic_data.Records(BATCHES * 4, seed=rank)
        if rank == odd and mistake == "zeros":
            records.features[bad] = 0
        parts = [*zip(cut(records.features, 4), cut(records.classes, 4), strict=True)]
        if rank == odd and mistake == "before":
            parts[bad // 4] = parts[bad // 4 - 1]
        batches.append(parts)
    for together in zip(*batches, strict=True):
        optimizer.zero_grad()
        for features, classes in together:
            (torch.nn.functional.cross_entropy(model(features), classes) / CASE.ranks).backward()
        optimizer.step()
    return model.state_dict()
