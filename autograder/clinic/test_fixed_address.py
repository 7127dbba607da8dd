"""Case `fixed_address`: the code overwrites the launcher's meeting place with one where nobody listens."""

from __future__ import annotations

import pytest
from clinic.case import cases, judge_diagnosis, judge_equal, other_ticket, timeouts, treat

from lockstep.grading import Cause, Diagnosis, Grader, Run, names, sentence

CASE = cases()["fixed_address"]
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
    return grader.diagnosis(id, first + sentence(cause.headline), of=cause.ranks, at=ADDRESS)


def test_diagnosis(grader: Grader) -> None:
    """the diagnosis names the cause and the rank"""
    judge_diagnosis(grader, CASE, REFUTED)


def test_it_starts(grader: Grader) -> None:
    """the job starts and ends, on 3 ranks and on 2"""
    for world_size in (CASE.ranks, 2):
        treat(grader, CASE, other_ticket(grader, CASE, world_size), world_size)


@pytest.mark.needs("test_it_starts")
def test_meeting_place(grader: Grader) -> None:
    """the ranks connect where their launcher says"""
    for world_size in (CASE.ranks, 2):
        run = treat(grader, CASE, other_ticket(grader, CASE, world_size), world_size)
        told, met = run.observed("launchers_address"), run.observed("meeting")
        port = [place.rsplit(":", 1)[-1] for place in told]
        elsewhere = [rank for rank, place in enumerate(met) if place is None or place.rsplit(":", 1)[-1] != port[rank]]
        if elsewhere:
            first = elsewhere[0]
            grader.fail(
                "symptom-hidden",
                f"{names(elsewhere).capitalize()} met at {met[first]}, and the launcher had said {told[first]}. It works once; "
                "a second job on this machine, or a second machine, meets the same place.",
                of=elsewhere,
                at=ADDRESS,
            )


@pytest.mark.needs("test_it_starts")
def test_equal(grader: Grader) -> None:
    """all ranks train one model"""
    run = treat(grader, CASE, other_ticket(grader, CASE, CASE.ranks))
    said = "It ends, but {tensor} of {ranks} differs from rank 0's: every rank trains for itself."
    judge_equal(grader, run, said, r"DDP\( || init_process_group || def main")
