"""Case `cast_late`: the model is cast after DDP() had hung its hooks on the parameters, so no gradient is averaged."""

from __future__ import annotations

import pytest
from clinic.case import cases, digests, judge_diagnosis, judge_equal, other_ticket, samples, treat
from clinic.retrain import reductions

from lockstep.grading import Grader

CASE = cases()["cast_late"]
WORLD, STEPS = 3, 4
WRAPPING = r"DDP\( || \.to\( || \.double\("
REFUTED = {
    "wrapper-bypassed": "Every forward of the loop goes through the DDP model, and in float32 that was enough.",
    "missed-synchronization": "There is no no_sync in the file; and not some steps go without an all-reduce, but all.",
    "same-data-everywhere": "The sampler gives each rank other records. What was made of them never met.",
    "different-settings": "Both ranks train with SGD and lr 0.1; compare what they sent each other in a step instead.",
}


def test_diagnosis(grader: Grader) -> None:
    """the diagnosis names the cause and the rank"""
    judge_diagnosis(grader, CASE, REFUTED)


def test_equal(grader: Grader) -> None:
    """the ranks train one model together"""
    run = treat(grader, CASE, other_ticket(grader, CASE, WORLD), WORLD)
    reduced = min(reductions(run))
    said = f"After training, {{tensor}} of {{ranks}} differs from rank 0's: {STEPS} steps, {reduced} all-reduces of gradients."
    judge_equal(grader, run, said, WRAPPING, id="still-broken")
    if reduced < STEPS:
        grader.fail(
            "symptom-hidden",
            f"The models are equal at the end, after {STEPS} steps with {reduced} all-reduces: equal is not trained together.",
            at=r"broadcast || all_reduce || " + WRAPPING,
        )


@pytest.mark.needs("test_equal")
def test_precision(grader: Grader) -> None:
    """it is still the float64 run, and the ranks share the records"""
    run = treat(grader, CASE, other_ticket(grader, CASE, WORLD), WORLD)
    narrow = [str(tensor.dtype) for tensor in digests(run)[0].values() if str(tensor.dtype) != "torch.float64"]
    if narrow:
        grader.fail(
            "symptom-hidden",
            f"The model that main() returns is in {narrow[0].removeprefix('torch.')}: what went wrong in float64 is not tried any more.",
            at=r"PRECISION || " + WRAPPING,
        )
    first = [set(seen[: len(seen) // 2]) for seen in samples(run)]
    twice = sum(map(len, first)) - len(set().union(*first))
    if twice:
        grader.fail(
            "another-illness",
            f"In epoch 0 the {WORLD} ranks read {twice} of the 48 records more than once: now they do the same work.",
            at=r"Sampler\( || DataLoader\(",
        )
