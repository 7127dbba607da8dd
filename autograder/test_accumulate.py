"""What `train_step` of accumulate has to do.

    train_step(ddp_model, micro_batches, loss_fn, optimizer) -> float

Every rank is given micro-batches that were drawn here. From their gradients follow that of the one big batch and that of
every usual mistake (`judging.accumulate`). How often the gradients crossed the network is read from the recorded
collectives.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from judging.accumulate import (
    FREE,
    LR,
    NUMBERS,
    PAYLOAD,
    SHAPES,
    STALE,
    Gradients,
    Micro,
    Played,
    Step,
    play,
    times,
    whole,
)

from lockstep.grading import (
    Cause,
    Diagnosis,
    Each,
    Grader,
    Hypothesis,
    Run,
    Tolerance,
    difference,
    ending,
    equal,
    evidence,
    factor_of,
    names,
    show,
)

WORLD = 3  # not a power of two: a fixed 2 or 4 in the code shows
EQUAL, RAGGED = 0, 2  # the steps of the main run
MAIN = [[[4, 4, 4], [2, 2, 2, 2, 2], [4, 4, 1]]] * WORLD
UNEVEN = [[[4, 2, 4, 1], [2]], [[4, 2], [3, 3]], [[3], [4, 4, 2]]]
ONCE = [[[4, 4], [3]]] * WORLD
SINGLE = Tolerance(relative=2e-5, absolute=0.0, norm=1e-4)  # a wrong weight shows a thousand times more
MOVED = Tolerance(norm=1e-3)

FUNCTION = r"def train_step"
SYNC = r"no_sync || require_backward_grad_sync || " + FUNCTION
FORWARD = r"(ddp_)?model\(|net\( || " + FUNCTION
BACKWARD = r"\.backward\( || " + FUNCTION
SCALE = r"loss\w* */|loss\w* *\*|/= || \.mul|\.div || " + BACKWARD
STEP = r"\.step\( || " + FUNCTION
LOOP = r"for .* in .*micro || for .* in || " + FUNCTION
RETURN = r"^\s+return (?!None) || return || " + FUNCTION


def main_run(grader: Grader) -> Played:
    """Equal micro-batches, then more of them, then a smaller last one; the same sizes on every rank."""
    return play(grader, "main", MAIN)


def uneven_run(grader: Grader) -> Played:
    """The ranks hold different numbers of micro-batches and of samples."""
    return play(grader, "uneven", UNEVEN)


def say_sizes(sizes: list[int]) -> str:
    """`micro-batches of 4, 4 and 1 samples`."""
    if len(sizes) == 1:
        return f"one micro-batch of {sizes[0]} samples"
    return f"micro-batches of {', '.join(map(str, sizes[:-1]))} and {sizes[-1]} samples"


def say_held(step: Step) -> str:
    """`In the step with micro-batches of 4 and 4 samples on every rank`."""
    if all(own == step.sizes[0] for own in step.sizes):
        return f"In the step with {say_sizes(step.sizes[0])} on every rank"
    held = "; ".join(f"rank {rank} held {say_sizes(own)}" for rank, own in enumerate(step.sizes))
    return f"In the step where {held},"


def read_failure(grader: Grader, run: Run, cause: Cause) -> Diagnosis | None:
    """Name what a failed run of this exercise usually means."""
    error = cause.error
    if error is not None and any(run.observed("once")):
        said = f"Micro-batches came from an iterable that can be read once, and {names(cause.ranks)} raised {error}."
        return grader.diagnosis("needs-a-sequence", said, of=cause.ranks, at=error.frame)
    none = error is not None and ("NoneType" in error.message or "does not require grad" in error.message)
    if error is not None and none and any(run.observed("special")):
        said = (
            f"{names(cause.ranks).capitalize()} raised {error}. A parameter of the model is frozen: its grad is None."
        )
        return grader.diagnosis("trips-over-none", said, of=cause.ranks, at=error.frame)
    held = run.observed("held")
    uneven = len({len(own[0]) for own in held if own}) > 1
    if cause.kind not in ("hang", "mismatch", "crashed") or not uneven:
        return None
    number = min(len(own or []) for own in run.observed("steps"))  # of the step that failed
    sizes = [own[min(number, len(own) - 1)] if own else [] for own in held]
    had = ", ".join(f"rank {rank} held {len(own)}" for rank, own in enumerate(sizes) if own)
    called = [(rank, *call) for rank in range(WORLD) if sizes[rank] for call in last_call(run, rank)]
    where = ", ".join(
        f"{names([r])} called {kind} after {met} of its {len(sizes[r])} micro-batches" for r, kind, met in called
    )
    said = f"In step {number} {had} micro-batches, and the ranks stopped calling the same collectives."
    said = f"{said} {where[:1].upper()}{where[1:]}.{ending(cause)}" if where else f"{said}{ending(cause)}"
    at = next((row.frame for row in cause.rows if row.tensor.startswith("1 ")), cause.frame)
    before_last = bool(called) and all(met == len(sizes[rank]) - 1 for rank, _, met in called)
    id = "collective-between-forwards" if before_last else "collective-per-micro-batch"
    return grader.diagnosis(id, said, evidence=evidence(run), of=cause.ranks, at=at)


def last_call(run: Run, rank: int) -> list[tuple[str, int]]:
    """The last collective of a rank in the step that failed, and the forwards before it; none if it was DDP's."""
    marks = run.ranks[rank].marks
    begin = max((mark.number for mark in marks if mark.name == "call"), default=0)
    met = [mark.number for mark in marks if mark.name.startswith("forward ") and mark.number > begin]
    calls = [call for call in run.ranks[rank].collectives if call.number > begin]
    return [(call.kind, sum(number < call.number for number in met)) for call in calls[-1:] if not call.inside]


