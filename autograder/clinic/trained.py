"""The one place where a retrained model is judged: what a job read and returned, against the same training in one process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import chain

import torch
from clinic.case import DATA, TRAINING, digests, samples, wrapped_with
from clinic.retrain import Job, State, averaged, cut, mean, read

from lockstep.grading import Each, Grader, Hypothesis, Run, Tolerance, equal, names, wrong_ranks

CLOSE = Tolerance(1e-4, 1e-5)
"""Sums in a different order stay within this; the smallest change of the training that is known differs by 100 times as much."""
SUMMING = r"all_reduce || loss = || / || DDP\( || "
RETURNED = r"return \{"


def judge_training(
    grader: Grader,
    run: Run,
    job: Job,
    own: Sequence[Hypothesis] = (),
    at: str = TRAINING,
    tolerance: Tolerance = CLOSE,
    *,
    otherwise: Hypothesis | None = None,
    untrained: str = "another-illness",
    seen: list[State] | None = None,
) -> None:
    """The model that each rank returned is the one that the mean gradients of all ranks give.

    `own` are mistakes of this case; those that any job can have are tried after them. `otherwise` is told, whatever it
    predicts, of a model that none of them explains. `untrained` is the id of a model that no step has changed. `seen`
    are the returned models where the case knows their names better than `renamed`.
    """
    _judge_kind(grader, run)
    ranks, trained = run.world_size, job.train(run.world_size)
    seen, right = seen or renamed(run, trained[0].state), Each([one.state for one in trained])
    if not wrong_ranks(seen, right, tolerance):
        return
    _judge_sharing(grader, run, job)
    grader.explain(
        f"The model after training on {ranks} ranks",
        seen,
        right,
        chain(own, mistakes(job, ranks, untrained), _unexplained(run, job, seen, otherwise)),
        otherwise="another-illness",
        at=at,
        tolerance=tolerance,
    )


def judge_loss(grader: Grader, run: Run, job: Job, tolerance: Tolerance = CLOSE) -> None:
    """The loss that each rank returned is that of its last batch; the mean of those of all ranks will do."""
    ranks, trained = run.world_size, job.train(run.world_size)
    losses = [one.losses[-1] for one in trained]
    size = len(job.shares(ranks)[0][-1][1])
    seen = [(returned or {}).get("loss") for returned in run.observed("result")]
    seen = [value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value for value in seen]
    if not wrong_ranks(seen, sum(losses) / ranks, tolerance):
        return
    table = [
        ("double-averaging", f"It is divided by the number of ranks, {ranks}.", [one / ranks for one in losses]),
        ("another-illness", f"It is multiplied by the number of ranks, {ranks}.", [one * ranks for one in losses]),
        ("another-illness", f"It is the sum over the {size} records of a batch.", [one * size for one in losses]),
        ("another-illness", "It is the sum over the ranks.", [sum(losses)] * ranks),
        ("another-illness", "It is rank 0's on every rank.", losses[:1] * ranks),
        ("another-illness", "It is that of the first batch.", [one.losses[0] for one in trained]),
    ]
    grader.explain(
        'The "loss" that main() returns',
        seen,
        Each(losses),
        [Hypothesis(id, says, Each(predicted)) for id, says, predicted in table],
        otherwise="another-illness",
        at=r"\"loss\" || return \{ || loss = ",
        tolerance=tolerance,
    )


def judge_shares(grader: Grader, run: Run, records: int, epochs: int = 1, at: str = DATA) -> None:
    """In each epoch the ranks have to share the records between them, each taking as many as the others."""
    share, size = -(-records // run.world_size), run.world_size
    seen = read(run, records, epochs)
    for rank, part in enumerate(seen):
        if len(part) == records * epochs:
            said = f"Rank {rank} of {size} trains on all {records} records, and not on {share} of them."
            grader.fail("same-shard", said, of=[rank], at=at)
        if not records // size * epochs <= len(part) <= share * epochs:
            said = f"Rank {rank} of {size} read {len(part)} records; {epochs} epoch{'s' * (epochs > 1)} of {share} are {share * epochs}."
            grader.fail("another-illness", said, of=[rank], at=r"for .*epoch || " + at)
    for epoch in range(epochs):
        all_parts = [index for part in seen for index in cut(part, len(part) // epochs)[epoch]]
        if missing := records - len(set(all_parts)):
            said = f"In epoch {epoch} the {size} ranks read {records - missing} of the {records} records, {missing} of them more than once."
            grader.fail("another-illness", said, at=at)


def _judge_sharing(grader: Grader, run: Run, job: Job) -> None:
    """In the first epoch no record is read twice."""
    read = [set(seen[: len(seen) // job.epochs]) for seen in samples(run)]
    together = set().union(*read)
    twice = sum(map(len, read)) - len(together)
    if twice:
        said = f"{twice} of the {len(together)} records were read by more than one of {run.world_size} ranks"
        if all(seen == together for seen in read):
            said = f"each of {run.world_size} ranks read the same {len(together)} records"
        said = f"In epoch 0 {said}: they do the same work instead of sharing it."
        grader.fail("another-illness", said, at=r"Sampler\( || DataLoader\(")


def flags(run: Run) -> str:
    """The options that make DDP put up with missing gradients, as a sentence; nothing where it has none."""
    options = wrapped_with(run)[0] if wrapped_with(run) else {}
    used = ", ".join(f"{key}=True" for key in ("find_unused_parameters", "static_graph") if options.get(key))
    return f" DDP only no longer minds ({used})." if used else ""


def unmoved(run: Run, job: Job) -> Hypothesis | None:
    """For `otherwise`: that some parameters of rank 0's model, and not all, still have their first values."""
    before = job.start().state_dict()
    seen = renamed(run, before)[0]
    idle = [name for name, value in seen.items() if name in before and torch.equal(value, before[name])]
    if not 0 < len(idle) < len(before):
        return None
    has = "has" if len(idle) == 1 else "have"
    said = f"{', '.join(idle)} still {has} the values of before the first step.{flags(run)}"
    return Hypothesis("symptom-hidden", said, None)


