"""What `train_step` of accumulate has to do.

    train_step(ddp_model, micro_batches, loss_fn, optimizer) -> float

Every rank is given micro-batches that were drawn here. Their gradients are computed here once more, one by one, in double
precision; from these follow the gradient of the one big batch and that of every usual mistake. How often the gradients
crossed the network is read from the recorded collectives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import pytest
import torch
from torch.nn import functional as F

from lockstep.grading import Grader
from lockstep.grading.verdict import Diagnosis
from lockstep.ranks import Collective, Mark, Run
from lockstep.ranks.explain import names
from lockstep.ranks.text import evidence

WORLD = 3  # not a power of two: a fixed 2 or 4 in the code shows
FEATURES, HIDDEN, CLASSES = 6, 16, 5
SHAPES = {
    "first.weight": (HIDDEN, FEATURES), "first.bias": (HIDDEN,), "second.weight": (CLASSES, HIDDEN),
    "second.bias": (CLASSES,),
}  # fmt: skip
PAYLOAD = 4 * sum(torch.Size(shape).numel() for shape in SHAPES.values())
FREE = 64  # bytes: a collective this small carries a number of samples or a loss
LR, STALE = 0.5, 0.75

EQUAL, RAGGED = 0, 2  # the steps of the main run
MAIN = [[[4, 4, 4], [4, 4], [4, 4, 1]]] * WORLD
UNEVEN = [[[4, 4, 4, 1], [2]], [[4, 2], [3, 3]], [[3], [4, 4, 2]]]
ONCE = [[[4, 4], [3]]] * WORLD

FUNCTION = r"def train_step"
SYNC = r"no_sync || require_backward_grad_sync || " + FUNCTION
FORWARD = r"(ddp_)?model\(|net\( || " + FUNCTION
BACKWARD = r"\.backward\( || " + FUNCTION
SCALE = r"loss\w* */|loss\w* *\*|/= || \.mul|\.div || " + BACKWARD
STEP = r"\.step\( || " + FUNCTION
LOOP = r"for .* in .*micro || for .* in || " + FUNCTION
RETURN = r"^\s+return (?!None) || return || " + FUNCTION


# What is drawn, and what follows from it -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Micro:
    """One micro-batch as it should come out: its number of samples, the mean loss over them, and its gradient."""

    count: int
    loss: float
    gradient: torch.Tensor


@dataclass(frozen=True)
class Played:
    """A run of some steps, and the data that each rank had: `x[rank, step]`, `y[rank, step]`, `sizes[rank][step]`."""

    run: Run
    x: torch.Tensor
    y: torch.Tensor
    sizes: list[list[list[int]]]

    @property
    def steps(self) -> list[list[dict[str, Any]]]:
        """What each rank saw in each step."""
        return self.run.observed("steps")

    def micros(self, rank: int, step: int, smoothing: float = 0.3) -> list[Micro]:
        """The micro-batches of one rank in one step, computed from the parameters that this rank then had."""
        sizes = self.sizes[rank][step]
        count = sum(sizes)
        x, y = self.x[rank, step, :count].split(sizes), self.y[rank, step, :count].split(sizes)
        start = self.steps[rank][step]["start"]
        return [compute(start, own, target, smoothing) for own, target in zip(x, y, strict=True)]


def compute(state: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor, smoothing: float) -> Micro:
    """Loss and gradient of one micro-batch, in double precision."""
    own = {name: state[name].detach().double().cpu().requires_grad_() for name in SHAPES}
    hidden = torch.tanh(F.linear(x.double(), own["first.weight"], own["first.bias"]))
    loss = F.cross_entropy(F.linear(hidden, own["second.weight"], own["second.bias"]), y, label_smoothing=smoothing)
    gradients = torch.autograd.grad(loss, list(own.values()))
    return Micro(len(x), loss.item(), torch.cat([gradient.flatten() for gradient in gradients]))


def flat(gradients: dict[str, torch.Tensor]) -> torch.Tensor:
    """All gradients in one vector; a missing one counts as zeros."""
    found = [gradients.get(name, torch.zeros(shape)).flatten() for name, shape in SHAPES.items()]
    return torch.cat(found).double().cpu()


def play(grader: Grader, purpose: str, sizes: list[list[list[int]]], once: bool = False) -> Played:
    """Draw weights and data for these micro-batches, and call the submission once a step."""
    generator = torch.Generator().manual_seed(grader.random(purpose).randrange(1 << 30))
    initial = {name: torch.randn(shape, generator=generator) / 2 for name, shape in SHAPES.items()}
    world, count = len(sizes), len(sizes[0])
    most = max(sum(own) for steps in sizes for own in steps)
    # Each rank's samples lie somewhere else, so that the ranks' gradients differ.
    x = torch.randn(world, count, most, FEATURES, generator=generator) + torch.randn(
        world, 1, 1, 1, generator=generator
    )
    y = torch.randint(0, CLASSES, (world, count, most), generator=generator)
    each = [{"x": x[rank], "y": y[rank], "sizes": sizes[rank]} for rank in range(world)]
    run = grader.run("steps", world, each=each, initial=initial, lr=LR, stale=STALE, once=once)
    return Played(run, x, y, sizes)


def main_run(grader: Grader) -> Played:
    """Equal micro-batches, then fewer of them, then a smaller last one; the same sizes on every rank."""
    return play(grader, "main", MAIN)


def uneven_run(grader: Grader) -> Played:
    """The ranks hold different numbers of micro-batches and of samples."""
    return play(grader, "uneven", UNEVEN)


def events(run: Run, rank: int, step: int) -> list[Mark | Collective]:
    """What a rank did during one call, in order."""
    report = run.ranks[rank]
    begins = [mark.number for mark in report.marks if mark.name == "call"]
    ends = [mark.number for mark in report.marks if mark.name == "done"]
    both: list[Mark | Collective] = [*report.marks, *report.collectives]
    inside = [event for event in both if begins[step] < event.number < ends[step]]
    return sorted(inside, key=lambda event: event.number)


def marks(run: Run, rank: int, step: int) -> list[str]:
    """The marks alone: `no_sync`, `ddp`, `forward 4`, `backward`."""
    return [event.name for event in events(run, rank, step) if isinstance(event, Mark)]


def carried(run: Run, rank: int, step: int) -> list[Collective]:
    """The collectives of one call that carry gradients, not a few numbers or DDP's own bookkeeping."""
    found = [event for event in events(run, rank, step) if isinstance(event, Collective)]
    return [one for one in found if one.nbytes > FREE and one.inside not in ("forward", "DDP()")]