# What each mistake makes of the gradient, and of the loss --------------------------------------------------------------


def gradients_of_mistakes(played: Played, number: int) -> list[Hypothesis]:
    """The mistakes that give another gradient in this step. In the first, gradients held STALE or nan before the call."""
    step, first, before = played.steps[number], number == 0, played.steps[0].total
    used, right, world, counts = step.used, step.right, len(step.ranks), step.counts
    many = max(map(len, step.ranks))
    sizes = sorted(micro.count for own in step.ranks for micro in own)

    def alone(own: list[Micro], micro: Micro) -> float:
        return micro.count / sum(one.count for one in own)

    def multiple(gradients: Gradients) -> Callable[[], Gradients | None]:
        """These gradients times any number, as long as that gives what was used."""
        return lambda: times(gradients, factor_of(used[0], gradients, SINGLE) or torch.nan)

    def partly(says: str, *names: str) -> Hypothesis:
        """Only the gradients with these names are some number times as large as they should be."""
        seen, wanted = ({name: of[name] for name in names} for of in (used[0], right))
        factor = factor_of(seen, wanted, SINGLE) or torch.nan
        gives = {**right, **times(wanted, factor)}
        return Hypothesis("wrong-scale", says.format(show(factor)), gives, SCALE)

    def guessed(says: str, samples: int) -> Hypothesis:
        """The sum over the samples was divided by a wrong number of them."""
        says = f"The sum over the samples was divided by {samples}, {says}; this step has {step.total} samples."
        return Hypothesis("wrong-scale", says, times(right, step.total / samples), SCALE)

    summed = step.mean(lambda own, micro: micro.count)
    least, most = counts.index(min(counts)), counts.index(max(counts))
    early = "The gradients were averaged after micro-batch {}; those after it stayed local, and differ by rank."
    last = "It is the gradient of the last micro-batch alone; what the earlier ones had added up is gone."
    stale = "Every number is {:g} too large: the gradients of {} ranks held {:g} before the call, and the new gradients were added to that."
    by_count = f"Each mean loss was divided by the number of micro-batches, so that a sample of the small one counts {sizes[-1] / sizes[0]:g} times as much as the others."
    by_rank = f"It is the mean of the ranks' means. They held {counts} samples, so a sample of rank {least} counts {max(counts) / min(counts):.3g} times as much as one of rank {most}."
    apart = sum(float((used[0][name] - right[name]).sum()) for name in right) / sum(NUMBERS)
    scaled = f"Every number is {apart:.3g} too large: the gradients held {STALE:g} before the call, and the new ones were added to that and scaled with it."
    own_count = f"Every rank divided the same sum by its own number of samples, {counts}: from here on the ranks take different steps."
    nan = "The gradients held nan before the call, and 0 * nan is nan: set `grad` to None, or fill it with zeros."
    by_rate = "It is the sum over the samples; the learning rate was divided by their number instead. With momentum, weight decay or Adam that is another step."
    numel = f"Each mean loss was weighted by the numbers in its y; the last y has two columns, {2 * step.sizes[0][-1]} numbers for {step.sizes[0][-1]} samples."
    divided = equal(step.moved[0], times(right, -LR), MOVED)
    factor = factor_of(used[0], right, SINGLE)
    return [
        *[Hypothesis("missing-zero-grad", nan, times(right, torch.nan), r"\* *0|0\.? *\*|mul || zero_grad || " + BACKWARD)] * (first and played.special),
        *[Hypothesis("changes-the-update", by_rate, summed, r"lr\b || param_groups || " + STEP)] * divided,
        *(Hypothesis("missing-zero-grad", stale.format(STALE * n / world, n, STALE), {name: g + STALE * n / world for name, g in right.items()},
                     r"zero_grad || " + BACKWARD) for n in range(1, world + 1) if first),
        *[Hypothesis("missing-zero-grad", scaled, {name: g + apart for name, g in right.items()}, r"zero_grad || " + BACKWARD)] * first,
        *(Hypothesis("syncs-too-early", early.format(n), Each(step.sent_after(n)), SYNC) for n in range(1, many)),
        Hypothesis("never-scales", f"It is the sum of the gradients of {len(step.ranks[0])} mean losses.", step.mean(lambda *_: 1.0)),
        Hypothesis("never-scales", "It is the sum over the samples, undivided.", summed),
        Hypothesis("double-averaging", f"It is {world} times too small: DDP has already divided by the {world} ranks once already.", times(right, 1 / world), SCALE),
        Hypothesis("scales-by-count", by_count, step.mean(lambda own, micro: 1 / len(own)), SCALE),
        Hypothesis("weights-ranks-equally", by_rank, step.mean(alone), SCALE),
        *(Hypothesis("weights-ranks-equally", own_count, Each([times(summed, n / count) for count in counts]), SCALE) for n in (1, world)),
        *[Hypothesis("wrong-gradient", numel, multiple(step.mean(lambda own, micro: micro.count * (1 + (micro is own[-1])))), r"numel || " + SCALE)] * played.special,
        Hypothesis("zero-grad-between", last, multiple(step.mean(lambda own, micro: micro is own[-1])), r"zero_grad || grad = None || " + LOOP),
        Hypothesis("drops-the-tail", "The last micro-batch is missing from it.", multiple(step.mean(lambda own, micro: micro is not own[-1])), r"if .*(len|size|shape) || continue|break || " + LOOP),
        Hypothesis("ignores-loss-fn", "It is the gradient of plain cross-entropy, not of the loss_fn that was given.", step.mean(step.share, step.plain), r"cross_entropy|CrossEntropyLoss || " + BACKWARD),
        *[guessed("as many as the first step had", before)] * (before != step.total),
        guessed("as if all but a rank's last micro-batch were as large as its first", sum(own[0].count * (len(own) - 1) + own[-1].count for own in step.ranks)),
        guessed("as if all micro-batches of a rank were as large as its first", sum(own[0].count * len(own) for own in step.ranks)),
        Hypothesis("wrong-scale", f"It is {show(factor)} times that, throughout.", multiple(right), SCALE),
        *[partly("The gradients of second.weight and second.bias, which two layers share, are {} times what they should be; the others are right.", "second.weight", "second.bias")] * played.special,
        partly("The gradients of the optimizer's second group are {} times what they should be; those of its first group are right.", "first.bias", "second.weight", "second.bias"),
    ]  # fmt: skip


