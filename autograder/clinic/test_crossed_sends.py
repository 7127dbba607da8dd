"""Case `crossed_sends`: neighbors take turns, and one host's settings give it the turn of its neighbors."""

from __future__ import annotations

from itertools import pairwise

import pytest
from clinic.case import cases, judge_diagnosis, treat, treat_widely, unmended

from lockstep.grading import Cause, Diagnosis, Grader, Run, sentence

CASE = cases()["crossed_sends"]
EXCHANGE = r"if \w*first || dist\.send\( || dist\.recv\( || isend || def exchange || def main"
LENGTH, STEPS, MORE = 6, 5, 6
REFUTED = {
    "different-settings": "The settings do differ, and have to: one of two neighbors speaks first. Ask what two neighbors wait in.",
    "collective-on-some-ranks": "There is no collective before the barrier: sends and receives are between two ranks.",
    "network-fault": "Every connection is alive; a rank that waits says in which call.",
    "failing-rank": "No rank fails: all wait.",
}


def read_failure(grader: Grader, run: Run, cause: Cause) -> Diagnosis | None:
    """Still waiting: two neighbors in the same call."""
    if cause.kind not in ("hang", "mismatch", "exited"):
        return None
    last = [report.last_collective for report in run.ranks]
    for rank, (one, next_one) in enumerate(pairwise(last)):
        if one is None or next_one is None or not one.is_point_to_point or one.kind != next_one.kind:
            continue
        if one.peer == rank + 1 and next_one.peer == rank:
            verb = "send to" if one.kind == "send" else "receive from"
            seen = f"Ranks {rank} and {rank + 1} both wait to {verb} each other: {cause.headline}"
            return unmended(grader, run, seen, EXCHANGE, [rank, rank + 1])
    return unmended(grader, run, sentence(cause.headline), EXCHANGE, cause.ranks)


def test_diagnosis(grader: Grader) -> None:
    """the diagnosis names the cause and the rank"""
    judge_diagnosis(grader, CASE, REFUTED)


def test_it_ends(grader: Grader) -> None:
    """the job ends, whichever host was replaced"""
    treat_widely(grader, CASE, MORE)


@pytest.mark.needs("test_it_ends")
def test_rod(grader: Grader) -> None:
    """the rod has the temperatures that one process computes"""
    runs = [*(run for _, run in treat_widely(grader, CASE, MORE)), treat(grader, CASE, 1, 3)]
    for run in runs:
        _rod(grader, run)
    for run in runs:
        for rank, number in enumerate(run.observed("never_waited")):
            what = f"Rank {rank} of {run.world_size} started {number} sends and receives that it never waited for."
            grader.fail_on([rank] * (number > 0), "message-never-waited-for", what, at=r"isend || irecv || " + EXCHANGE)


def _rod(grader: Grader, run: Run) -> None:
    import torch

    world_size = run.world_size
    expected = _spread(world_size, joined=True)
    apart = _spread(world_size, joined=False)
    for rank, result in enumerate(run.observed("result")):
        piece = (result or {}).get("piece")
        right = expected[rank * LENGTH : (rank + 1) * LENGTH]
        if isinstance(piece, torch.Tensor) and piece.shape == right.shape and torch.allclose(piece, right, atol=1e-5):
            continue
        if not isinstance(piece, torch.Tensor) or piece.shape != right.shape:
            grader.fail(
                "another-illness",
                f"Rank {rank} returned no piece of {LENGTH} temperatures.",
                of=[rank],
                at=r"return || def main",
            )
        alone = apart[rank * LENGTH : (rank + 1) * LENGTH]
        how = "as if it had no neighbors" if torch.allclose(piece, alone, atol=1e-5) else "not what the whole rod gives"
        off = (piece - right).abs()
        cell = int(off.argmax())
        grader.fail(
            "symptom-hidden",
            f"It ends, and on rank {rank} of {world_size} the temperature of cell {cell} is {piece[cell]:.3f} instead of "
            f"{right[cell]:.3f}: {how}. An edge was not exchanged, or not in its step.",
            of=[rank],
            at=EXCHANGE,
        )


def _spread(world_size: int, joined: bool):  # type: ignore[no-untyped-def]
    """The whole rod after all steps, as one piece; or as pieces that know nothing of each other."""
    import torch

    pieces = [torch.randn(LENGTH, generator=torch.Generator().manual_seed(rank)) for rank in range(world_size)]
    rods = [torch.cat(pieces)] if joined else pieces
    for _ in range(STEPS):
        padded = [torch.cat([rod[:1], rod, rod[-1:]]) for rod in rods]
        rods = [(one[:-2] + one[1:-1] + one[2:]) / 3 for one in padded]
    return torch.cat(rods)
