"""Case `early_reader`: one host gathers what is written, so its rank passes the barrier before its file is on the disk."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from clinic.case import (
    cases,
    judge_diagnosis,
    judge_equal,
    judge_sets,
    treat_further,
    treat_widely,
    zero_is_odd,
)
from clinic.retrain import Batch, Job
from clinic.trained import judge_training

from lockstep.grading import Cause, Diagnosis, Grader, Run, names, sentence

CASE = cases()["early_reader"]
WRITING = r"\.write\( || dump\( || barrier || read"
READING = r"except || suppress || exists || if not text || sleep || read_text || read\("
REFUTED = {
    "failing-rank": "All ranks fail, and all over the file of one. That one does not fail by itself: it fails when it reads, like the rest.",
    "network-fault": "No connection was lost. The error is a ValueError, raised by the file's own check.",
    "collective-on-some-ranks": "All ranks call the barrier, and all leave it.",
    "slow-rank": "Time does not help: however long the readers wait after the barrier, the file stays empty.",
    "different-settings": "The setting may differ between hosts; what must hold on each is that a file is written before others read it.",
}


def read_failure(grader: Grader, run: Run, cause: Cause) -> Diagnosis | None:
    """The same error still."""
    if cause.kind != "raised" or cause.error is None:
        return None
    if cause.error.type not in ("ValueError", "JSONDecodeError", "FileNotFoundError"):
        return None
    if any(run.observed("writes_out")):
        said = f"{sentence(cause.headline)}. The words were on their way to a slow disk; no barrier comes after they are written and before they are read."
        return grader.diagnosis("symptom-hidden", said, of=cause.ranks, at=WRITING)
    return grader.diagnosis("still-broken", sentence(cause.headline), of=cause.ranks, at=WRITING)


def words(world_size: int) -> dict[str, int]:
    """The vocabulary: each word, and the last rank whose texts hold it."""
    return {f"word{number}": rank for rank in range(world_size) for number in range(5 * rank, 5 * rank + 8)}


def test_diagnosis(grader: Grader) -> None:
    """the diagnosis names the cause and the rank"""
    judge_diagnosis(grader, CASE, REFUTED)


def test_it_ends(grader: Grader) -> None:
    """the job ends, whichever host gathers what is written, and on 3 ranks too"""
    _runs(grader)


def _runs(grader: Grader) -> list[tuple[int, Run]]:
    return treat_widely(grader, CASE, 3, slow_disk=True)


@pytest.mark.needs("test_it_ends")
def test_vocabulary(grader: Grader) -> None:
    """every rank has the words of all ranks"""
    for _, run in _runs(grader):
        right = words(run.world_size)
        for rank, result in enumerate(run.observed("result")):
            found = set(result["vocabulary"])
            missing = [word for word in right if word not in found]
            if missing:
                owners = sorted({right[word] for word in missing})
                grader.fail(
                    "symptom-hidden",
                    f"Rank {rank} has {len(found)} of {len(right)} words. {missing[0]} and others are missing, from the texts of {names(owners)}: "
                    "its notes were not read.",
                    of=[rank],
                    at=READING,
                )
            if len(found) != len(right) or len(result["vocabulary"]) != len(right):
                grader.fail(
                    "another-illness",
                    f"Rank {rank} has {len(result['vocabulary'])} words, and all texts together hold {len(right)} different ones.",
                    of=[rank],
                    at=r"vocabulary =",
                )
    says = {"gather": 1 << 20}
    told = f"Where rank 0's host gathers up to {says['gather']} bytes and each rank has one word, it is still broken."
    treat_further(grader, CASE, zero_is_odd(CASE), told, r"open\( || " + WRITING, odd=says, one_word=True)


@pytest.mark.needs("test_vocabulary")
def test_equal(grader: Grader) -> None:
    """all ranks end with the same model"""
    ticket, run = _runs(grader)[0]
    said = "It ends, but {tensor} of {ranks} differs from rank 0's."
    judge_equal(grader, run, said, r"DDP\( || def main")
    judge_training(grader, run, _job(run), at=r"def main", untrained="untrained-weights-returned")
    judge_sets(grader, CASE, ticket, r"vocabulary =", "vocabulary")


def _job(run: Run) -> Job:
    """One step, with the vocabulary that the ranks returned."""
    vocabulary = run.observed("result")[0]["vocabulary"]

    def shares(world_size: int) -> list[list[Batch]]:
        texts = [range(5 * rank, 5 * rank + 8) for rank in range(world_size)]
        known = [torch.tensor([[vocabulary.index(f"word{number}") for number in text]]) for text in texts]
        return [[(text, torch.empty(0))] for text in known]

    network = partial(torch.nn.EmbeddingBag, len(vocabulary), 3, mode="mean")
    return Job(network, 0.1, shares, loss=lambda scores, _: scores.square().sum())