def judge_gradient(grader: Grader, played: Played, number: int) -> None:
    """The gradients that the optimizer used, against those of the one big batch."""
    step = played.steps[number]
    mistakes = gradients_of_mistakes(played, number)
    what = f"{say_held(step)} the gradient"
    grader.explain(what, step.used, step.right, mistakes, otherwise="wrong-gradient", at=BACKWARD, tolerance=SINGLE)


def losses_of_mistakes(step: Step, right: float) -> list[Hypothesis]:
    """The mistakes that give another loss."""
    ranks, world = step.ranks, len(step.ranks)
    last = [own[-1].loss for own in ranks]
    sums = [sum(micro.loss * micro.count for micro in own) for own in ranks]
    own_means = [total / count for total, count in zip(sums, step.counts, strict=True)]
    by_count = [sum(micro.loss for micro in own) / len(own) for own in ranks]
    factor = factor_of(step.seen[0]["loss"], right, SINGLE) or torch.nan
    table = [
        ("last-micro-batch-loss", "It is the loss of the last micro-batch.", Each(last)),
        ("last-micro-batch-loss", "It is the loss of the last micro-batch, averaged over the ranks.", sum(last) / world),
        ("mean-of-means-loss", "It is the mean of the means of ranks, which are of different sizes.", sum(own_means) / world),
        ("mean-of-means-loss", "It is the mean of the means of micro-batches, which are of different sizes.", sum(by_count) / world),
        ("loss-of-one-rank", "It is the mean over the rank's own samples.", Each(own_means)),
        ("loss-of-one-rank", "It is the mean over the rank's own micro-batches.", Each(by_count)),
        ("loss-after-update", "It is the loss after the step, with the new parameters.", step.loss(step.after)),
        ("wrong-step-loss", f"It is the rank's own part: {world} such parts give the mean.", Each([own / step.total for own in sums])),
        ("wrong-step-loss", f"The sum of the losses, {sums[0]:.4g} on rank 0, lost its decimals: was it in a tensor of x's type, int64?", sum(map(int, sums)) / step.total),
        ("wrong-step-loss", f"It is {factor:.4g} times as large.", right * factor),
    ]  # fmt: skip
    return [Hypothesis(*mistake) for mistake in table]


