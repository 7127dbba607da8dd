"""Case `lonely_validation`: one rank alone calls the DDP wrapper, whose forward broadcasts the BatchNorm statistics."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
from clinic.case import cases, digests, draw, judge_diagnosis, treat_widely, unmended, wrapped_with
from clinic.retrain import CLOSE, apart

from lockstep.grading import Cause, Diagnosis, Grader, Run, names

CASE = cases()["lonely_validation"]
MEASURING = r"accuracy\(model[,.] || accuracies\.append || DDP\( || def main"
STEPS, HELD_OUT = 8, 64
LESS_THAN_ONE = 0.5 / HELD_OUT
MISTAKES = {
    "mode": "{host} stays in eval mode after it has measured: in epoch 1 it trains with the running statistics. {off}",
    "fed": "{host} measures in train mode: the 64 held-out records go into its running statistics. {off}",
    "reset": "{host} loses its running statistics whenever it has measured: they are 0 and 1 again. {off}",
}
REFUTED = {
    "collective-on-some-ranks": "You are near, but there is no collective in that branch's code. Which call in it communicates even so, and why?",
    "different-settings": "The hosts' settings do differ, and may: one is meant to measure.",
    "buffers-of-one-rank": "That would give a wrong number, not none at all.",
    "slow-rank": "The measuring takes a millisecond; the rank that measures hasn't even started.",
}


def read_failure(grader: Grader, run: Run, cause: Cause) -> Diagnosis | None:
    """Still waiting: who sent or awaited statistics that nobody else did."""
    calls = [sum(call.kind == "broadcast" for call in one) for one in run.collectives]
    if len(set(calls)) == 1:
        return None
    few = [rank for rank, count in enumerate(calls) if count == min(calls)]
    many = [rank for rank, count in enumerate(calls) if count == max(calls)]
    seen = (
        f"{names(many).capitalize()} called {max(calls)} broadcasts, {names(few)} only {min(calls)}, and the job's code has none: "
        f"{cause.headline}"
    )
    return unmended(grader, run, seen, MEASURING, many)


def test_diagnosis(grader: Grader) -> None:
    """the diagnosis names the cause and the rank"""
    judge_diagnosis(grader, CASE, REFUTED)


def test_it_ends(grader: Grader) -> None:
    """the job ends, whichever host measures"""
    treat_widely(grader, CASE)


@pytest.mark.needs("test_it_ends")
def test_statistics(grader: Grader) -> None:
    """the training is what it was: the ranks share weights and running statistics"""
    import torch

    runs = treat_widely(grader, CASE)
    run = runs[0][1]
    copied = sum(
        call.kind == "broadcast" and call.dtype == "float32" and call.inside == "forward" for call in run.collectives[0]
    )
    if copied < STEPS - 2:
        given = wrapped_with(run)
        option = f" ({', '.join(f'{key}={value}' for key, value in given[0].items())})" if given and given[0] else ""
        grader.fail(
            "symptom-hidden",
            f"It ends because DDP copies the running statistics at {copied} of {STEPS} forwards now{option}: "
            "each rank normalizes by its own, and the accuracy depends on which host measures it.",
            at=r"broadcast_buffers || forward_sync_buffers || DDP\( || model\.module",
        )
    states = [(result or {}).get("model") or {} for result in run.observed("result")]
    for name, value in states[0].items():
        if "running" in name or "num_batches" in name:
            continue
        other = [rank for rank, state in enumerate(states) if not torch.equal(state[name], value)]
        if other:
            grader.fail(
                "another-illness",
                f"It ends, but {name} of {names(other)} is no longer that of rank 0.",
                of=other,
                at=MEASURING,
            )
    for ticket, run in runs:
        _judge_training(grader, run, draw(ticket, CASE.name, CASE.ranks))


def _judge_training(grader: Grader, run: Run, host: int) -> None:
    """Each rank's state against that of the same training on one process, where nobody measures."""
    right, states = _trained(host)[0], digests(run)
    off = [min(apart(state, right[rank]), apart(state, right[0])) for rank, state in enumerate(states)]
    wrong = [rank for rank, much in enumerate(off) if much > CLOSE]
    if not wrong:
        return
    seen = f"{{name}} of {names(wrong)} ends {{much:.2g}} away from what the same training without measuring gives."
    if right[0].keys() == states[wrong[0]].keys():
        much, name = max(
            (apart({name: states[wrong[0]][name]}, {name: right[wrong[0]][name]}), name)
            for name in right[0]
            if "tracked" not in name
        )
        seen = seen.format(name=name, much=much)
    else:
        seen = f"The model of {names(wrong)} has other tensors than it had."
    for mistake, said in MISTAKES.items():
        if apart(states[host], _trained(host, mistake)[0][host]) <= CLOSE:
            grader.fail(
                "another-illness",
                said.format(host=f"Rank {host}", off=seen),
                of=[host],
                at=r"reset_running || \.train\(|\.eval\( || def accuracy || " + MEASURING,
            )
    grader.fail("another-illness", f"It ends, but the training is another one now: {seen}", of=wrong, at=MEASURING)


