"""Case `reentrant`: activation checkpointing in its reentrant form gives the hidden layers no gradients; DDP waits for them."""

from __future__ import annotations

import re
from functools import cache

import pytest
import torch
from clinic.case import cases, judge_diagnosis, judge_equal, other_ticket, treat, wrapped_with
from clinic.retrain import NEAR, judge_shares, mistakes
from clinic.support import clinic_data
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from lockstep.grading import Cause, Diagnosis, Each, Grader, Run, fitting, names

CASE = cases()["reentrant"]
WIDTH, HIDDEN, STEPS = 6, 2, 4
RECOMPUTED = r"checkpoint\( || use_reentrant || def forward"
FLAG = r"find_unused_parameters || static_graph || "
REFUTED = {
    "unused-parameters": "forward uses every layer, and without the recomputing every layer gets its gradients. Read the warning above the error.",
    "failing-rank": "All ranks fail, in the same line of the same step, and each for itself.",
    "changed-after-wrapping": "Nothing touches the model between DDP() and the first step.",
    "missed-synchronization": "There is no no_sync in the file. DDP waits for gradients in every step, and some never come.",
}


def read_failure(grader: Grader, run: Run, cause: Cause) -> Diagnosis | None:
    """DDP's two complaints about the reentrant form."""
    said = cause.error.message if cause.error else ""
    who = names(cause.ranks).capitalize()
    if "Expected to have finished reduction" in said:
        missed = re.search(r"did not receive grad for rank \d+: ([\d ]+)", said)
        which = f"parameters {', '.join(missed[1].split())}" if missed else "some parameters"
        return grader.diagnosis(
            "still-broken",
            f"{who} failed in step 2, because {which} got no gradient in step 1.",
            of=cause.ranks,
            at=RECOMPUTED,
        )
    if "mark a variable ready only once" in said:
        return grader.diagnosis(
            "symptom-hidden",
            f"{who} failed differently: DDP looked for unused parameters, and the recomputing's own backward passes then gave it "
            "gradients that it had already crossed off.",
            of=cause.ranks,
            at=FLAG + RECOMPUTED,
        )
    return None


@cache
def trained(times: float = 1.0) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The model after the batches of all ranks together, with nothing recomputed, and the ranks' last losses.

    The gradients are `times` as large.
    """
    records, losses = clinic_data.Records(48), [0.0] * CASE.ranks
    torch.manual_seed(0)
    first, second = (nn.Sequential(nn.Linear(width, WIDTH), nn.Tanh()) for width in (clinic_data.FEATURES, WIDTH))
    model = nn.Sequential()
    for name, layer in (("first", first), ("second", second), ("head", nn.Linear(WIDTH, clinic_data.CLASSES))):
        model.add_module(name, layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    samplers = [DistributedSampler(records, num_replicas=CASE.ranks, rank=rank) for rank in range(CASE.ranks)]
    loaders = [DataLoader(records, batch_size=4, sampler=sampler) for sampler in samplers]
    for batches in zip(*loaders, strict=True):
        optimizer.zero_grad()
        for rank, (features, classes) in enumerate(batches):
            loss = nn.functional.cross_entropy(model(features), classes)
            (loss * times / CASE.ranks).backward()
            losses[rank] = loss.item()
        optimizer.step()
    return model.state_dict(), losses


def test_diagnosis(grader: Grader) -> None:
    """the diagnosis names the cause and the rank"""
    judge_diagnosis(grader, CASE, REFUTED)


def _run(grader: Grader) -> Run:
    return treat(grader, CASE, other_ticket(grader, CASE, CASE.ranks), count_linear=True)


def test_it_ends(grader: Grader) -> None:
    """the job takes all its steps"""
    _run(grader)


@pytest.mark.needs("test_it_ends")
def test_all_layers(grader: Grader) -> None:
    """all layers are trained, as they would be without recomputing"""
    run = _run(grader)
    said = "It ends, but {tensor} of {ranks} differs from rank 0's: its gradients are not averaged."
    judge_equal(grader, run, said, r"no_sync || \.module\( || DDP\( || loss = ")
    judge_shares(grader, run, 48)
    state = run.observed("result")[0]["model"]
    right, losses = trained()
    if mistake := fitting([state], mistakes(lambda times: trained(times)[0], CASE.ranks)[1:], NEAR):
        grader.fail(mistake.id, f"It ends, and the model is another one. {mistake.says}", at=mistake.at)
    wrong = [
        name
        for name, value in right.items()
        if name not in state or not torch.allclose(state[name], value, rtol=1e-4, atol=1e-5)
    ]
    if wrong:
        used = wrapped_with(run)[0] if wrapped_with(run) else {}
        flags = [f"{key}=True" for key in ("find_unused_parameters", "static_graph") if used.get(key)]
        because = f"It ends because DDP no longer minds ({', '.join(flags)}), but " if flags else "It ends, but "
        idle = [name for name, value in trained(0)[0].items() if name in state and torch.equal(state[name], value)]
        found = (
            f"{', '.join(idle)} have still the values of before the first step: the recomputed layers are not trained"
            if idle
            else f"{len(wrong)} of {len(right)} parameters, {wrong[0]} first, are not what training without recomputing makes of them"
        )
        grader.fail("symptom-hidden", f"{because}{found}.", at=FLAG + RECOMPUTED)
    told = [result.get("loss") for result in run.observed("result")]
    what = "The returned loss"
    grader.explain(what, told, Each(losses), otherwise="another-illness", at=r"loss\.item || loss =", tolerance=NEAR)


@pytest.mark.needs("test_all_layers")
def test_recomputes(grader: Grader) -> None:
    """the hidden layers are still recomputed"""
    run, needed = _run(grader), STEPS * (2 * HIDDEN + 1)
    calls = run.observed("linear_calls")
    few = [rank for rank, count in enumerate(calls) if count < needed]
    if few:
        grader.fail(
            "symptom-hidden",
            f"Linear layers ran {calls[few[0]]} times in {STEPS} steps on {names(few)}; with {HIDDEN} hidden layers recomputed it takes {needed}. "
            "The memory that was to be saved is held again.",
            of=few,
            at=r"checkpoint\( || for layer in || def forward",
        )