def judge_losses(grader: Grader, played: Played) -> None:
    """What each rank's call returned, against the mean over all samples."""
    for number, step in enumerate(played.steps):
        for rank, one in enumerate(step.seen):
            graph = ", which holds on to the graph of a micro-batch" if one["has_graph"] else ""
            said = f"Rank {rank} got a {one['type']} back{graph}, instead of a float."
            grader.fail_on([rank] if not one["is_float"] else [], "returns-a-tensor", said, at=RETURN)
        right = step.loss(step.ranks)
        seen, mistakes = [one["loss"] for one in step.seen], losses_of_mistakes(step, right)
        what = f"What step {number} returned, the mean loss over all {step.total} samples,"
        grader.explain(what, seen, right, mistakes, otherwise="wrong-step-loss", at=RETURN, tolerance=SINGLE)


# The checks ----------------------------------------------------------------------------------------------------------


def test_steps(grader: Grader) -> None:
    """one call is one step of the optimizer, on every rank"""
    for step in main_run(grader).steps:
        taken = {rank: len(one["used"]) for rank, one in enumerate(step.seen)}
        held, some = say_sizes(step.sizes[0]), [rank for rank in taken if taken[rank]]
        if not some:
            grader.fail("never-steps", f"A call with {held} took no step at all.", of=taken, at=STEP)
        grader.fail_on(
            set(taken) - set(some), "steps-on-some-ranks", f"Given {held}, {names(some)} took a step and {{ranks}} took none: "
            "their parameters differ from now on.", at=STEP,
        )  # fmt: skip
        said = f"One call with {held} took {max(taken.values())} steps on {{ranks}}."
        grader.fail_on([rank for rank in taken if taken[rank] > 1], "steps-per-micro-batch", said, at=STEP)