def alone(run: Run, job: Job, tolerance: Tolerance = CLOSE) -> bool:
    """Whether each rank has the model that its own gradients give."""
    expected = job.alone(run.world_size)
    return all(equal(seen, right, tolerance) for seen, right in zip(renamed(run, expected[0]), expected, strict=True))


def renamed(run: Run, right: State) -> list[State]:
    """The returned models with the names of `right`, where they have tensors of the same shapes in the same order."""
    shapes = [value.shape for value in right.values()]
    return [
        dict(zip(right, state.values(), strict=True)) if [value.shape for value in state.values()] == shapes else state
        for state in digests(run)
    ]


def _judge_kind(grader: Grader, run: Run) -> None:
    """Every rank returns a model under "model", and not the wrapper."""
    wrapped = [rank for rank, keys in enumerate(run.observed("returned_wrapped")) if "model" in (keys or [])]
    if wrapped:
        grader.fail(
            "wrapped-model-returned",
            f"main() of {names(wrapped)} returns the DDP object, not the model in it: its first parameter is called "
            f"{next(iter(digests(run)[wrapped[0]]))}.",
            of=wrapped,
            at=RETURNED,
        )
    grader.fail_on(
        [rank for rank, state in enumerate(digests(run)) if not state],
        "another-illness",
        'main() of {ranks} returns no model under "model".',
        at=RETURNED,
    )


def _unexplained(run: Run, job: Job, seen: list[State], otherwise: Hypothesis | None) -> Iterator[Hypothesis]:
    """For any model: `otherwise`, or that gradients were not averaged in all steps, if so."""
    if otherwise:
        yield replace(otherwise, predicts=Each(seen))
    steps, values = len(job.shares(run.world_size)[0]), sum(value.numel() for value in job.start().parameters())
    times = min(averaged(run, values))
    if times < steps:
        said = f"In {steps} steps the gradients of the ranks were added {times:.3g} times."
        yield Hypothesis("symptom-hidden", said, Each(seen))


def mistakes(job: Job, ranks: int, unchanged: str = "another-illness") -> Iterator[Hypothesis]:
    """What may have happened to any job instead, most telling first. Each trains again, when it is asked."""
    state, steps = partial(job.state, ranks), len(job.shares(ranks)[0])
    untrained = "These are the values of before the first step: what was trained isn't what main() returns."
    yield Hypothesis(unchanged, untrained, partial(state, steps=0), RETURNED)
    summed = f"The gradients of {ranks} ranks are added and never divided: each step is {ranks} times too long."
    yield Hypothesis("gradients-summed", summed, partial(state, divisor=1), SUMMING)
    twice = f"The gradients are divided by {ranks} twice: each step is {ranks} times too short."
    yield Hypothesis("double-averaging", twice, partial(state, divisor=ranks**2), SUMMING)
    for number in sorted({2, 3, 4, 5, 6} - {ranks, ranks**2}):
        fixed = f"The gradients of {ranks} ranks are divided by {number}: that is right on {number} ranks only."
        yield Hypothesis("wrong-divisor", fixed, partial(state, divisor=number), SUMMING)
    copied = "Rank {rank}'s own records give this model: the work of the other ranks is thrown away."
    alone = cache(partial(job.alone, ranks))
    for rank in range(ranks):
        yield Hypothesis(
            "symptom-hidden",
            copied.replace("{rank}", str(rank)),
            lambda rank=rank: alone()[rank],
            r"broadcast || " + SUMMING,
        )
    mixed = f"That is the mean of {ranks} models, each trained on its own rank's records only: averaged after training, not in every step."
    yield Hypothesis(
        "symptom-hidden",
        mixed,
        lambda: mean(alone()),
        SUMMING,
    )
    for taken in range(steps - 1, 0, -1):
        few = f"The first {taken} of {steps} steps give this model."
        yield Hypothesis(
            "another-illness", few, partial(state, steps=taken), r"for epoch || for .* in || break || return"
        )
