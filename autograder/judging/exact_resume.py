"""What an interrupted training of `exact_resume` should have gone on with, and what each known mistake gives."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DistributedSampler

from lockstep.grading import Grader, Hypothesis

SAMPLES, EPOCHS, STEPS = 36, 4, 4  # steps an epoch
TOTAL = STEPS * EPOCHS
GENERATORS = ("random", "numpy.random", "torch")

TRAIN = r"def train\("
LOADING = r"load_latest\( || " + TRAIN
SAVING = r"save_checkpoint\( || " + TRAIN
RANDOM = r"set_rng_state || setstate || set_state || manual_seed || " + LOADING
ORDER = r"set_epoch || Sampler\( || for .* in || " + TRAIN

Batches = list[list[int]]


def dealt(
    seed: int, world: int, batch: int, *, epochs: bool = True, shuffle: bool = True, own: int = 0, last: bool = True
) -> list[Batches]:
    """The batches of each rank: of DistributedSampler with this seed, told the epoch or not.

    With `own` each rank adds its number to the seed; without `last` an epoch's smaller batch is left out.
    """
    ranks: list[Batches] = []
    for rank in range(world):
        sampler: Any = DistributedSampler(range(SAMPLES), world, rank, shuffle=shuffle, seed=seed + own * rank)  # type: ignore[arg-type]
        ranks.append([])
        for epoch in range(EPOCHS):
            sampler.set_epoch(epoch * epochs)
            order = list(sampler)
            steps = math.ceil(len(order) / batch) if last else len(order) // batch
            ranks[-1] += [order[step * batch : (step + 1) * batch] for step in range(steps)]
    return ranks


@dataclass(frozen=True)
class Case:
    """An interruption after `stop` steps, the calls of all ranks that went on from there, and those that ran through."""

    where: str
    stop: int
    calls: list[dict[str, Any]]
    through: list[dict[str, Any]]

    @property
    def cost(self) -> str:
        """What the difference has become: the first loss that differs, and how far the weights are apart in the end."""
        losses = [
            (self.stop + at + 1, step["loss"], same["loss"])
            for call, whole in zip(self.calls, self.through, strict=True)
            for at, (step, same) in enumerate(zip(call["steps"], whole["steps"][self.stop :], strict=False))
        ]
        first = min((number for number, loss, same in losses if loss != same), default=None)
        apart = (self.calls[0]["weights"] - self.through[0]["weights"]).abs().max().item()
        said = f"the loss differs from step {first} on" if first else "no loss differs"
        end = f"max |Δw| is {apart:.1e}" if apart else "the weights are equal"
        return f"Compared with the uninterrupted training, {said}; at the end {end}."

    @property
    def interrupted(self) -> str:
        """The beginning of a message."""
        return f"Interrupted {self.where}, after step {self.stop}"


def places(case: Case, rank: int) -> Iterator[Hypothesis]:
    """With which batch a rank goes on, in a list; an empty one when it makes no step."""
    batches = [step["samples"] for step in case.through[rank]["steps"]]
    warned = case.calls[rank]["warned"]
    epoch, place = divmod(case.stop, STEPS)

    def step(number: int) -> Any:
        return [batches[number]] if 0 <= number < TOTAL else None

    over = ("skips-rest-of-epoch" if place else "off-by-one-epoch") if case.stop + STEPS >= TOTAL else "loses-its-place"
    yield Hypothesis(over, f"It made no step: the last {TOTAL - case.stop} batches are never seen.", [], ORDER)
    if warned:
        heard = f"It is step 1 of the whole training. load_latest had warned: {warned[0][:300]}"
        yield Hypothesis("state-cannot-be-loaded", heard, step(0), SAVING)
    if not place:
        yield Hypothesis("off-by-one-epoch", f"Epoch {epoch - 1} was done already.", step(case.stop - STEPS), ORDER)
        yield Hypothesis("off-by-one-epoch", f"Epoch {epoch} is never done.", step(case.stop + STEPS), ORDER)
    if epoch:
        yield Hypothesis("starts-over", "It is step 1 of the whole training.", step(0), LOADING)
    if place:
        twice = f"Epoch {epoch} started with these, {place} steps before the interruption: they are used twice."
        yield Hypothesis("epoch-restarted", twice, step(epoch * STEPS), ORDER)
        never = (
            f"They are the first of the next epoch: the last {STEPS - place} batches of epoch {epoch} are never seen."
        )
        yield Hypothesis("skips-rest-of-epoch", never, step((epoch + 1) * STEPS), ORDER)
    at = r"\bstep \+= || \bstep\b.*= || " + ORDER
    yield Hypothesis("off-by-one-step", f"They are those of step {case.stop} again.", step(case.stop - 1), at)
    yield Hypothesis("off-by-one-step", f"It left out those of step {case.stop + 1}.", step(case.stop + 1), at)
    for other in set(range(EPOCHS)) - {epoch}:
        right = f"It is the right place in the order of epoch {other}; it is epoch {epoch}."
        yield Hypothesis("resumes-in-another-order", right, step(other * STEPS + place), ORDER)


def sources(case: Case, rank: int, wrong: list[int]) -> Iterator[Hypothesis]:
    """Where the first two numbers can come from that the first of the `wrong` generators gave in the first step."""
    at, who = wrong[0], GENERATORS[wrong[0]]
    steps = case.through[rank]["steps"]
    for other, call in enumerate(case.through):
        if other != rank:
            says = f"That is the number that rank {other} drew in this step: it has rank {other}'s state."
            drawn = call["steps"][case.stop]["draws"][:2, at]
            yield Hypothesis("rank-0-random-state-everywhere", says, drawn, r"all_gather || gather || " + RANDOM)
    left = ", ".join(GENERATORS[one] for one in wrong)
    stream = torch.cat([step["draws"][:, at] for step in steps])
    begins = [sum(len(step["samples"]) for step in steps[:number]) for number in range(len(steps) + 1)]
    says = f"It is the first number of the whole training again. Seeded again instead of restored: {left}."
    yield Hypothesis("random-state-forgotten", says, stream[:2], RANDOM)
    if who != "torch" and begins[case.stop] % 2:
        kept = "gauss_next" if who == "random" else "has_gauss and cached_gaussian"
        half = f"Normal numbers are made in pairs, and the second of a pair was not put back: {kept} of {who}'s state."
        yield Hypothesis("random-state-forgotten", half, stream[begins[case.stop] + 1 :][:2], RANDOM)
    says = "{} was put back, and then {} numbers more had been drawn from it before the first sample was fetched."
    for number in range(begins[case.stop] + 1, len(stream) - 1):
        later = says.format(who, number - begins[case.stop])
        yield Hypothesis("random-state-moved-on", later, stream[number : number + 2], RANDOM)
    if who == "torch":  # the model draws as well, between the samples
        generator = torch.Generator()
        generator.set_state(steps[case.stop - 1]["stream"])
        numbers = torch.cat([torch.rand((1,), generator=generator) for _ in range(1500)])
        for number in range(1, len(numbers) - 1):
            yield Hypothesis("random-state-moved-on", says.format(who, number), numbers[number : number + 2], RANDOM)
    for number in range(1, begins[case.stop]):
        step = max(one for one, begin in enumerate(begins) if begin <= number)
        says = f"It belongs to step {step + 1}: the state was taken before that step, and saved after step {case.stop}."
        at_get = r"get_rng_state || getstate || " + RANDOM
        yield Hypothesis("random-state-of-another-moment", says, stream[number : number + 2], at_get)


def read_rate(case: Case, rank: int) -> Hypothesis | None:
    """Why the first step after an interruption has a wrong learning rate though its scheduler counts right, if it does."""
    step, through = case.calls[rank]["steps"][0], case.through[rank]["steps"]
    right = through[case.stop]
    if step["rate"] == right["rate"] or step["counted"] != right["counted"]:
        return None
    counts = f"The scheduler counted {case.stop} steps, which is right"
    if step["rate"] == through[0]["rate"]:
        says = f"{counts}. The rate is in the optimizer's param_groups: these had the rate of the very first step."
        return Hypothesis("optimizer-forgotten", says, None, r"param_groups || optim.*load_state_dict || ")
    says = f"{counts}, but its step() was called for each of them and changed the restored rate again."
    return Hypothesis("scheduler-forgotten", says, None, r"^ {8}.*sched\w*\.step\( || sched.*load_state_dict || ")


def judge_made(grader: Grader, case: Case) -> None:
    """The number that each generator has ready for `make`, against the first start's."""
    for rank, call in enumerate(case.calls):
        for who, got, right in zip(GENERATORS, call["made"], case.through[rank]["made"], strict=True):
            if got != right:
                what = f"{case.interrupted}, and resumed: within make, {who} gave rank {rank} {got:.6f} first. At the first start it was {right:.6f}."
                keeps = "A restart seeds before make as well. Otherwise the model differs in whatever make draws and no state_dict holds, such as a fixed mask."
                grader.fail("start-not-seeded", f"{what} {keeps}", of=[rank], at=r"make\(\) || " + TRAIN)


def judge_skipped(grader: Grader, case: Case) -> None:
    """What the epoch has done before the interruption isn't loaded again."""
    epoch = case.stop // STEPS * STEPS
    for rank, call in enumerate(case.calls):
        done = {sample for step in case.through[rank]["steps"][epoch : case.stop] for sample in step["samples"]}
        if done and done <= set(call["steps"][0]["fetched"]):
            what = f"{case.interrupted}: before step {case.stop + 1} rank {rank} loaded the {len(done)} samples of this epoch's earlier steps again."
            at = r"continue || islice || DataLoader\( || for .* in || " + TRAIN
            grader.fail("loads-what-was-done", what, of=[rank], at=at)
