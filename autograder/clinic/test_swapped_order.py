"""Case `swapped_order`: one host reports in another order, so its loss is added to the others' accuracies."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from functools import cache

import torch
from clinic.case import cases, draw, judge_diagnosis, treat_widely
from clinic.support import clinic_data
from torch import nn

from lockstep.grading import Grader, names

CASE = cases()["swapped_order"]
COUNT = 48
REPORT = r"all_reduce || all_gather || reduce || for name in || def main"
NAMES = ("loss", "accuracy")
REFUTED = {
    "metric-of-one-rank": "Both numbers are all-reduced, and yet no mean. What is added to what?",
    "mean-of-means": "Averaging averages is right here: all ranks have the same number of records.",
    "padding-counted": "48 records come out even on 3 ranks, and no sampler adds any.",
    "different-settings": "True as far as it goes. Which setting, and what does it change in what the ranks send each other?",
    "different-shapes": "Each rank brings one float32 to each call: that is why nothing complains.",
    "skipped-batch": "Every rank makes two calls, and evaluates all its records.",
}


@cache
def own(rank: int, world_size: int) -> dict[str, float]:
    """What this rank's own records give."""
    records = clinic_data.Records(COUNT)
    weights = (
        torch.linspace(-1, 1, clinic_data.FEATURES * clinic_data.CLASSES)
        .reshape(clinic_data.FEATURES, clinic_data.CLASSES)
        .sin()
    )
    numbers = range(rank, COUNT, world_size)
    scores, classes = records.features[numbers] @ weights, records.classes[numbers]
    loss = nn.functional.cross_entropy(scores, classes).item()
    return {"loss": loss, "accuracy": (scores.argmax(1) == classes).float().mean().item()}


def mean(world_size: int, odd: int | None, seen_by: int, left_out: bool = False) -> dict[str, float]:
    """The means that rank `seen_by` gets where rank `odd` reports in the other order (None: nobody does)."""
    other = {"loss": "accuracy", "accuracy": "loss"}
    ranks = [rank for rank in range(world_size) if not (left_out and rank == odd)]
    found = {}
    for name in NAMES:
        terms = []
        for rank in ranks:
            crossed = not left_out and odd is not None and (rank == odd) != (seen_by == odd)
            terms.append(own(rank, world_size)[other[name] if crossed else name])
        found[name] = sum(terms) / len(terms)
    return found


def partial_sum(ranks: Collection[int], world_size: int) -> dict[str, float]:
    """What these ranks have, divided by the number of all: what a `reduce` leaves on a rank that is not its `dst`."""
    return {name: sum(own(rank, world_size)[name] for rank in ranks) / world_size for name in NAMES}


def near(one: dict[str, float], two: dict[str, float]) -> bool:
    """Both numbers agree up to rounding."""
    return all(abs(float(one[name]) - two[name]) < 1e-5 for name in NAMES)


def test_diagnosis(grader: Grader) -> None:
    """the diagnosis names the cause and the rank"""
    judge_diagnosis(grader, CASE, REFUTED)


def test_means(grader: Grader) -> None:
    """every rank reports the loss and the accuracy over all records, whatever its host reports first"""
    for number, (ticket, run) in enumerate(treat_widely(grader, CASE, 2)):
        size = run.world_size
        odd = draw(ticket, CASE.name, size)
        right = mean(size, None, 0)
        for rank, result in enumerate(run.observed("result")):
            if near(result, right):
                continue
            when = "Under your ticket it works now. But where" if number else "Where"
            numbers = f"{when} rank {odd} of {size} reports the accuracy first, rank {rank} has loss {result['loss']:.4f} and accuracy {result['accuracy']:.4f}; "
            truth = f"over all {COUNT} records they are {right['loss']:.4f} and {right['accuracy']:.4f}"
            if any(near(result, mean(size, odd, one)) for one in range(size)):
                crossed = (
                    f"rank {odd}'s accuracy went into the others' loss"
                    if rank != odd
                    else "the others' numbers went into its own the wrong way round"
                )
                grader.fail(
                    "mended-halfway" if number else "still-broken", f"{numbers}{truth}: {crossed}.", of=[odd], at=REPORT
                )
            if near(result, mean(size, odd, rank, left_out=True)):
                grader.fail(
                    "mended-halfway" if number else "symptom-hidden",
                    f"{numbers}that is the mean without rank {odd}; {truth}.",
                    of=[odd],
                    at=r"if rank || if .*report || " + REPORT,
                )
            if near(result, own(rank, size)):
                grader.fail(
                    "symptom-hidden", f"{numbers}those are its own records' only; {truth}.", of=[rank], at=REPORT
                )
            some = [set(chosen) for count in range(1, size) for chosen in itertools.combinations(range(size), count)]
            reached = next((chosen for chosen in some if near(result, partial_sum(chosen, size))), None)
            more = f": only {names(reached)} went into its sum" if reached else ""
            grader.fail(
                "mended-halfway" if number else "another-illness", f"{numbers}{truth}{more}.", of=[rank], at=REPORT
            )
