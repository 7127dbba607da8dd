"""Case `cast_late`: the model is cast after DDP() had hung its hooks on the parameters, so no gradient is averaged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from clinic.case import cases, digests, judge_diagnosis, judge_equal, other_ticket, treat
from clinic.retrain import Batch, Job, apart, reductions, sampled
from clinic.support import clinic_data
from clinic.trained import judge_loss, judge_training, mistakes, renamed
from torch import nn

from lockstep.grading import Grader, Hypothesis, Run, Tolerance, fitting

CASE = cases()["cast_late"]
WORLD, STEPS, EPOCHS, BATCH, RATE = 3, 4, 2, 8, 0.1
EXACTLY, OTHER = Tolerance(0.0, 1e-12), 1e-4
FLOAT32 = 1e-6  # what a training in float32 is away by, at most
"""float64's sums in a different order differ by less than the one; float32 on the way makes less of a difference than the other."""
WRAPPING = r"DDP\( || \.to\( || \.double\("
REFUTED = {
    "wrapper-bypassed": "Every forward of the loop goes through the DDP model, and in float32 that was enough.",
    "missed-synchronization": "There is no no_sync in the file; and not some steps go without an all-reduce, but all.",
    "same-data-everywhere": "The sampler gives each rank other records. What was made of them never met.",
    "different-settings": "Both ranks train with SGD and lr 0.1; compare what they sent each other in a step instead.",
}


@contextmanager
def default(dtype: torch.dtype) -> Iterator[None]:
    """New tensors are of this type, as after torch.set_default_dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _job(layers: torch.dtype, records: torch.dtype) -> Job:
    """The run in float64, for layers and records that are drawn in these types. Seed 0 gives other numbers in each."""

    def network() -> nn.Module:
        with default(layers):
            hidden, last = nn.Linear(clinic_data.FEATURES, 16), nn.Linear(16, clinic_data.CLASSES)
        return nn.Sequential(hidden, nn.ReLU(), last).to(torch.float64)

    def shares(world_size: int) -> list[list[Batch]]:
        with default(records):
            return sampled(BATCH, EPOCHS, dtype=torch.float64)(world_size)

    return Job(network, RATE, shares, EPOCHS)


SINGLE, DOUBLE = torch.float32, torch.float64
JOBS = [_job(layers, records) for layers in (SINGLE, DOUBLE) for records in (SINGLE, DOUBLE)]


def test_diagnosis(grader: Grader) -> None:
    """the diagnosis names the cause and the rank"""
    judge_diagnosis(grader, CASE, REFUTED)


def test_equal(grader: Grader) -> None:
    """the ranks train one model together"""
    run = treat(grader, CASE, other_ticket(grader, CASE, WORLD), WORLD)
    reduced = min(reductions(run))
    said = f"After training, {{tensor}} of {{ranks}} differs from rank 0's: {STEPS} steps, {reduced} all-reduces of gradients."
    judge_equal(grader, run, said, WRAPPING, id="still-broken")


@pytest.mark.needs("test_equal")
def test_precision(grader: Grader) -> None:
    """it is still the float64 run"""
    run = treat(grader, CASE, other_ticket(grader, CASE, WORLD), WORLD)
    narrow = [str(tensor.dtype) for tensor in digests(run)[0].values() if tensor.dtype != torch.float64]
    if narrow:
        grader.fail(
            "symptom-hidden",
            f"The model that main() returns is in {narrow[0].removeprefix('torch.')}: what went wrong in float64 is not tried any more.",
            at=r"PRECISION || " + WRAPPING,
        )


@pytest.mark.needs("test_precision")
def test_training(grader: Grader) -> None:
    """it is the model that the records of all ranks give in two epochs, computed in float64"""
    run = treat(grader, CASE, other_ticket(grader, CASE, WORLD), WORLD)
    off, job = min(((_off(run, job), job) for job in JOBS), key=lambda found: found[0])
    stale = Hypothesis(
        "missing-set-epoch",
        "The records come in the same order in both epochs.",
        lambda: replace(job, shares=sampled(BATCH, EPOCHS, False, DOUBLE)).state(WORLD),
        r"set_epoch || Sampler\(",
    )
    seen = renamed(run, job.start().state_dict())
    if EXACTLY.absolute < off < OTHER and fitting(seen, [stale, *mistakes(job, WORLD)], EXACTLY) is None:
        cast = all(torch.equal(value.float().double(), value) for value in seen[0].values())
        smaller = "float32" if off < FLOAT32 else "a type smaller than float32"
        where = "was trained in float32 and cast at the end" if cast else f"went through {smaller} on the way"
        said = f"The model differs by {off:.1g} from that of a training in float64, which rounds by less than {EXACTLY.absolute:g}: it {where}."
        grader.fail("symptom-hidden", said, at=r"autocast || \.float\(\) || float32 || hook || " + WRAPPING)
    judge_training(grader, run, job, [stale], WRAPPING, EXACTLY)
    judge_loss(grader, run, job)


def _off(run: Run, job: Job) -> float:
    right = job.state(WORLD)
    return apart(renamed(run, right)[0], right)