def say_sizes(sizes: list[int]) -> str:
    """`micro-batches of 4, 4 and 1 samples`."""
    if len(sizes) == 1:
        return f"one micro-batch of {sizes[0]} samples"
    listed = ", ".join(map(str, sizes[:-1]))
    return f"micro-batches of {listed} and {sizes[-1]} samples"


def read_failure(grader: Grader, run: Run) -> Diagnosis | None:
    """Name what a failed run of this exercise usually means."""
    cause = run.cause
    assert cause is not None
    error = cause.error
    if error is not None and "generator" in error.message:
        return grader.diagnosis(
            "needs-a-sequence",
            f"Micro-batches came from a generator, and {names(cause.ranks)} raised {error}.",
            of=cause.ranks,
            at=error.frame,
        )
    held = run.observed("held")
    uneven = len({len(own[0]) for own in held if own}) > 1
    if cause.kind not in ("hang", "mismatch", "crashed") or not uneven:
        return None
    had = ", ".join(f"rank {rank} held {len(own[0])}" for rank, own in enumerate(held) if own)
    return grader.diagnosis(
        "collective-per-micro-batch",
        f"{cause.headline[0].upper()}{cause.headline[1:].rstrip('.')}. In the first step {had} micro-batches, "
        "and those with more called more collectives.",
        evidence=evidence(run),
        of=cause.ranks,
        at=next((row.frame for row in cause.rows if row.tensor.startswith("1 ")), cause.frame),
    )


