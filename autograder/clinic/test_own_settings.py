"""Case `own_settings`: one host's settings file has another weight decay, so equal gradients give unequal replicas."""

from __future__ import annotations

import torch
from clinic.case import cases, digests, draw, judge_diagnosis, samples, tickets, treat, unequal
from clinic.retrain import CLOSE, State, apart, batch, cut, start
from clinic.support import clinic_data

from lockstep.grading import Grader, Run, names

CASE = cases()["own_settings"]
LR, USUAL, ODD = 0.1, 0.01, 0.1
STEPS = 4
WHERE = r"clinic_data\.settings || SGD || settings"
REFUTED = {
    "missed-synchronization": "DDP averages the gradients in every step: all ranks have the same ones before optimizer.step().",
    "wrapper-bypassed": "Every forward goes through the DDP model, and all ranks have the same gradients before optimizer.step().",
    "loaded-after-wrapping": "Nothing is loaded, and the replicas are equal before the first step.",
    "same-data-everywhere": "The sampler gives each rank other records. And from the same records no drift would come.",
}


def test_diagnosis(grader: Grader) -> None:
    """the diagnosis names the cause and the rank"""
    judge_diagnosis(grader, CASE, REFUTED)


def test_equal(grader: Grader) -> None:
    """the ranks train one model together, whichever host is odd"""
    mine, other = tickets(grader, CASE)
    for ticket in (mine, other):
        run = treat(grader, CASE, ticket)
        different = unequal(run)
        if different:
            tensor, ranks = different
            odd = draw(ticket, CASE.name, CASE.ranks)
            grader.fail(
                "still-broken" if ticket == mine else "mended-halfway",
                f"After training, {tensor} of {names(ranks)} differs from rank 0's; the file of rank {odd}'s host says weight decay "
                f"{ODD}, those of the others {USUAL}."
                + ("" if ticket == mine else " Under your own ticket they are equal."),
                of=[odd],
                at=WHERE,
            )
        _judge_training(grader, run)


def _judge_training(grader: Grader, run: Run) -> None:
    """Equal replicas: are they what one setting gives?"""
    state = digests(run)[0]
    off = {decay: apart(state, _reference(run, decay)) for decay in (USUAL, ODD)}
    told = [(returned or {}).get("settings") for returned in run.observed("result")]
    copies = [
        sum(call.inside not in ("DDP()", "backward", "forward") for call in calls if call.kind != "barrier")
        for calls in run.collectives
    ]
    if min(off.values()) > CLOSE:
        grader.fail(
            "symptom-hidden",
            f"The ranks are equal at the end, but the model differs from that of weight decay {USUAL} by {off[USUAL]:.2g} and from "
            f"that of {ODD} by {off[ODD]:.2g}: the replicas were made equal after they had diverged.",
            at=r"broadcast || all_reduce || lr || " + WHERE,
        )
    if any(one != told[0] for one in told) and min(copies) >= STEPS:
        grader.fail(
            "symptom-hidden",
            f"The ranks still train with {told[0]} and {next(one for one in told if one != told[0])}; {min(copies)} collectives "
            f"in {STEPS} steps copy one rank's weights over the damage.",
            at=r"broadcast || all_reduce || " + WHERE,
        )


def _reference(run: Run, decay: float) -> State:
    """One process, the batches of all ranks together, one weight decay."""
    records, model = clinic_data.Records(48), start()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, weight_decay=decay)
    parts = [cut([index for _, index in seen], 8) for seen in samples(run)]
    for together in zip(*parts, strict=False):
        features, classes = batch(records, [index for part in together for index in part])
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(features), classes).backward()
        optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}
