"""Case `odd_shapes`: one rank's predictions are fewer, and all_gather wants equally many from every rank."""

from __future__ import annotations

import pytest
import torch
from clinic.case import cases, draw, judge_diagnosis, tickets, treat_further, treat_widely
from clinic.support import clinic_data

from lockstep.grading import Cause, Diagnosis, Grader, Run, names, sentence

CASE = cases()["odd_shapes"]
GATHER = r"all_gather || all_reduce || gather || def from_all_ranks || def main"
TIMES = 3
SIZES = r"\b20\b || \b13\b || " + GATHER
REFUTED = {
    "uneven-data": "There are no batches here, and every rank makes the same number of calls. Compare what they pass to them.",
    "failing-rank": "No rank had an error before the collective; the error is raised inside all_gather.",
    "network-fault": "The network delivered what was sent. The receiver had made room for something else.",
    "different-order": "All ranks make the same two calls in the same order. Compare the tensors.",
}


def read_failure(grader: Grader, run: Run, cause: Cause) -> Diagnosis | None:
    """Still different sizes: say which."""
    if cause.kind not in ("mismatch", "crashed"):
        return None
    return grader.diagnosis("still-broken", sentence(cause.headline), of=cause.ranks, at=GATHER)


def expected(guilty: int, world_size: int, times: int = 1) -> tuple[list[int], float]:
    """All classes in the order of the ranks, and the share that is right."""
    weights = (
        torch.linspace(-1, 1, clinic_data.FEATURES * clinic_data.CLASSES)
        .reshape(clinic_data.FEATURES, clinic_data.CLASSES)
        .sin()
    )
    parts = [clinic_data.Records(times * (13 if rank == guilty else 20), seed=rank) for rank in range(world_size)]
    found = torch.cat([(part.features @ weights).argmax(1) for part in parts])
    classes = torch.cat([part.classes for part in parts])
    return found.tolist(), (found == classes).float().mean().item()


def test_diagnosis(grader: Grader) -> None:
    """the diagnosis names the cause and the rank"""
    judge_diagnosis(grader, CASE, REFUTED)


def test_it_ends(grader: Grader) -> None:
    """the evaluation ends, whichever disk was full, and on 2 ranks too"""
    treat_widely(grader, CASE, 2)


@pytest.mark.needs("test_it_ends")
def test_all_records(grader: Grader) -> None:
    """every record is counted, once"""
    for number, (ticket, run) in enumerate(treat_widely(grader, CASE, 2)):
        world_size = run.world_size
        guilty = draw(ticket, CASE.name, world_size)
        when = (
            f"Under your ticket all is well; where rank {guilty} of {world_size} has the full disk it is not. "
            if number
            else ""
        )
        right, share = expected(guilty, world_size)
        for rank, result in enumerate(run.observed("result")):
            found = torch.as_tensor(result["found"]).flatten().tolist()
            if len(found) != len(right):
                what = "are counted no more" if len(found) < len(right) else "have been made up to fill the gap"
                grader.fail(
                    "mended-halfway" if number else "symptom-hidden",
                    f"{when}Rank {rank} has {len(found)} classes for the {len(right)} records of {world_size} ranks: "
                    f"{abs(len(found) - len(right))} {what}.",
                    of=[rank],
                    at=r"min || pad || zeros || full || \[: || " + GATHER,
                )
            if found != right:
                wrong = [place for place, (one, other) in enumerate(zip(found, right, strict=True)) if one != other]
                owner = names(
                    [rank for rank in range(world_size) if any(_owner(n, guilty, world_size) == rank for n in wrong)]
                )
                grader.fail(
                    "mended-halfway" if number else "another-illness",
                    f"{when}Rank {rank} has {len(right)} classes, as it should; {len(wrong)} of them, of {owner}, are not what that "
                    "rank has found.",
                    of=[rank],
                    at=GATHER,
                )
            if abs(float(result["share"]) - share) > 1e-6:
                grader.fail(
                    "another-illness",
                    f"The classes are right, and rank {rank} reports that {float(result['share']):.4f} of them are correct; it is {share:.4f}.",
                    of=[rank],
                    at=r"share = || mean",
                )


def _owner(number: int, guilty: int, world_size: int) -> int:
    """The rank whose record this is."""
    for rank in range(world_size):
        number -= 13 if rank == guilty else 20
        if number < 0:
            return rank
    return world_size - 1


@pytest.mark.needs("test_all_records")
def test_larger_parts(grader: Grader) -> None:
    """whatever the sizes of the parts are"""
    mine = tickets(grader, CASE)[0]
    told = f"With parts of {20 * TIMES} records, and of {13 * TIMES} on one rank, "
    run = treat_further(grader, CASE, mine, f"{told}it is still broken.", SIZES, times=TIMES)
    right, share = expected(draw(mine, CASE.name, CASE.ranks), CASE.ranks, TIMES)
    for rank, result in enumerate(run.observed("result")):
        found = torch.as_tensor(result["found"]).flatten().tolist()
        if found != right or abs(float(result["share"]) - share) > 1e-6:
            said = f"{told}rank {rank} has {len(found)} classes and the share {float(result['share']):.4f}; it is {len(right)} and {share:.4f}."
            grader.fail("mended-halfway", said, of=[rank], at=SIZES)
