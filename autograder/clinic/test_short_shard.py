"""Case `short_shard`: one rank has fewer batches than the others, so it leaves the loop while they wait in backward."""

from __future__ import annotations

import pytest
from clinic.case import DATA, cases, judge_diagnosis, judge_equal, samples, steps, timeouts, treat_widely
from clinic.retrain import VALUES, averaged

from lockstep.grading import Cause, Diagnosis, Grader, Run, names

CASE = cases()["short_shard"]
STEPS = r"for .* in .*loader || while || def main"
LABELLED = 32 * CASE.ranks - 8
BATCH = 4
REFUTED = {
    "slow-rank": "No rank is slow: the rank that the others wait for has left the loop and waits in the barrier.",
    "collective-on-some-ranks": "Every rank reaches every line of the loop; count how often.",
    "network-fault": "Every connection is alive; a rank that waits says in which call.",
}


def read_failure(grader: Grader, run: Run, cause: Cause) -> Diagnosis | None:
    """Still hanging: say by how many steps the ranks differ, and what was done about it instead."""
    if cause.kind not in ("hang", "mismatch", "crashed", "raised"):
        return None
    took = steps(run)
    if len(set(took)) == 1:
        return None
    fewest = [rank for rank, count in enumerate(took) if count == min(took)]
    counted = f"{names(fewest).capitalize()} left the loop after {min(took)} steps, and {names(_rest(fewest, took))} started step {max(took)}"
    longer = max(timeouts(run))
    if longer:
        return grader.diagnosis(
            "symptom-hidden",
            f"The timeout is now {longer:g} s, and the cause is still there. {counted}.",
            of=fewest,
            at=r"timeout || " + STEPS,
        )
    return grader.diagnosis("still-broken", f"{counted}: {cause.headline}", of=fewest, at=STEPS)


def _rest(fewest: list[int], took: list[int]) -> list[int]:
    return [rank for rank in range(len(took)) if rank not in fewest]


def test_diagnosis(grader: Grader) -> None:
    """the diagnosis names the cause and the rank"""
    judge_diagnosis(grader, CASE, REFUTED)


def test_it_ends(grader: Grader) -> None:
    """the job ends, whichever labeler went home early"""
    treat_widely(grader, CASE)


@pytest.mark.needs("test_it_ends")
def test_all_records(grader: Grader) -> None:
    """every labeled record is still trained on"""
    run = treat_widely(grader, CASE)[1][1]
    of_ranks = samples(run)
    read = {sample for seen in of_ranks for sample in seen}
    # Features that are cut as a tensor are read unseen; so many steps together don't come from fewer batches.
    unseen = not read and min(averaged(run, VALUES)) >= LABELLED // CASE.ranks // BATCH
    if len(read) < LABELLED and not unseen:
        grader.fail(
            "symptom-hidden",
            f"It ends because {LABELLED - len(read)} of {LABELLED} labeled records are trained on no more. "
            "The labeler's early evening costs the other ranks their data.",
            at=r"islice || \bmin\(|MIN || break || Subset\( || drop_last || " + DATA,
        )
    if len(read) > LABELLED:
        said = f"It ends because {len(read) - LABELLED} records were added that no labeler has seen: the model learns what was made up."
        grader.fail("another-illness", said, at=r"Records\( || ConcatDataset || randn || " + DATA)
    times = sum(map(len, of_ranks)) / LABELLED
    if times > 1.5:
        said = f"It ends, and the {CASE.ranks} ranks read each record {times:.1f} times in one epoch: they no longer share the work."
        grader.fail("another-illness", said, at=r"ConcatDataset || sampler || " + DATA)


@pytest.mark.needs("test_it_ends")
def test_equal(grader: Grader) -> None:
    """all ranks end with the same model"""
    run = treat_widely(grader, CASE)[1][1]
    said = "It ends, but {tensor} of {ranks} is no longer that of rank 0: steps are missing from the average."
    judge_equal(grader, run, said, r"no_sync || \.module\( || " + STEPS)
    together = averaged(run, VALUES)
    for rank, returned in enumerate(run.observed("result")):
        taken = (returned or {}).get("steps")
        copied = sum(call.kind == "broadcast" and call.inside != "DDP()" for call in run.collectives[rank])
        if copied and isinstance(taken, int) and together[rank] < taken:
            grader.fail(
                "another-illness",
                f"The models are equal because one rank's was copied to the others: rank {rank} took {taken} steps, and gradients were "
                f"averaged in {together[rank]:g} of them. What the other ranks learned in the rest is overwritten.",
                of=[rank],
                at=r"broadcast || " + STEPS,
            )
