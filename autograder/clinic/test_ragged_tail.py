"""Case `ragged_tail`: the last group of micro-batches is incomplete, and the optimizer uses its gradients unaveraged."""

from __future__ import annotations

import torch
from clinic.case import cases, digests, judge_diagnosis, judge_equal, other_ticket, samples, treat
from clinic.retrain import CLOSE, State, apart, averaged, batch, cut, reductions, start
from clinic.support import clinic_data

from lockstep.grading import Grader, Run

CASE = cases()["ragged_tail"]
OTHER_WORLD = 3
RECORDS, MICRO, GROUP, EPOCHS, LR = 96, 4, 5, 2, 0.5
WHERE = r"no_sync || GROUP == || step\("
REFUTED = {
    "uneven-data": "Every rank has 12 micro-batches an epoch; what is uneven is the last group on each of them.",
    "wrapper-bypassed": "Every forward goes through the DDP model, and the first two steps leave the replicas equal.",
    "different-settings": "The ranks have the same settings, and two steps of three leave the replicas equal.",
    "same-data-everywhere": "The sampler gives each rank other records. Without other records nothing could drift.",
}


def test_diagnosis(grader: Grader) -> None:
    """the diagnosis names the cause and the rank"""
    judge_diagnosis(grader, CASE, REFUTED)


def test_equal(grader: Grader) -> None:
    """the ranks are equal, however many micro-batches are left over"""
    for world_size in (CASE.ranks, OTHER_WORLD):
        run = treat(grader, CASE, other_ticket(grader, CASE, world_size), world_size)
        micro = RECORDS // world_size // MICRO
        said = (
            f"With {world_size} ranks, {micro} micro-batches an epoch and {min(reductions(run))} all-reduces in {EPOCHS} epochs, "
            "{tensor} of {ranks} differs from rank 0's at the end."
        )
        judge_equal(grader, run, said, WHERE, id="still-broken" if world_size == CASE.ranks else "mended-halfway")
        _judge_training(grader, run, micro)


def _judge_training(grader: Grader, run: Run, micro: int) -> None:
    """Equal replicas: are they what groups of five give, with the rest of each epoch?"""
    state = digests(run)[0]
    epoch = list(range(micro))
    in_epochs = [[number + start for number in group] for start in (0, micro) for group in cut(epoch, GROUP)]
    across = cut(range(EPOCHS * micro), GROUP)
    right = [_trained(run, groups, by) for groups in (in_epochs, across) for by in (lambda group: GROUP, len)]
    if min(apart(state, one) for one in right) <= CLOSE:
        times = averaged(run, sum(value.numel() for value in state.values()))[0]
        if times > len(in_epochs):
            grader.fail(
                "symptom-hidden",
                f"The ranks are equal, with gradients averaged {times:g} times in {len(in_epochs)} steps: the traffic that the "
                "accumulation saved is back.",
                at=r"no_sync || backward\(",
            )
        return
    for size in (GROUP, 1, 2, 3, 4, 6):
        whole = [group for group in _grouped(micro, size) if len(group) == size]
        for groups in (whole, _grouped(micro, size)):
            if apart(state, _trained(run, groups, lambda group, size=size: size)) <= CLOSE:
                left = EPOCHS * micro - sum(map(len, groups))
                what = (
                    f"{left} of {EPOCHS * micro} micro-batches, those at the end of an epoch, count for nothing"
                    if left
                    else f"a step takes {size} now"
                )
                grader.fail(
                    "symptom-hidden",
                    f"The ranks are equal because {what}, where groups of {GROUP} and the rest of each epoch were meant.",
                    at=r"GROUP || " + WHERE,
                )
    rest = micro % GROUP
    each = [one for group in in_epochs for one in ([group] if len(group) == GROUP else [[number] for number in group])]
    if any(apart(state, _trained(run, each, by)) <= CLOSE for by in (lambda group: GROUP, len)):
        said = f"The ranks are equal because each of the {rest} micro-batches left over makes a separate step. They are one group, and make one step."
        grader.fail("symptom-hidden", said, at=WHERE)
    off = min(apart(state, one) for one in right)
    copied = any(call.kind == "broadcast" and call.inside != "DDP()" for call in run.collectives[0])
    said = f"The ranks are equal at the end, and yet the model is off by {off:.2g} from what groups of {GROUP} with averaged gradients give"
    why = ": the replicas were made equal by a broadcast after they had diverged." if copied else "."
    grader.fail("symptom-hidden", said + why, at=r"broadcast || all_reduce || " + WHERE)


def _grouped(micro: int, size: int) -> list[list[int]]:
    return [[start + number for number in group] for start in (0, micro) for group in cut(range(micro), size)]


def _trained(run: Run, groups, divisor) -> State:  # type: ignore[no-untyped-def]
    """One process, one step a group; micro-batch n is that of all ranks together."""
    records, model = clinic_data.Records(RECORDS), start()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    parts = [cut([index for _, index in seen], MICRO) for seen in samples(run)]
    together = [[index for part in micro for index in part] for micro in zip(*parts, strict=False)]
    for group in groups:
        optimizer.zero_grad()
        for number in group:
            if number < len(together):
                features, classes = batch(records, together[number])
                (torch.nn.functional.cross_entropy(model(features), classes) / divisor(group)).backward()
        optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}
