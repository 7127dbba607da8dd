"""Case `late_load`: one rank loads weights into the model inside the wrapper, after DDP has made all ranks equal."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from clinic.case import cases, draw, judge_diagnosis, judge_equal, treat, treat_widely, zero_is_odd
from clinic.retrain import VALUES
from clinic.support import clinic_data
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from lockstep.grading import Grader, Run, names

CASE = cases()["late_load"]
BYTES = 4 * VALUES
LOADING = r"load_state_dict || copy_ || broadcast || found_on_disk\( || DDP\("
REFUTED = {
    "different-settings": "All ranks train with the same rate and the same number of steps. Compare the models before the first of them.",
    "wrapper-bypassed": "The forward goes through the wrapper, and DDP averages gradients in every step. Of which models?",
    "same-data-everywhere": "The sampler gives each rank different records.",
    "metric-of-one-rank": "Each rank prints its own loss, and says so. The finding is that they start so far apart.",
    "read-before-written": "No file is written while the ranks run.",
}


def good() -> dict[str, torch.Tensor]:
    """The weights on the disk."""
    rule = torch.randn(clinic_data.FEATURES, clinic_data.CLASSES, generator=torch.Generator().manual_seed(2))
    return {"weight": rule.T.contiguous(), "bias": torch.zeros(clinic_data.CLASSES)}


@cache
def trained(world_size: int, weight: float = 1.0, bias: float = 1.0) -> dict[str, torch.Tensor]:
    """The model after an epoch on all ranks together, from so much of the good weights; the rest is random."""
    records = clinic_data.Records(48)
    torch.manual_seed(0)
    model = nn.Linear(clinic_data.FEATURES, clinic_data.CLASSES)
    for name, share in {"weight": weight, "bias": bias}.items():
        value = model.state_dict()[name]
        value.copy_(share * good()[name] + (1 - share) * value)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    samplers = [DistributedSampler(records, num_replicas=world_size, rank=rank) for rank in range(world_size)]
    for batches in zip(*(DataLoader(records, batch_size=4, sampler=sampler) for sampler in samplers), strict=True):
        optimizer.zero_grad()
        for features, classes in batches:
            (nn.functional.cross_entropy(model(features), classes) / world_size).backward()
        optimizer.step()
    return model.state_dict()


def same(state: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """Equal up to rounding, tensor for tensor."""
    return state.keys() == right.keys() and all(
        torch.allclose(state[name], value, rtol=1e-4, atol=1e-5) for name, value in right.items()
    )


def _widely(grader: Grader) -> list[tuple[int, Run]]:
    """Whichever disk holds the weights, rank 0's among them."""
    zero = zero_is_odd(CASE)
    return [*treat_widely(grader, CASE, 2), (zero, treat(grader, CASE, zero))]


def test_diagnosis(grader: Grader) -> None:
    """the diagnosis names the cause and the rank"""
    judge_diagnosis(grader, CASE, REFUTED)


def test_equal(grader: Grader) -> None:
    """the ranks train one model together, whichever disk holds the weights"""
    for number, (ticket, run) in enumerate(_widely(grader)):
        where = f"where rank {draw(ticket, CASE.name, run.world_size)} of {run.world_size} has the weights"
        if number:
            said = f"Under your ticket it works now; {where}, {{tensor}} of {{ranks}} differs from rank 0's after training."
        else:
            said = f"After training, {{tensor}} of {{ranks}} differs from rank 0's, {where}."
        judge_equal(grader, run, said, LOADING, id="mended-halfway" if number else "still-broken")


@pytest.mark.needs("test_equal")
def test_starts_from_them(grader: Grader) -> None:
    """the training starts from the good weights"""
    for number, (ticket, run) in enumerate(_widely(grader)):
        _judge_disks(grader, run, draw(ticket, CASE.name, run.world_size))
        state = run.observed("result")[0]["model"]
        if same(state, trained(run.world_size)):
            continue
        owner = draw(ticket, CASE.name, run.world_size)
        average = 1 / run.world_size
        mixed = {
            "the good weights without the bias": (1.0, 0.0),
            "the good bias, without the rest of the good weights": (0.0, 1.0),
            "the average of the good weights and the other ranks' random ones": (average, average),
        }
        began = [text for text, shares in mixed.items() if same(state, trained(run.world_size, *shares))]
        if same(state, trained(run.world_size, 0.0, 0.0)):
            got = "all ranks are equal now because none starts from the good weights: they are lost, and the random ones are trained"
        elif began:
            got = f"all ranks start from {began[0]}"
        else:
            right = trained(run.world_size)["weight"].flatten()[0].item()
            value = state["weight"].flatten()[0].item() if "weight" in state else float("nan")
            got = (
                f"all ranks end with weight {value:.4f}, …, where training together from the good weights gives {right:.4f}, …: they "
                "were made equal at another moment than the start"
            )
        when = "Under your ticket it works now. But where" if number else "Where"
        grader.fail(
            "mended-halfway" if number else "symptom-hidden",
            f"{when} rank {owner} of {run.world_size} has the weights, {got}.",
            of=[owner],
            at=r"broadcast || " + LOADING,
        )


def _judge_disks(grader: Grader, run: Run, owner: int) -> None:
    """Weights that are found where no disk has them, and that the one who has them has sent to nobody."""
    made_up = [rank for rank, found in enumerate(run.observed("on_disk")) if found and rank != owner]
    sent = sum(call.nbytes for call in run.collectives[owner] if call.inside not in ("DDP()", "backward"))
    if made_up and sent < BYTES:
        grader.fail(
            "symptom-hidden",
            f"Only rank {owner}'s disk has the weights, and found_on_disk finds them on {names(made_up)} too: it makes them up, and "
            f"rank {owner} has sent {sent} of their {BYTES} bytes to others.",
            of=made_up,
            at=r"def found_on_disk || found_on_disk",
        )