# The gradient of a step ----------------------------------------------------------------------------------------------


def close(seen: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Equal but for the rounding of single precision; a wrong weight shows by a thousand times more."""
    return bool((seen - wanted).norm() <= 1e-4 * wanted.norm())


def factor_of(seen: torch.Tensor, wanted: torch.Tensor) -> float | None:
    """The number that `wanted` has to be multiplied by to become `seen`, if there is one."""
    factor = float(seen @ wanted / (wanted @ wanted))
    return factor if abs(factor) > 1e-6 and close(seen, wanted * factor) else None


def mean(vectors: list[torch.Tensor]) -> torch.Tensor:
    """What DDP does with the ranks' gradients."""
    return torch.stack(vectors).mean(0)


def weighted(micros: list[Micro], weights: list[float]) -> torch.Tensor:
    """The sum of the micro-batches' gradients with these weights."""
    none = torch.zeros(PAYLOAD // 4, dtype=torch.float64)
    return sum((micro.gradient * weight for micro, weight in zip(micros, weights, strict=True)), start=none)


def judge_gradient(grader: Grader, played: Played, step: int) -> None:
    """The gradients that the optimizer used, against those of the one big batch; fails with what they are instead."""
    world = len(played.sizes)
    ranks = [played.micros(rank, step) for rank in range(world)]
    total = sum(micro.count for own in ranks for micro in own)
    wanted = torch.stack([weighted(own, [micro.count / total for micro in own]) for own in ranks]).sum(0)
    seen = [flat(one[step]["used"][0]) for one in played.steps]
    wrong = [rank for rank in range(world) if not close(seen[rank], wanted)]
    if not wrong:
        return
    rank = wrong[0]
    sizes = [own[step] for own in played.sizes]
    alike = all(own == sizes[0] for own in sizes)
    held = f"with {say_sizes(sizes[0])} on every rank"
    if not alike:
        held = f"where {'; '.join(f'rank {r} held {say_sizes(own)}' for r, own in enumerate(sizes))}:"
    name, index = biggest(seen[rank] - wanted)
    what = (
        f"In the step {held} {name}.grad holds {seen[rank][index]:.4f} on rank {rank} where the one big batch of "
        f"{total} samples gives {wanted[index]:.4f}."
    )
    explain_gradient(grader, played, step, ranks, seen, wanted, wrong, what)


def biggest(difference: torch.Tensor) -> tuple[str, int]:
    """Where a gradient is furthest from what it should be: the parameter's name, and the place in the vector."""
    index = at = int(difference.abs().argmax())
    for name, shape in SHAPES.items():
        if at < torch.Size(shape).numel():
            return f"{name}", index
        at -= torch.Size(shape).numel()
    raise AssertionError


def explain_gradient(
    grader: Grader, played: Played, step: int, ranks: list[list[Micro]], seen: list[torch.Tensor], wanted: torch.Tensor,
    wrong: list[int], what: str,
) -> NoReturn:  # fmt: skip
    """Find the mistake that gives these gradients."""
    world, total = len(ranks), sum(micro.count for own in ranks for micro in own)
    everybody = range(world)
    ragged = any(micro.count != own[0].count for own in ranks for micro in own)

    def all_are(predicted: list[torch.Tensor]) -> bool:
        return all(close(seen[rank], predicted[rank]) for rank in everybody)

    surplus = seen[wrong[0]] - wanted
    if step == 0 and surplus.std() < 1e-4 * surplus.abs().mean():
        grader.fail(
            "missing-zero-grad",
            f"{what} Every number is {surplus.mean():.4g} too large: the gradients held {STALE} before the call, and that "
            "was added to.",
            of=wrong,
            at=r"zero_grad || " + BACKWARD,
        )
    # Some of it was sent too early: what came afterwards is the rank's own.
    shares = [[micro.count * world / total for micro in own] for own in ranks]
    for sent in range(max(map(len, ranks)) - 1):
        early = mean([weighted(own[: sent + 1], share[: sent + 1]) for own, share in zip(ranks, shares, strict=True)])
        late = [
            weighted(own[sent + 1 :], share[sent + 1 :]) if len(own) > sent + 1 else torch.zeros_like(wanted)
            for own, share in zip(ranks, shares, strict=True)
        ]
        if all_are([early + own for own in late]):
            grader.fail(
                "syncs-too-early",
                f"{what} The gradients were averaged over the ranks after micro-batch {sent + 1}; those of the "
                f"{len(ranks[0]) - sent - 1} after it stayed local, and differ from rank to rank.",
                of=everybody,
                at=SYNC,
            )
    if all_are([mean([weighted(own, [1.0] * len(own)) for own in ranks])] * world) and len(ranks[0]) > 1:
        grader.fail(
            "never-scales",
            f"{what} It is the sum of the gradients of {len(ranks[0])} mean losses.",
            of=everybody,
            at=BACKWARD,
        )
    if all_are([mean([weighted(own, [float(micro.count) for micro in own]) for own in ranks])] * world):
        grader.fail("never-scales", f"{what} It is the sum over the samples, undivided.", of=everybody, at=BACKWARD)
    if world > 1 and all_are([wanted / world] * world):
        grader.fail(
            "double-averaging",
            f"{what} It is {world} times too small: DDP has divided by the {world} ranks once already.",
            of=everybody,
            at=SCALE,
        )
    if ragged and all_are([mean([weighted(own, [1 / len(own)] * len(own)) for own in ranks])] * world):
        grader.fail(
            "scales-by-count",
            f"{what} Each mean loss was divided by the number of micro-batches, so that a sample of the small one counts "
            f"{max(micro.count for micro in ranks[0]) / min(micro.count for micro in ranks[0]):g} times as much as the "
            "others.",
            of=everybody,
            at=SCALE,
        )
    means = [weighted(own, [micro.count / sum(one.count for one in own) for micro in own]) for own in ranks]
    if all_are([mean(means)] * world):
        counts = [sum(micro.count for micro in own) for own in ranks]
        grader.fail(
            "weights-ranks-equally",
            f"{what} It is the mean of the ranks' means. They held {counts} samples, so a sample of rank "
            f"{counts.index(min(counts))} counts {max(counts) / min(counts):.3g} times as much as one of rank "
            f"{counts.index(max(counts))}.",
            of=everybody,
            at=SCALE,
        )
    summed = mean([weighted(own, [float(micro.count) for micro in own]) for own in ranks])
    counts = [sum(micro.count for micro in own) for own in ranks]
    if len(set(counts)) > 1 and any(all_are([summed * n / count for count in counts]) for n in (1, world)):
        grader.fail(
            "weights-ranks-equally",
            f"{what} Every rank divided the same sum by its own number of samples, {counts}: from here on the ranks take "
            "different steps.",
            of=everybody,
            at=SCALE,
        )
    if len(ranks[0]) > 1 and factor_of(seen[wrong[0]], mean([own[-1].gradient for own in ranks])) is not None:
        grader.fail(
            "zero-grad-between",
            f"{what} It is the gradient of the last micro-batch alone; what the {len(ranks[0]) - 1} before it had added "
            "up is gone.",
            of=everybody,
            at=r"zero_grad || grad = None || " + LOOP,
        )
    if len(ranks[0]) > 1 and factor_of(seen[wrong[0]], mean([weighted(o[:-1], [1.0] * (len(o) - 1)) for o in ranks])):
        grader.fail(
            "drops-the-tail",
            f"{what} The last micro-batch, of {ranks[0][-1].count} sample{'s' * (ranks[0][-1].count > 1)}, is not in it.",
            of=everybody,
            at=r"if .*(len|size|shape) || continue|break || " + LOOP,
        )
    plain = [played.micros(rank, step, smoothing=0.0) for rank in everybody]
    other = torch.stack([weighted(own, [micro.count / total for micro in own]) for own in plain]).sum(0)
    if all_are([other] * world):
        grader.fail(
            "ignores-loss-fn",
            f"{what} It is the gradient of plain cross-entropy, not of the loss_fn that was given.",
            of=everybody,
            at=r"cross_entropy|CrossEntropyLoss || " + BACKWARD,
        )
    factor = factor_of(seen[wrong[0]], wanted)
    if factor is not None and len(wrong) == world:
        grader.fail("wrong-scale", f"{what} It is {factor:.4g} times that, throughout.", of=wrong, at=SCALE)
    grader.fail("wrong-gradient", what, of=wrong, at=BACKWARD)


# The checks ----------------------------------------------------------------------------------------------------------


def test_steps(grader: Grader) -> None:
    """one call is one step of the optimizer, on every rank"""
    played = main_run(grader)
    for step in range(len(MAIN[0])):
        taken = [len(one[step]["used"]) for one in played.steps]
        held = say_sizes(MAIN[0][step])
        without = [rank for rank, count in enumerate(taken) if not count]
        if len(without) == WORLD:
            grader.fail("never-steps", f"A call with {held} took no step at all.", of=without, at=STEP)
        if without:
            grader.fail(
                "steps-on-some-ranks",
                f"Given {held}, {names(r for r in range(WORLD) if taken[r])} took a step and {names(without)} took none: "
                "their parameters differ from now on.",
                of=without,
                at=STEP,
            )
        if max(taken) > 1:
            grader.fail(
                "steps-per-micro-batch",
                f"One call with {held} took {max(taken)} steps.",
                of=[rank for rank, count in enumerate(taken) if count > 1],
                at=STEP,
            )


@pytest.mark.needs("test_steps")
def test_memory(grader: Grader) -> None:
    """micro-batches go through DDP's forward and backward one at a time"""
    run = main_run(grader).run
    sizes = MAIN[0][EQUAL]
    for rank in range(WORLD):
        seen = marks(run, rank, EQUAL)
        forwards = [name for name in seen if name.startswith("forward")]
        if "ddp" not in seen and forwards:
            grader.fail(
                "bypasses-ddp",
                f"Rank {rank} ran the model {len(forwards)} times, and never through the DDP wrapper.",
                of=[rank],
                at=r"\.module || " + FORWARD,
            )
        largest = max((int(name.split()[1]) for name in forwards), default=0)
        if largest > max(sizes):
            grader.fail(
                "one-big-batch",
                f"Rank {rank} was given {say_sizes(sizes)}, and its model met {largest} samples in one forward.",
                of=[rank],
                at=r"cat\( || stack\( || " + FORWARD,
            )
        open_, most = 0, 0
        for name in seen:
            open_ += name.startswith("forward") - (name == "backward")
            most = max(most, open_)
        if most > 1:
            grader.fail(
                "keeps-all-graphs",
                f"Rank {rank} ran the forward of {most} micro-batches before the first backward, and held the activations "
                f"of all {most}.",
                of=[rank],
                at=BACKWARD,
            )


@pytest.mark.needs("test_memory")
def test_sends_once(grader: Grader) -> None:
    """a step sends the gradients once, however many micro-batches it has"""
    played = main_run(grader)
    for step, rank in ((step, rank) for step in range(len(MAIN[0])) for rank in range(WORLD)):
        sent = carried(played.run, rank, step)
        total = sum(one.nbytes for one in sent)
        seen = marks(played.run, rank, step)
        held = say_sizes(MAIN[0][step])
        if total < PAYLOAD / 2:
            ends = [flat(one[step]["end"]) for one in played.steps]
            apart = max(float((end - ends[0]).abs().max()) for end in ends)
            grader.fail(
                "never-synchronises",
                f"In the step with {held} rank {rank} sent {f'{total} of its' if total else 'none of its'} {PAYLOAD} bytes "
                f"of gradients. After it the ranks' parameters are up to {apart:.2g} apart.",
                of=range(WORLD),
                at=SYNC,
            )
        if total < 1.5 * PAYLOAD:
            continue
        what = (
            f"In the step with {held} rank {rank} put {total} bytes into {len(sent)} gradient collectives; its gradients "
            f"have {PAYLOAD} bytes."
        )
        by_ddp = sum(one.nbytes for one in sent if one.inside == "backward")
        if PAYLOAD / 2 < by_ddp < 1.5 * PAYLOAD:
            again = next(one.frame for one in sent if one.inside != "backward")
            grader.fail("double-work", f"{what} DDP had averaged them in backward.", of=[rank], at=again)
        if "no_sync" in seen and seen.index("no_sync") > seen.index("ddp"):
            grader.fail(
                "forward-outside-no-sync",
                f"{what} no_sync was entered {seen.count('no_sync')} times, each time after the forward.",
                of=[rank],
                at=FORWARD,
            )
        grader.fail("syncs-every-micro-batch", what, of=[rank], at=SYNC if "no_sync" in seen else BACKWARD)


@pytest.mark.needs("test_sends_once")
def test_gradient(grader: Grader) -> None:
    """the gradient is that of the one big batch"""
    played = main_run(grader)
    judge_gradient(grader, played, EQUAL)
    judge_gradient(grader, played, EQUAL + 1)


@pytest.mark.needs("test_gradient")
def test_update(grader: Grader) -> None:
    """the optimizer takes its step as it was set, and the ranks stay equal"""
    played = main_run(grader)
    for step in range(len(MAIN[0])):
        for rank, one in enumerate(played.steps):
            moved = flat(one[step]["end"]) - flat(one[step]["start"])
            wanted = -LR * flat(one[step]["used"][0])
            if (moved - wanted).norm() > 1e-3 * wanted.norm():
                factor = factor_of(moved, wanted)
                by = f"{factor:.3g} times as far as" if factor else "not by what"
                grader.fail(
                    "changes-the-update",
                    f"Step {step} moved the parameters of rank {rank} {by} the optimizer's learning rate of {LR} says.",
                    of=[rank],
                    at=r"lr || param_groups || " + STEP,
                )


@pytest.mark.needs("test_gradient")
def test_ragged(grader: Grader) -> None:
    """a smaller last micro-batch counts by its samples"""
    judge_gradient(grader, main_run(grader), RAGGED)


@pytest.mark.needs("test_ragged")
def test_loss(grader: Grader) -> None:
    """it returns the mean loss over all samples of all ranks"""
    played = main_run(grader)
    for step in range(len(MAIN[0])):
        judge_loss(grader, played, step)


def judge_loss(grader: Grader, played: Played, step: int) -> None:
    """What each rank's call returned, against the mean over all samples; fails with what it is instead."""
    ranks = [played.micros(rank, step) for rank in range(len(played.sizes))]
    total = sum(micro.count for own in ranks for micro in own)
    wanted = sum(micro.loss * micro.count for own in ranks for micro in own) / total
    own_means = [sum(m.loss * m.count for m in own) / sum(m.count for m in own) for own in ranks]
    for rank, one in enumerate(played.steps):
        found = one[step]
        if not found["is_float"]:
            graph = ", which holds on to the graph of a micro-batch" if found["has_graph"] else ""
            grader.fail(
                "returns-a-tensor",
                f"Rank {rank} got a {found['type']} back{graph}, where a float is promised.",
                of=[rank],
                at=RETURN,
            )
        loss = found["loss"]

        def is_(value: float, loss: float = loss) -> bool:
            return abs(loss - value) <= 2e-5 * abs(value)  # single precision rounds by 1e-7

        if is_(wanted):
            continue
        what = f"In step {step} rank {rank} returned {loss:.4f}; the mean over all {total} samples is {wanted:.4f}."
        if len(ranks[rank]) > 1 and (is_(ranks[rank][-1].loss) or is_(sum(own[-1].loss for own in ranks) / len(ranks))):
            grader.fail(
                "last-micro-batch-loss", f"{what} It is the loss of the last micro-batch.", of=[rank], at=RETURN
            )
        by_count = [sum(m.loss for m in own) / len(own) for own in ranks]
        if is_(own_means[rank]) or is_(by_count[rank]):
            grader.fail("loss-of-one-rank", f"{what} It is the mean over rank {rank}'s own.", of=[rank], at=RETURN)
        if is_(sum(by_count) / len(ranks)) or is_(sum(own_means) / len(ranks)):
            of_what = "micro-batches" if not is_(sum(own_means) / len(ranks)) else "ranks"
            grader.fail(
                "mean-of-means-loss",
                f"{what} It is the mean of the means of {of_what}, which are of different sizes.",
                of=[rank],
                at=RETURN,
            )
        grader.fail("wrong-step-loss", f"{what} It is {loss / wanted:.4g} times as large.", of=[rank], at=RETURN)


@pytest.mark.needs("test_ragged")
def test_uneven_ranks(grader: Grader) -> None:
    """ranks may hold different numbers of micro-batches and of samples"""
    played = uneven_run(grader)
    for step in range(len(UNEVEN[0])):
        judge_gradient(grader, played, step)


@pytest.mark.needs("test_loss", "test_uneven_ranks")
def test_uneven_loss(grader: Grader) -> None:
    """the loss counts samples, also where ranks hold different numbers of them"""
    played = uneven_run(grader)
    for step in range(len(UNEVEN[0])):
        judge_loss(grader, played, step)


@pytest.mark.needs("test_ragged")
def test_iterator(grader: Grader) -> None:
    """micro-batches may come from an iterator, which has no length and can be read only once"""
    played = play(grader, "once", ONCE, once=True)
    for step, sizes in enumerate(ONCE[0]):
        forwards = [name for name in marks(played.run, 0, step) if name.startswith("forward")]
        if len(forwards) < len(sizes):
            grader.fail(
                "needs-a-sequence",
                f"A generator gave {say_sizes(sizes)}, and the model met {len(forwards)} of {len(sizes)}: the rest had been "
                "read before.",
                of=range(WORLD),
                at=LOOP,
            )
        judge_gradient(grader, played, step)


@pytest.mark.needs("test_steps")
def test_empty(grader: Grader) -> None:
    """without any micro-batch it raises ValueError, and nothing changes"""
    initial = {name: torch.ones(shape) for name, shape in SHAPES.items()}
    run = grader.run("empty", WORLD, initial=initial, lr=LR)
    for rank, error in enumerate(run.observed("error")):
        changed = run.observed("changed")[rank]
        after = f" It had taken a step: {changed[0]} has changed." if changed else ""
        if error != "ValueError":
            said = run.observed("message")[rank]
            instead = f"raised {error}: {said.rstrip('.')}" if error else f"returned {run.observed('answer')[rank]}"
            grader.fail(
                "empty-not-refused", f"Given no micro-batch, rank {rank} {instead}.{after}", of=[rank], at=FUNCTION
            )
        if changed:
            grader.fail("empty-not-refused", f"Rank {rank} raised ValueError.{after}", of=[rank], at=STEP)


@pytest.mark.needs("test_ragged")
def test_alone(grader: Grader) -> None:
    """one rank alone trains as well"""
    judge_gradient(grader, play(grader, "alone", [[[3, 2]]]), 0)
