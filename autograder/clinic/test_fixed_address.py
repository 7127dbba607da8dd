"""Case `fixed_address`: the code overwrites the launcher's meeting place with one where nobody listens."""

from __future__ import annotations

import pytest
from clinic.case import cases, judge_diagnosis, judge_equal, other_ticket, timeouts, treat
from clinic.retrain import Job, sampled, start
from clinic.trained import judge_loss, judge_training

from lockstep.grading import Cause, Diagnosis, Grader, Run, cluster, names, sentence

CASE = cases()["fixed_address"]
WORLDS = (CASE.ranks, 2)
JOB = Job(start, 0.1, sampled(4))
ADDRESS = r"MASTER_(ADDR|PORT) || tcp:// || file:// || Store\( || init_process_group"
REFUTED = {
    "wrong-world-size": "Every rank asks for a group of as many as there are.",
    "network-fault": "All processes run on one machine, and the launcher's own address answers. They call somewhere else.",
    "collective-on-some-ranks": "All ranks reach init_process_group, and no collective has been called yet.",
    "failing-rank": "No rank has failed. All wait, in the same line.",
}


def read_failure(grader: Grader, run: Run, cause: Cause) -> Diagnosis | None:
    """Still waiting where nobody listens, or waiting shorter, or making the place oneself."""
    said = cause.error.message if cause.error else ""
    if "EADDRINUSE" in said:
        return grader.diagnosis(
            "symptom-hidden",
            f"{names(cause.ranks).capitalize()} tried to open its own store, and the port was taken: {cause.headline}",
            of=cause.ranks,
            at=ADDRESS,
        )
    waiting = [report.rank for report in run.ranks if report.stack and report.stack.call == "init_process_group"]
    gave_up = cause.kind == "raised" and any(word in said.lower() for word in ("timed out", "timeout", "connect"))
    if not waiting and not gave_up:
        return None
    longest = max(timeouts(run))
    id = "symptom-hidden" if longest else "still-broken"
    first = f"The timeout is now {longest:g} s, and the cause is still there. " if longest else ""
    method, told = run.observed("init_method")[0], run.observed("launchers_address")[0]
    if method and "://" in method and told not in method and not method.startswith("env://"):
        first += f"The ranks look for each other at {method}, and the launcher had said {told}. "
    return grader.diagnosis(id, first + sentence(cause.headline), of=cause.ranks, at=ADDRESS)


def test_diagnosis(grader: Grader) -> None:
    """the diagnosis names the cause and the rank"""
    judge_diagnosis(grader, CASE, REFUTED)


def test_it_starts(grader: Grader) -> None:
    """the job starts and ends, on 3 ranks and on 2"""
    for world_size in WORLDS:
        treat(grader, CASE, other_ticket(grader, CASE, world_size), world_size)


@pytest.mark.needs("test_it_starts")
def test_meeting_place(grader: Grader) -> None:
    """the ranks connect where their launcher says"""
    for world_size in WORLDS:
        _judge_meeting(grader, treat(grader, CASE, other_ticket(grader, CASE, world_size), world_size))
    ticket = other_ticket(grader, CASE, CASE.ranks)
    _judge_meeting(grader, treat(grader, CASE, ticket, network=cluster.loopback("localhost")))


def _judge_meeting(grader: Grader, run: Run) -> None:
    """All ranks in one group, and its store where the launcher has said."""
    told, met = run.observed("launchers_address"), run.observed("meeting")
    sizes = run.observed("group_size")
    apart = [rank for rank, size in enumerate(sizes) if size != run.world_size]
    if apart:
        first = apart[0]
        said = f"{names(apart).capitalize()} never met: rank {first} has made a group of {sizes[first]}, and the job has {run.world_size} ranks."
        grader.fail("symptom-hidden", said, of=apart, at=ADDRESS)
    elsewhere = [rank for rank, place in enumerate(met) if place != told[rank]]
    if not elsewhere:
        return
    first = elsewhere[0]
    said = f"{names(elsewhere).capitalize()} met at {met[first]}, and the launcher had said {told[first]}"
    if str(met[first]).rsplit(":", 1)[-1] == told[first].rsplit(":", 1)[-1]:
        said += ": the port is the launcher's, the address is still written into the code. A second machine would look for the job on itself."
        grader.fail("mended-halfway", said, of=elsewhere, at=r"localhost || 127\.0 || " + ADDRESS)
    said += ". It works once; a second job on this machine, or a second machine, meets the same place."
    grader.fail("symptom-hidden", said, of=elsewhere, at=ADDRESS)


@pytest.mark.needs("test_meeting_place")
def test_training(grader: Grader) -> None:
    """all ranks train one model, on the records of all"""
    for world_size in WORLDS:
        run = treat(grader, CASE, other_ticket(grader, CASE, world_size), world_size)
        said = "It ends, but {tensor} of {ranks} differs from rank 0's: every rank trains for itself."
        judge_equal(grader, run, said, r"DDP\( || init_process_group || def main")
        judge_training(grader, run, JOB)
        judge_loss(grader, run, JOB)