@pytest.mark.needs("test_steps")
def test_memory(grader: Grader) -> None:
    """micro-batches go through forward and backward one at a time"""
    played, sizes = main_run(grader), MAIN[0][EQUAL]
    for rank in range(WORLD):
        largest = max(played.numbers(rank, EQUAL, "forward"), default=0)
        if largest > max(sizes):
            said = f"Rank {rank} was given {say_sizes(sizes)}, and its model met {largest} samples in one forward."
            grader.fail("one-big-batch", said, of=[rank], at=r"cat\( || stack\( || " + FORWARD)
        most = max(played.numbers(rank, EQUAL, "held"), default=0)
        if most:
            said = f"During one forward, rank {rank} still held the activations of {most} earlier micro-batches: no backward had freed them."
            grader.fail("keeps-all-graphs", said, of=[rank], at=r"retain_graph || " + BACKWARD)


@pytest.mark.needs("test_memory")
def test_sends_once(grader: Grader) -> None:
    """a step sends the gradients once, however many micro-batches it has"""
    played = main_run(grader)
    for number, rank in ((number, rank) for number in range(len(MAIN[0])) for rank in range(WORLD)):
        judge_traffic(grader, played, number, rank)


def judge_traffic(grader: Grader, played: Played, number: int, rank: int) -> None:
    """What one rank put into collectives in one step, against what its gradients have."""
    step, sent, seen = played.steps[number], played.carried(rank, number), played.marks(rank, number)
    total, everybody = sum(one.nbytes for one in sent), range(WORLD)
    held = f"In the step with {say_sizes(step.sizes[0])} rank {rank}"
    if total < PAYLOAD / 2:
        ends = [whole(one["end"]) for one in step.seen]
        apart = (
            max(found.distance for end in ends if (found := difference(end, ends[0]))) if ends[1:] != ends[:1] else 0
        )
        none = f"{held} sent {f'{total} of its' if total else 'none of its'} {PAYLOAD} bytes of gradients."
        said = f"{none} After it the ranks' parameters are up to {apart:.2g} apart."
        if "ddp" not in seen:
            said += " The forward never went through the DDP wrapper."
            grader.fail("bypasses-ddp", said, of=everybody, at=r"\.module || " + FORWARD)
        grader.fail("never-synchronizes", said, of=everybody, at=SYNC)
    if total < 1.5 * PAYLOAD:
        for one in (one for one in sent if one.nbytes <= total - PAYLOAD):  # what is left are the gradients
            said = f"{held} called {one.kind} with {one.nbytes} bytes beside its {PAYLOAD} bytes of gradients; only those of up to {FREE} bytes are exempt."
            grader.fail("large-beside-gradients", said, of=[rank], at=one.frame)
        return
    what = f"{held} put {total} bytes into {len(sent)} gradient collectives; its gradients have {PAYLOAD} bytes."
    if PAYLOAD / 2 < sum(one.nbytes for one in sent if one.inside == "backward") < 1.5 * PAYLOAD:
        again = next(one.frame for one in sent if one.inside != "backward")
        grader.fail("double-work", f"{what} DDP had averaged them in backward.", of=[rank], at=again)
    if "no_sync" in seen and seen.index("no_sync") > seen.index("ddp"):
        late = f"{what} no_sync was entered {seen.count('no_sync')} times, each time after the forward."
        grader.fail("forward-outside-no-sync", late, of=[rank], at=FORWARD)
    grader.fail("syncs-every-micro-batch", what, of=[rank], at=SYNC if "no_sync" in seen else BACKWARD)


