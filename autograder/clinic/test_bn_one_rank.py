"""Case `bn_one_rank`: DDP sends rank 0's running statistics to all before each forward, so the other sites leave no trace."""

from __future__ import annotations

import itertools

import pytest
from clinic.case import cases, digests, judge_diagnosis, other_ticket, treat
from clinic.retrain import CLOSE
from clinic.support import clinic_data

from lockstep.grading import Grader, names

CASE = cases()["bn_one_rank"]
NEAR = 0.15
WRAPPING = r"all_reduce || broadcast || sync_buffers || DDP\( || BatchNorm"
REFUTED = {
    "same-data-everywhere": "Each rank reads the records of its own site.",
    "wrapper-bypassed": "Every forward goes through the DDP model, and the parameters are equal on all ranks.",
    "metric-of-one-rank": "No metric is reported. What the service compares with is part of the saved model.",
    "missed-synchronization": "The gradients of every step are averaged; what the service looks at has no gradient.",
}


def test_diagnosis(grader: Grader) -> None:
    """the diagnosis names the cause and the rank"""
    judge_diagnosis(grader, CASE, REFUTED)


def test_mean(grader: Grader) -> None:
    """the running mean that rank 0 saves is that of all sites"""
    for world_size in (CASE.ranks, 2):
        run = treat(grader, CASE, other_ticket(grader, CASE, world_size), world_size)
        state = digests(run)[0]
        mean = next((value for name, value in state.items() if name.endswith("running_mean")), None)
        seen = [int(value) for name, value in state.items() if name.endswith("num_batches_tracked")]
        if mean is None or seen == [0]:
            grader.fail(
                "symptom-hidden",
                "The model that rank 0 returns has no running mean any more, so the service has nothing to compare with."
                if mean is None
                else "Rank 0's running mean has counted 0 batches: it was never updated in training, or its count was set back to 0.",
                at=r"track_running_stats || eval\( || BatchNorm || Norm",
            )
        saved = float(mean.mean())
        sites = [float(clinic_data.Records(32, seed=site).features.mean()) + site**2 for site in range(world_size)]
        pooled = sum(sites) / world_size
        if abs(saved - pooled) < NEAR:
            continue
        whose = [site for site, own in enumerate(sites) if abs(saved - own) < NEAR]
        told = f"Rank 0 saves a running mean of {saved:.2f}; the sites' means are {', '.join(f'{one:.2f}' for one in sites)}, all together {pooled:.2f}."
        if whose:
            grader.fail("still-broken", f"{told} It is that of {names(whose)}.", of=whose, at=WRAPPING)
        mixtures = [
            (sum(sites), "symptom-hidden", "It is their sum, without a division."),
            (
                sum(sites) / CASE.ranks,
                "mended-halfway",
                f"It is their sum divided by {CASE.ranks}, on {world_size} ranks.",
            ),
            (
                0.7 * sites[0] + 0.3 * pooled,
                "symptom-hidden",
                "The last batches of all sites are in it, and before them those of rank 0.",
            ),
            *[
                (
                    sum(sites[site] for site in some) / len(some),
                    "symptom-hidden",
                    f"It is the mean of {names(some)} alone.",
                )
                for some in itertools.combinations(range(world_size), 2)
            ],
        ]
        id, says = min(mixtures, key=lambda one: abs(one[0] - saved))[1:]
        if not any(abs(value - saved) < NEAR for value, *_ in mixtures):
            id, says = "symptom-hidden", "It is not that of any site, and not their mean."
        grader.fail(id, f"{told} {says}", at=WRAPPING)


@pytest.mark.needs("test_mean")
def test_whole(grader: Grader) -> None:
    """the variance makes sense, and the parameters are equal on all ranks"""
    run = treat(grader, CASE, other_ticket(grader, CASE, CASE.ranks), CASE.ranks)
    states = digests(run)
    for name, value in states[0].items():
        apart = [rank for rank, state in enumerate(states) if name not in state or not state[name].equal(value)]
        if apart and not name.endswith(("running_mean", "running_var", "num_batches_tracked")):
            grader.fail(
                "another-illness",
                f"After training, {name} of {names(apart)} differs from rank 0's.",
                of=apart,
                at=r"DDP\(",
            )
        if name.endswith("running_var") and not 0.5 < float(value.mean()) < 5 + CLOSE:
            grader.fail(
                "another-illness",
                f"Rank 0 saves a running variance of {float(value.mean()):.2f}; within a site it is about 1, over all sites about 4.",
                at=r"running_var || all_reduce || buffers",
            )
