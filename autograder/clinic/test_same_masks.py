"""Case `same_masks`: all ranks draw dropout from the same seed, so the same units are dropped on every rank."""

from __future__ import annotations

import ast

import pytest
import torch
from clinic.case import cases, digests, judge_diagnosis, judge_equal, other_ticket, samples, treat
from clinic.retrain import apart

from lockstep.grading import Grader, names, parse

CASE = cases()["same_masks"]
WORLD, STEPS, MASK, RECORDS = 3, 4, (8, 16), 48
SEEDING = r"manual_seed || [Ss]eed || Generator || Dropout"
REFUTED = {
    "same-data-everywhere": "The sampler gives each rank other records, and their losses differ.",
    "stale-shuffle": "set_epoch is called, and the order changes from epoch to epoch.",
    "missed-synchronization": "The gradients are averaged in every step, and the replicas are equal bit for bit.",
    "different-settings": "All ranks have the same settings, all the way down: look for one that they should not share.",
}


def test_diagnosis(grader: Grader) -> None:
    """the diagnosis names the cause and the rank"""
    judge_diagnosis(grader, CASE, REFUTED)


def test_masks(grader: Grader) -> None:
    """each rank drops different units, and others in every step"""
    run = treat(grader, CASE, other_ticket(grader, CASE, WORLD), WORLD)
    kept = [(returned or {}).get("kept") for returned in run.observed("result")]
    for rank, mask in enumerate(kept):
        if not isinstance(mask, torch.Tensor) or tuple(mask.shape) != (STEPS, *MASK):
            shape = tuple(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
            grader.fail(
                "another-illness",
                f'Rank {rank} returned "kept" as {shape} and not as bool of shape {(STEPS, *MASK)}.',
                of=[rank],
                at=r"kept || return",
            )
        share = mask.float().mean().item()
        if not 0.3 < share < 0.7:
            grader.fail(
                "symptom-hidden",
                f"Dropout kept {share:.0%} of the units on rank {rank}, where half of them should go: no mask, no equal masks.",
                of=[rank],
                at=r"Dropout || eval\(",
            )
    equal = [
        (step, a, b)
        for step in range(STEPS)
        for a in range(WORLD)
        for b in range(a)
        if torch.equal(kept[a][step], kept[b][step])
    ]
    if equal:
        step, a, b = equal[0]
        pairs = {(a, b) for _, a, b in equal}
        grader.fail(
            "still-broken" if len(pairs) == WORLD * (WORLD - 1) // 2 else "mended-halfway",
            f"In step {step + 1}, {names([a, b])} of {WORLD} dropped the same of their {MASK[0] * MASK[1]} units, all of them "
            f"({int(kept[a][step].sum())} kept); so it was in {len({step for step, *_ in equal})} of {STEPS} steps.",
            of=[a, b],
            at=SEEDING,
        )
    crossed = [
        (a, one, b, two)
        for a in range(WORLD)
        for b in range(a)
        for one in range(STEPS)
        for two in range(STEPS)
        if torch.equal(kept[a][one], kept[b][two])
    ]
    if crossed:
        a, one, b, two = crossed[0]
        grader.fail(
            "another-illness",
            f"In step {one + 1} rank {a} dropped the same units as rank {b} in step {two + 1}, all {MASK[0] * MASK[1]} of them; so it is "
            f"in {len(crossed)} pairs of steps: the seeds of two ranks meet.",
            of=[a, b],
            at=SEEDING,
        )
    for rank, mask in enumerate(kept):
        again = [step for step in range(1, STEPS) if torch.equal(mask[step], mask[0])]
        if again:
            grader.fail(
                "another-illness",
                f"Rank {rank} dropped the same units in step {again[0] + 1} as in step 1: it is seeded again in every step.",
                of=[rank],
                at=SEEDING,
            )


@pytest.mark.needs("test_masks")
def test_repeatable(grader: Grader) -> None:
    """the ranks end with one model, and a second run with the same one"""
    _judge_seed(grader)
    first = treat(grader, CASE, other_ticket(grader, CASE, WORLD), WORLD)
    said = "The masks differ now, and so do the models: {tensor} of {ranks} differs from rank 0's."
    judge_equal(grader, first, said, r"init_sync || DDP\(")
    for epoch in range(2):
        read = [index for seen in samples(first) for _, index in seen[epoch * RECORDS // WORLD :][: RECORDS // WORLD]]
        if read and len(set(read)) < RECORDS:
            grader.fail(
                "another-illness",
                f"In epoch {epoch} the ranks read {len(read)} records, and only {len(set(read))} of the {RECORDS} are among them: they no "
                "longer share one order.",
                at=r"DistributedSampler || seed= || " + SEEDING,
            )
    # Another ticket changes nothing here, so it is a second start of the same job.
    second = treat(grader, CASE, other_ticket(grader, CASE, WORLD) + 1, WORLD)
    off = apart(digests(first)[0], digests(second)[0])
    if off:
        grader.fail(
            "another-illness",
            f"Two runs of the job end with models that differ by {off:.2g}: the masks differ by rank and by run.",
            at=SEEDING,
        )


def _judge_seed(grader: Grader) -> None:
    """`hash` of a string is salted: two runs from one fork server have one salt, two starts of a learner's job don't."""
    for node in ast.walk(parse(grader.submission.text) or ast.Module([], [])):
        if not (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "hash" and node.args
        ):
            continue
        text = [
            one
            for one in ast.walk(node.args[0])
            if isinstance(one, ast.Constant) and isinstance(one.value, (str, bytes))
        ]
        if text:
            grader.fail(
                "another-illness",
                f"{ast.unparse(node)} is a different number in each process, because Python salts the hashes of strings "
                "at each start: a second start of the job gives another model.",
                at=r"\bhash\(",
            )
