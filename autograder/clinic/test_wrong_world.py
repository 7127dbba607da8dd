"""Case `wrong_world`: one host's settings count a machine too many, so its rank waits for one that never comes."""

from __future__ import annotations

import pytest
from clinic.case import (
    DATA,
    cases,
    judge_diagnosis,
    judge_equal,
    samples,
    timeouts,
    treat_widely,
)
from clinic.retrain import Job, as_read, read, start
from clinic.trained import judge_shares, judge_training

from lockstep.grading import Cause, Diagnosis, Grader, Run, names, sentence

CASE = cases()["wrong_world"]
RECORDS, BATCH = 48, 4
SIZE = r"world_size = || world_size=\d || machines || init_process_group"
REFUTED = {
    "hard-coded-address": "Nothing in the file says where to meet: that comes from the launcher, and all ranks find it.",
    "different-settings": "True as far as it goes. Which setting, and what does init_process_group do with it?",
    "failing-rank": "No rank has failed. All live, and wait.",
    "collective-on-some-ranks": "Every rank reaches every line. Some wait in init_process_group, the others in the first collective after it.",
    "slow-rank": "No rank is slow: one waits for a rank that does not exist.",
}


def read_failure(grader: Grader, run: Run, cause: Cause) -> Diagnosis | None:
    """Still no group: who was told what."""
    headline = sentence(cause.headline)
    waiting = [report for report in run.ranks if report.stack and report.stack.call == "init_process_group"]
    told = {report.rank: report.stack.detail.get("world_size") for report in waiting if report.stack}
    odd = {rank: size for rank, size in told.items() if isinstance(size, int) and 0 < size != run.world_size}
    if odd:
        groups = [(names([rank for rank in odd if odd[rank] == size]), size) for size in sorted({*odd.values()})]
        asked = " and ".join(f"{who} for a group of {size}" for who, size in groups)
        headline = f"Of {run.world_size} ranks {asked.replace(' for ', ' asked for ', 1)}, which is never complete."
    elif cause.kind not in ("hang", "raised", "timed out", "exited"):
        return None
    longest = max(timeouts(run))
    if longest:
        headline = f"The timeout is now {longest:g} s, and the cause is still there. {headline}"
    elif cause.kind == "raised" and cause.error and "out" not in cause.error.message.lower():
        return None
    return grader.diagnosis(
        "symptom-hidden" if longest else "still-broken",
        headline,
        of=odd or cause.ranks,
        at=r"timeout || " + SIZE if longest else SIZE,
    )


def test_diagnosis(grader: Grader) -> None:
    """the diagnosis names the cause and the rank"""
    judge_diagnosis(grader, CASE, REFUTED)


def _runs(grader: Grader) -> list[tuple[int, Run]]:
    return treat_widely(grader, CASE, 3, zero_says={"machines": CASE.ranks - 1})


def test_it_ends(grader: Grader) -> None:
    """the job starts and ends, whatever one host's settings say, and on 3 ranks too"""
    _runs(grader)


@pytest.mark.needs("test_it_ends")
def test_all_records(grader: Grader) -> None:
    """the ranks share the records between them"""
    for _, run in _runs(grader):
        size = run.world_size
        parts = [[index for _, index in part] for part in samples(run)]
        cut = RECORDS - len({index for part in parts for index in part})
        if cut and len({tuple(part) for part in parts}) == size:
            said = f"{size} ranks trained on {RECORDS - cut} of the {RECORDS} records: {cut} were cut for ranks that do not exist."
            grader.fail("symptom-hidden", said, at=r"num_replicas || " + DATA)
        if any(map(len, parts)) and len({tuple(part) for part in parts}) < size:
            said = f"{size} ranks trained on {RECORDS - cut} of the {RECORDS} records, two of them on the same {len(parts[0])}: they do not share them."
            grader.fail("same-shard", said, at=r"rank= || " + DATA)
        judge_shares(grader, run, RECORDS)
        for rank, (result, part) in enumerate(zip(run.observed("result"), read(run, RECORDS), strict=True)):
            right = -(-len(part) // BATCH)
            if result["steps"] != right:
                said = f"Rank {rank} of {size} returns {result['steps']} steps; its {len(part)} records are {right} batches of {BATCH}."
                grader.fail("another-illness", said, of=[rank], at=r"steps \+?= || return")


@pytest.mark.needs("test_it_ends")
def test_equal(grader: Grader) -> None:
    """all ranks end with the same model"""
    run = _runs(grader)[0][1]
    said = "It ends, but {tensor} of {ranks} differs from rank 0's: they do not train together."
    judge_equal(grader, run, said, r"except || init_process_group || DDP\(")
    judge_training(grader, run, Job(start, 0.1, as_read(run, BATCH)), untrained="untrained-weights-returned")