@pytest.mark.needs("test_it_ends", "test_statistics")
def test_measured(grader: Grader) -> None:
    """the host that measures returns an accuracy for each epoch"""
    for ticket, run in treat_widely(grader, CASE):
        host = draw(ticket, CASE.name, CASE.ranks)
        result = run.observed("result")[host] or {}
        found = result.get("accuracies")
        if not isinstance(found, list) or len(found) != 2 or not all(isinstance(one, float) for one in found):
            grader.fail(
                "symptom-hidden",
                f"It ends, and rank {host}, whose settings ask for it, has measured {found!r} instead of two accuracies.",
                of=[host],
                at=MEASURING,
            )
        told = f"which rank {host} alone is told to measure"
        if others := [
            rank for rank, one in enumerate(run.observed("result")) if rank != host and (one or {}).get("accuracies")
        ]:
            grader.fail(
                "another-illness",
                f"{names(others).capitalize()} returned accuracies too, {told}.",
                of=others,
                at=r"accuracies\.append || accuracies\b",
            )
        _, measured, without = _trained(host)
        for epoch, right in enumerate(measured):
            if min(abs(one - found[epoch]) for one in right) <= LESS_THAN_ONE:
                continue
            seen = f"Rank {host} says that {found[epoch]:.1%} are right after epoch {epoch}; "
            seen += f"its model then, in eval mode, has {' or '.join(f'{one:.1%}' for one in sorted(right))} of the {HELD_OUT} right."
            if epoch == 0 and found[0] == found[1] and min(abs(one - found[0]) for one in measured[1]) <= LESS_THAN_ONE:
                seen += " That is the number of epoch 1, measured twice."
            elif abs(without[epoch] - found[epoch]) <= LESS_THAN_ONE:
                seen += " Its weights give that number with running statistics of 0 and 1, as of a new BatchNorm1d."
            elif abs(found[epoch] * HELD_OUT - round(found[epoch] * HELD_OUT)) > 1e-3:
                seen += (
                    f" {found[epoch]:.4f} is no whole number of {HELD_OUT}ths: it comes from other records, or fewer."
                )
            grader.fail("another-illness", seen, of=[host], at=MEASURING)


def _model() -> Any:
    import torch
    from clinic.support import clinic_data

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return torch.nn.Sequential(
            torch.nn.Linear(clinic_data.FEATURES, 16),
            torch.nn.BatchNorm1d(16),
            torch.nn.ReLU(),
            torch.nn.Linear(16, clinic_data.CLASSES),
        )


@cache
def _trained(host: int, after: str = "") -> tuple[list[Any], list[set[float]], list[float]]:
    """The job on one process: each rank's state at the end, per epoch what the host may measure, and what without statistics.

    The host may measure by its own running statistics or, through the wrapper with all ranks, by those of rank 0.
    `after` is a mistake in the measuring, one of MISTAKES.
    """
    import torch
    from clinic.support import clinic_data
    from torch.utils.data import DataLoader

    ranks, held_out = [_model() for _ in range(CASE.ranks)], clinic_data.Records(HELD_OUT, seed=100)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in ranks]
    measured: list[set[float]] = []
    without: list[float] = []
    for _ in range(2):
        loaders = [DataLoader(clinic_data.Records(32, seed=rank), batch_size=8) for rank in range(CASE.ranks)]
        for batches in zip(*loaders, strict=True):
            for model in ranks[1:]:
                for own, first in zip(model.buffers(), ranks[0].buffers(), strict=True):
                    own.copy_(first)
            for model, (features, classes) in zip(ranks, batches, strict=True):
                model.zero_grad()
                torch.nn.functional.cross_entropy(model(features), classes).backward()
            for same in zip(*(model.parameters() for model in ranks), strict=True):
                mean = torch.stack([one.grad for one in same]).mean(0)
                for one in same:
                    one.grad = mean.clone()
            for optimizer in optimizers:
                optimizer.step()
        measured.append({_right(ranks[rank], held_out) for rank in (host, 0)})
        fresh = copy.deepcopy(ranks[host])
        fresh[1].reset_running_stats()
        without.append(_right(fresh, held_out))
        if after == "mode":
            ranks[host].eval()
        elif after == "fed":
            with torch.no_grad():
                ranks[host](held_out.features)
        elif after == "reset":
            ranks[host][1].reset_running_stats()
    return [model.state_dict() for model in ranks], measured, without


def _right(model: Any, records: Any) -> float:
    """The share of these records that a copy of the model, in eval mode, puts into the right class."""
    return (copy.deepcopy(model).eval()(records.features).argmax(1) == records.classes).float().mean().item()