@pytest.mark.needs("test_sends_once")
def test_gradient(grader: Grader) -> None:
    """the gradient is that of the one big batch"""
    for number in (EQUAL, EQUAL + 1):
        judge_gradient(grader, main_run(grader), number)


@pytest.mark.needs("test_gradient")
def test_update(grader: Grader) -> None:
    """the optimizer takes its step as it was set, and the ranks stay equal"""
    for number, step in enumerate(main_run(grader).steps):
        wanted = [times(used, -LR) for used in step.used]
        factor = factor_of(step.moved[0], wanted[0], MOVED)
        says = f"That is {show(factor)} times what the optimizer's learning rate of {LR} says."
        grader.explain(
            f"The way that step {number} moved a parameter", step.moved, Each(wanted),
            [Hypothesis("changes-the-update", says, Each([times(way, factor or torch.nan) for way in wanted]))],
            otherwise="changes-the-update", at=r"lr || param_groups || " + STEP, tolerance=MOVED,
        )  # fmt: skip


@pytest.mark.needs("test_gradient")
def test_ragged(grader: Grader) -> None:
    """a smaller last micro-batch counts by its samples"""
    judge_gradient(grader, main_run(grader), RAGGED)


@pytest.mark.needs("test_ragged")
def test_loss(grader: Grader) -> None:
    """it returns the mean loss over all samples of all ranks"""
    judge_losses(grader, main_run(grader))


@pytest.mark.needs("test_ragged")
def test_uneven_ranks(grader: Grader) -> None:
    """ranks may hold different numbers of micro-batches and of samples"""
    for number in range(len(UNEVEN[0])):
        judge_gradient(grader, uneven_run(grader), number)


@pytest.mark.needs("test_loss", "test_uneven_ranks")
def test_uneven_loss(grader: Grader) -> None:
    """the loss counts samples, even if ranks hold different numbers of them"""
    judge_losses(grader, uneven_run(grader))


@pytest.mark.needs("test_ragged")
def test_iterator(grader: Grader) -> None:
    """micro-batches may come from an iterator, which has no length and can be read only once"""
    played = play(grader, "once", ONCE, once=True)
    for number, sizes in enumerate(ONCE[0]):
        met = len(played.numbers(0, number, "forward"))
        said = f"A generator gave {say_sizes(sizes)}, and the model saw only {met} of {len(sizes)}: the code had already read the rest."
        grader.fail_on(range(WORLD) if met < len(sizes) else (), "needs-a-sequence", said, at=LOOP)
        judge_gradient(grader, played, number)
    judge_empty(grader, "iterator")


def judge_empty(grader: Grader, kind: str) -> None:
    """What a call without any micro-batch did."""
    run = grader.run("empty", WORLD, initial={name: torch.ones(shape) for name, shape in SHAPES.items()}, lr=LR)
    for rank, seen in enumerate(one[kind] for one in run.observed("empty")):
        after = f" It had taken a step: {seen['changed'][0]} has changed." if seen["changed"] else ""
        raised = f"raised {seen['error']}: {seen['message'].rstrip('.')}"
        instead = raised if seen["error"] else f"returned {seen['answer']}"
        said = f"Given an empty {kind}, rank {rank} should raise ValueError; it {instead}.{after}"
        wrong = seen["error"] != "ValueError" or after
        grader.fail_on([rank] if wrong else [], "empty-not-refused", said, at=STEP if after else FUNCTION)


@pytest.mark.needs("test_steps")
def test_empty(grader: Grader) -> None:
    """without any micro-batch it raises ValueError, and nothing changes"""
    judge_empty(grader, "list")


@pytest.mark.needs("test_ragged")
def test_alone(grader: Grader) -> None:
    """it also trains on a single rank, with a model in float64 and whole numbers as x"""
    played = play(grader, "alone", [[[3, 2]]], dtype="float64", special=True)
    judge_gradient(grader, played, 0)
    judge_losses(grader, played)
