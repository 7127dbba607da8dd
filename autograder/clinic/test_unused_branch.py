"""Case `unused_branch`: the second hidden layer is built and never used, so DDP waits for its gradients for ever."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch
from clinic.case import cases, judge_diagnosis, judge_equal, other_ticket, samples, treat
from clinic.retrain import Forward, Job, State, sampled
from clinic.support import clinic_data
from clinic.trained import flags, judge_loss, judge_training, renamed, unmoved
from torch import nn

from lockstep.grading import Cause, Diagnosis, Grader, Hypothesis, Run, equal, names

CASE = cases()["unused_branch"]
WORLDS, WIDTH, BATCH = (CASE.ranks, 2), 6, 4
FORWARD = r"self\.hidden\[ || for layer in || \.hidden || def forward"
FLAG = r"find_unused_parameters || static_graph || DDP\("
REFUTED = {
    "failing-rank": "All ranks fail, in the same line of the same step, and each for itself.",
    "reentrant-checkpoint": "Nothing is recomputed here: the file does not use torch.utils.checkpoint.",
    "changed-after-wrapping": "Nothing touches the model between DDP() and the first step; the parameters that are missed were there from the start.",
    "missed-synchronization": "There is no no_sync in the file. DDP waits for gradients in every step, and some never come.",
}


def read_failure(grader: Grader, run: Run, cause: Cause) -> Diagnosis | None:
    """Still the same complaint: which parameters got no gradient."""
    said = cause.error.message if cause.error else ""
    if "Expected to have finished reduction" not in said:
        return None
    missed = re.search(r"did not receive grad for rank \d+: ([\d ]+)", said)
    which = f"parameters {', '.join(missed[1].split())}" if missed else "some parameters"
    return grader.diagnosis(
        "still-broken",
        f"{names(cause.ranks).capitalize()} failed in step 2, because {which} got no gradient in step 1.",
        of=cause.ranks,
        at=FORWARD,
    )


class Classifier(nn.Module):
    """The network of the stub, as it is meant."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.ModuleList([nn.Linear(clinic_data.FEATURES, WIDTH), nn.Linear(WIDTH, WIDTH)])
        self.head = nn.Linear(WIDTH, clinic_data.CLASSES)

    def forward(self, features: torch.Tensor, layers: int = 2) -> torch.Tensor:
        """With the first of the hidden layers, or with both."""
        for layer in self.hidden[:layers]:
            features = torch.relu(layer(features))
        return self.head(features)


def _first(model: nn.Module, features: torch.Tensor) -> torch.Tensor:
    return torch.relu(model.hidden[0](features))  # type: ignore[index, operator]


JOB = Job(Classifier, 0.2, sampled(BATCH))
OTHERS: dict[str, Forward] = {
    "The second hidden layer takes no part in the result: it is not used, or nothing of it is left.": (
        lambda model, features, rank, step: model(features, 1)
    ),
    "The second hidden layer is used on rank 0 only.": (
        lambda model, features, rank, step: model(features, 2 if rank == 0 else 1)
    ),
    "The second hidden layer is used in the 1st, 3rd, … step, not in the others.": (
        lambda model, features, rank, step: model(features, 2 - step % 2)
    ),
    "The second hidden layer is used in the 2nd, 4th, … step, not in the others.": (
        lambda model, features, rank, step: model(features, 1 + step % 2)
    ),
    "The second hidden layer is used without ReLU.": (
        lambda model, features, rank, step: model.head(model.hidden[1](_first(model, features)))
    ),
    "The second hidden layer is only added to the first one's output: there is a way around it.": (
        lambda model, features, rank, step: model.head(
            _first(model, features) + torch.relu(model.hidden[1](_first(model, features)))
        )
    ),
    "The first hidden layer gets no gradients: what the second one is given is detached.": (
        lambda model, features, rank, step: model.head(torch.relu(model.hidden[1](_first(model, features).detach())))
    ),
    "The second hidden layer is used and never changed: it is frozen, or the optimizer doesn't have it.": (
        lambda model, features, rank, step: model.head(
            torch.relu(torch.func.functional_call(model.hidden[1], _detached(model.hidden[1]), _first(model, features)))
        )
    ),
}


def _detached(layer: nn.Module) -> State:
    return {name: value.detach() for name, value in layer.named_parameters()}


def test_diagnosis(grader: Grader) -> None:
    """the diagnosis names the cause and the rank"""
    judge_diagnosis(grader, CASE, REFUTED)


def _runs(grader: Grader) -> list[Run]:
    return [treat(grader, CASE, other_ticket(grader, CASE, size), size, evaluate=True) for size in WORLDS]


def test_it_ends(grader: Grader) -> None:
    """the job takes all its steps, on 3 ranks and on 2"""
    _runs(grader)


@pytest.mark.needs("test_it_ends")
def test_equal(grader: Grader) -> None:
    """all ranks end with the same model"""
    for run in _runs(grader):
        taken, steps = len(samples(run)[0]) // BATCH, len(JOB.shares(run.world_size)[0])
        if 0 < taken < steps:
            said = (
                f"It ends because the training is left at batch {taken} of {steps}: the error in it is no longer seen."
            )
            grader.fail("symptom-hidden", said, at=r"except || suppress || break || islice || " + FORWARD)
        said = "It ends, but {tensor} of {ranks} differs from rank 0's: its gradients are not averaged."
        judge_equal(grader, run, said, r"no_sync || \.module\( || DDP\( || loss = ")


@pytest.mark.needs("test_equal")
def test_all_layers(grader: Grader) -> None:
    """both hidden layers are trained, on every rank and in every step"""
    before = JOB.start().state_dict()
    for run in _runs(grader):
        state = run.observed("result")[0].get("model") or {}
        if state and sum(value.numel() for value in state.values()) < sum(value.numel() for value in before.values()):
            grader.fail(
                "symptom-hidden",
                f"It ends because a layer has been taken out: the model has {len(state)} parameters, and with two hidden layers {len(before)}.",
                at=r"self\.hidden = || def __init__",
            )
        others = [
            Hypothesis("symptom-hidden", says + flags(run), partial(JOB.going(forward).state, run.world_size), FORWARD)
            for says, forward in OTHERS.items()
        ]
        at = FLAG if flags(run) else FORWARD
        judge_training(grader, run, JOB, others, at, otherwise=unmoved(run, JOB))
        judge_loss(grader, run, JOB)


@pytest.mark.needs("test_all_layers")
def test_evaluation(grader: Grader) -> None:
    """the returned model uses both hidden layers in evaluation too"""
    features = clinic_data.Records(16, seed=1).features
    for run in _runs(grader):
        for rank, (scores, state) in enumerate(
            zip(run.observed("scores"), renamed(run, JOB.start().state_dict()), strict=True)
        ):
            model = Classifier()
            model.load_state_dict(state)
            with torch.no_grad():
                right, first = model(features), model(features, 1)
            if scores is None or equal(scores, right):
                continue
            off = float((scores - right).abs().max()) if scores.shape == right.shape else float("inf")
            what = "without the second hidden layer" if equal(scores, first) else "with another network"
            grader.fail(
                "symptom-hidden",
                f"It is trained with both hidden layers, and in evaluation mode it scores records {what}: by up to {off:.2g} off on rank {rank}.",
                of=[rank],
                at=r"training || " + FORWARD,
            )
