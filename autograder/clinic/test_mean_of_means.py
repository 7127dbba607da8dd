"""Case `mean_of_means`: each rank divides by its own number of labels, and DDP averages the quotients as if they were equal."""

from __future__ import annotations

import torch
from clinic.case import cases, digests, draw, judge_diagnosis, judge_equal, other_ticket, treat
from clinic.retrain import CLOSE, State, apart, start
from clinic.support import clinic_data

from lockstep.grading import Grader, Run, equal, names

CASE = cases()["mean_of_means"]
LR, COUNT, BATCH, FEW = 0.5, 32, 8, 2
LOSS = r"cross_entropy || loss = || backward"
REFUTED = {
    "uneven-data": "Every rank has 4 batches and takes 4 steps; no rank waits for another.",
    "different-settings": "All ranks have the same learning rate; by what is a rank's loss divided?",
    "missed-synchronization": "The gradients are averaged in every step, and the replicas are equal bit for bit.",
    "different-shapes": "What the ranks send each other is gradients, and these have the model's shapes everywhere.",
}


def test_diagnosis(grader: Grader) -> None:
    """the diagnosis names the cause and the rank"""
    judge_diagnosis(grader, CASE, REFUTED)


def test_weights(grader: Grader) -> None:
    """every labeled record weighs the same, as on one process"""
    for world_size in (CASE.ranks, 3):
        ticket = other_ticket(grader, CASE, world_size)
        run = treat(grader, CASE, ticket, world_size)
        counts = [FEW if rank == draw(ticket, CASE.name, world_size) else BATCH for rank in range(world_size)]
        state = digests(run)[0]
        judge_equal(grader, run, at=r"no_sync || DDP\( || " + LOSS)
        off = apart(state, _trained(counts, [1 / sum(counts)] * world_size))
        if off <= CLOSE:
            _judge_seen(grader, run, [count * (COUNT // BATCH) for count in counts])
            continue
        told = f"The model is off by {off:.2g} from what one process gets of the same batches ({_sum(counts)} labels a step)."
        if apart(state, _trained(counts, [1 / count / world_size for count in counts])) <= CLOSE:
            grader.fail(
                "still-broken" if world_size == CASE.ranks else "mended-halfway",
                f"{told} A record of {names([counts.index(FEW)])} weighs {BATCH // FEW} times as much as one of the others.",
                at=LOSS,
            )
        known = {
            f"every record weighs 1/{BATCH * world_size}, labeled or not, so the steps are too short": 1
            / BATCH
            / world_size,
            f"DDP divides once more by the {world_size} ranks, so the steps are too short": 1
            / sum(counts)
            / world_size,
            f"gradients are summed and never divided by the {world_size} ranks' labels": 1.0,
            f"the losses are summed, and DDP divides by {world_size} ranks only": 1 / world_size,
        }
        for what, weight in known.items():
            if apart(state, _trained(counts, [weight] * world_size)) <= CLOSE:
                grader.fail("another-illness", f"{told} Now all records have the same weight, but {what}.", at=LOSS)
        whole = [BATCH] * world_size
        if apart(state, _trained([FEW] * world_size, [1 / FEW / world_size] * world_size)) <= CLOSE:
            grader.fail(
                "symptom-hidden", f"{told} Labels of the other ranks are left out until all have {FEW}.", at=LOSS
            )
        if apart(state, _trained(whole, [1 / BATCH / world_size] * world_size)) <= CLOSE:
            grader.fail("symptom-hidden", f"{told} Records without a label are trained on as if they had one.", at=LOSS)
        if world_size != CASE.ranks:
            grader.fail(
                "mended-halfway", f"{told} That is on {world_size} ranks; on {CASE.ranks} it is right.", at=LOSS
            )
        grader.fail("another-illness", told, at=LOSS)


def _judge_seen(grader: Grader, run: Run, trained: list[int]) -> None:
    """Each rank returns how many labeled records it trained on itself."""
    said = [(result or {}).get("seen") for result in run.observed("result")]
    for rank, (one, right) in enumerate(zip(said, trained, strict=True)):
        one = one.item() if isinstance(one, torch.Tensor) and one.numel() == 1 else one
        if not equal(one, right):
            what = f'Rank {rank} trained on {right} labeled records, and returns {one!r} as "seen"'
            what += ": that is the sum over all ranks." if equal(one, sum(trained)) else "."
            grader.fail("another-illness", what, of=[rank], at=r"seen \+= || \"seen\"")


def _sum(counts: list[int]) -> str:
    return f"{' + '.join(map(str, counts))} = {sum(counts)}"


def _trained(counts: list[int], weights: list[float]) -> State:
    """One process: in every step, rank r's first counts[r] records of the batch, each with weights[r]."""
    model = start()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    sites = [clinic_data.Records(COUNT, seed=rank) for rank in range(len(counts))]
    for begin in range(0, COUNT, BATCH):
        optimizer.zero_grad()
        for site, count, weight in zip(sites, counts, weights, strict=True):
            part = slice(begin, begin + count)
            loss = torch.nn.functional.cross_entropy(model(site.features[part]), site.classes[part], reduction="sum")
            (loss * weight).backward()
        optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}
