"""What `compress_gradients` has to do.

    register(ddp_model, dtype=torch.float16, error_feedback=False)

Models whose gradients were drawn (`judging.compress_gradients`) run backward under DDP with the submission's hook, beside
plain DDP. The gradients that come out are compared with the mean and with what the usual mistakes would give. Bytes and
number of the collectives are those that were recorded below DDP.
"""

from __future__ import annotations

import math

import pytest
import torch
from judging.compress_gradients import (
    CAP,
    EPOCHS,
    LONG,
    NAN_STEP,
    NO_BUCKET,
    ONE_BUCKET,
    OVERFLOWS,
    RESIDUAL,
    SCALE,
    SHAPES,
    STEPS,
    WORLD,
    Gradients,
    by_rank,
    collectives,
    digits,
    draw,
    feed_back,
    judge_feedback,
    mean_of,
    overflow,
    reduce,
    say,
    section,
    times,
    train_plainly,
)  # fmt: skip

from lockstep.grading import (
    Cause,
    Collective,
    Diagnosis,
    Each,
    Grader,
    Hypothesis,
    Mark,
    Run,
    Tolerance,
    difference,
    equal,
    factor_of,
    names,
)  # fmt: skip

REGISTER = r"register_comm_hook || def register"
REDUCE = r"all_reduce\( || all_gather || reduce_scatter || " + REGISTER
DIVIDE = r"/= || div || / || AVG || " + REDUCE
CAST = r"\.to\( || \.half\(\) || \.bfloat16\(\) || \.type\( || " + REDUCE
HIDES = r"nan_to_num\(.*value || clamp || clip || nan_to_num || " + CAST
SPREADS = r"isfinite || isinf || isnan || nan_to_num || " + CAST
RESULT = r"\.then\( || set_result || return || " + REDUCE
WAIT = r"\.wait\( || all_reduce\( || " + REGISTER
GROUP = r"get_world_size || group || all_reduce\( || " + REGISTER

ERRORS = (
    ("must return a torch.futures.Future", "hook-returns-no-future", RESULT),
    ("expected the hook result is a PyObject", "hook-returns-no-future", RESULT),
    ("setStorage", "hook-returns-no-future", RESULT),
    ("BF16 all reduce communication hook required", "builtin-hook-refuses", r"bf16_compress_hook || " + REGISTER),
)
"""What torch says, what it means here, and where to look."""


def read_failure(grader: Grader, run: Run, cause: Cause) -> Diagnosis | None:
    """Name what a failed run of this exercise usually means."""
    error = cause.error
    if error is None:
        return None
    said = f"{names(cause.ranks).capitalize()} raised {error.type}: {' '.join(error.message.split())[:320]}"
    for part, id, at in ERRORS:
        if part in error.message:
            return grader.diagnosis(id, f"{said}.", of=cause.ranks, at=at)
    if any(run.observed("error feedback")) and ("size of tensor" in error.message or "shape" in error.message):
        said += ". After the first step DDP had rebuilt its buckets, and the residual kept under a bucket's index belonged to another set of parameters."
        return grader.diagnosis("residual-of-others", said, of=cause.ranks, at=RESIDUAL)
    return None


# What comes out ------------------------------------------------------------------------------------------------------


def rounding(dtype: torch.dtype) -> Tolerance:
    """How far the casts and the sum may be off: a few units in the last place."""
    unit = torch.finfo(dtype).eps
    return Tolerance(relative=0.0, absolute=8 * unit, norm=4 * unit)


def means_of_mistakes(given: list[Gradients], seen: list[Gradients], sent: list[Collective]) -> list[Hypothesis]:
    """What the usual mistakes make of the mean."""
    right = mean_of(given)
    launched = f"though {say(sent)} was launched." if sent else "and no collective was launched."
    own = "hook-discards-result" if sent else "hook-never-communicates"
    ratio = factor_of(seen[0], right, rounding(torch.bfloat16)) or torch.nan
    table = [
        (own, f"It is that rank's own gradient, {launched}", Each(given), RESULT),
        (own, f"It is that rank's own gradient, divided by {WORLD}, {launched}", Each([times(one, 1 / WORLD) for one in given]), RESULT),
        ("hook-never-divides", f"It is the sum, {WORLD} times too large.", times(right, WORLD), REDUCE),
        ("hook-divides-twice", f"It was divided by {WORLD} twice.", times(right, 1 / WORLD), DIVIDE),
        ("hook-wrong-mean", f"It is the sum of all gradients divided by {WORLD / ratio:.3g} instead of {WORLD}.", times(right, ratio), REDUCE),
    ]  # fmt: skip
    return [Hypothesis(*mistake) for mistake in table]


def judge_mean(grader: Grader, run: Run, steps: list[list[Gradients]], dtype: torch.dtype) -> None:
    """The gradients of every step on every rank, against the mean and each other."""
    for step, given in enumerate(steps):
        seen = [every[step] for every in run.observed("seen")]
        sent = collectives(run, 0, "compressed", step)
        mistakes = means_of_mistakes(given, seen, sent)
        # Which type was sent is judged by a check of its own.
        coarsest = torch.bfloat16 if any(call.dtype == "bfloat16" for call in sent) else dtype
        what = f"In step {step} the mean gradient"
        right, tolerance = mean_of(given), rounding(coarsest)
        grader.explain(what, seen, right, mistakes, otherwise="hook-wrong-mean", at=REDUCE, tolerance=tolerance)
        for rank in range(1, WORLD):
            if apart := difference(seen[rank], seen[0]):
                said = f"In step {step} {apart.path} is {apart.right:.8g} on rank 0 and {apart.seen:.8g} on rank {rank}. Both are near the mean, and they are not the same."
                grader.fail("gradients-differ", said, of=[rank], at=RESULT)


def judge_bytes(grader: Grader, run: Run, steps: list[list[Gradients]], dtype: torch.dtype, how: str = "") -> None:
    """One all-reduce for each of plain DDP's, of half its bytes, in every step on every rank."""
    places = [(rank, step) for rank in range(WORLD) for step in range(len(steps))]
    every = {place: collectives(run, place[0], "compressed", place[1]) for place in places}
    other_dtype = torch.float16 if dtype == torch.bfloat16 else torch.bfloat16
    never_narrow = all(call.dtype == "float32" for sent in every.values() for call in sent)
    for (rank, step), sent in every.items():
        plain = collectives(run, rank, "plain", step)
        before, now = sum(call.nbytes for call in plain), sum(call.nbytes for call in sent)
        wide = [call for call in sent if call.dtype == "float32"]
        exact = equal(run.observed("seen")[rank][step], mean_of(steps[step]), Tolerance(1e-6, 1e-6))
        other = [call.kind for call in sent if call.kind != "all_reduce"]
        wrong = [call.tensor for call in sent if call.dtype != str(dtype).removeprefix("torch.")]
        mistakes = [
            (other, "not-an-all-reduce", "", (other or [""])[0] + r" || " + REDUCE),
            (len(sent) != len(plain), "more-collectives", "", REDUCE),
            (wide == sent and exact and never_narrow, "not-compressed", " No gradient was rounded, as if there were no hook.", REGISTER),
            (wide == sent and not exact, "sends-float32", " The gradients were rounded and then sent as float32.",
             r"\.float\(\) || float32 || " + CAST),
            (wide, "not-always-compressed", f" {len(wide)} of them {'is' if len(wide) == 1 else 'are'} float32.", CAST),
            (wrong, "ignores-dtype", f" register was called with dtype={dtype} for this model and with {other_dtype} for another "
             f"one, and {(wrong or [''])[0]} was sent.",
             r"\.half\(\) || \.bfloat16\(\) || float16 || " + CAST),
            (2 * now != before, "not-always-compressed", "", CAST),
        ]  # fmt: skip
        what = f"{how}in step {step} rank {rank} put {now} bytes into {say(sent)}; plain DDP puts {before} into {say(plain)}."
        for found, id, says, at in mistakes:
            grader.fail_on([rank] if found else [], id, capital(what + says), at=at)


def capital(said: str) -> str:
    """The sentence with a capital letter."""
    return said[:1].upper() + said[1:]


def judge_waits(grader: Grader, run: Run, step: int, how: str = "") -> None:
    """No rank waits within backward."""
    for rank in range(WORLD):
        seen = section(run, rank, "compressed", step)
        waits = [index for index, event in enumerate(seen) if isinstance(event, Mark) and event.name == "wait"]
        before = seen[: waits[0]] if waits else []
        ready = sum(isinstance(event, Mark) and event.name.startswith("ready") for event in before)
        launched = sum(isinstance(event, Collective) for event in before)
        buckets = len(collectives(run, rank, "compressed", step))
        said = f"{how}rank {rank} waited {len(waits)} times within backward, first when {ready} of {len(SHAPES)} gradients were ready and {launched} of {buckets} buckets on their way."
        grader.fail_on([rank] if waits else [], "hook-waits", capital(said), at=WAIT)


# The checks ----------------------------------------------------------------------------------------------------------


def test_mean(grader: Grader) -> None:
    """every gradient becomes the mean over the ranks, but for the rounding of the cast"""
    judge_mean(grader, *reduce(grader), torch.float16)


@pytest.mark.needs("test_mean")
def test_bytes(grader: Grader) -> None:
    """a step has as many all-reduces as plain DDP, of half the bytes"""
    judge_bytes(grader, *reduce(grader), torch.float16)


@pytest.mark.needs("test_bytes")
def test_dtype(grader: Grader) -> None:
    """dtype says which type is sent"""
    run, given = reduce(grader, NO_BUCKET, dtype="bfloat16")
    judge_mean(grader, run, given, torch.bfloat16)
    judge_bytes(grader, run, given, torch.bfloat16)


@pytest.mark.needs("test_bytes")
def test_overlap(grader: Grader) -> None:
    """backward does not wait for the all-reduce of a bucket"""
    run, _ = reduce(grader)
    judge_waits(grader, run, STEPS - 1)


@pytest.mark.needs("test_bytes")
def test_overflow(grader: Grader) -> None:
    """neither a large gradient nor the sum over the ranks overflows float16"""
    given = draw(grader, "overflow")
    for rank, own in enumerate(given):
        own["a"] = torch.full(SHAPES["a"], 40000.0)
        own["c"] = torch.full(SHAPES["c"], 150000.0 if rank == 1 else 0.0)
    run = grader.run("reduces", WORLD, each=by_rank([given]), cap=CAP)
    cases = [
        ("a", f"All {WORLD} ranks had a gradient of 40000, and the largest float16 is 65504. The mean", "sum-overflows", DIVIDE),
        ("c", "Rank 1 had a gradient of 150000, the others 0, and the largest float16 is 65504. The mean", "casts-before-dividing", CAST),
    ]  # fmt: skip
    for name, what, id, at in cases:
        seen, right = [one[name] for (one,) in run.observed("seen")], mean_of(given)[name]
        grader.explain(what, seen, right, otherwise=id, at=at, tolerance=rounding(torch.float16))


@pytest.mark.needs("test_mean")
def test_group(grader: Grader) -> None:
    """a model that was wrapped for some of the ranks is averaged over these"""
    world, size = 4, 2
    given = draw(grader, "groups", world)
    seen = grader.run("in_groups", world, each=[{"gradients": own} for own in given], size=size).observed("seen")
    members = [list(range(rank % (world // size), world, world // size)) for rank in range(world)]
    means = [mean_of([given[rank] for rank in own]) for own in members]
    mistakes = [
        Hypothesis("ignores-group", f"It is the mean over all {world} ranks.", mean_of(given)),
        Hypothesis("ignores-group", f"It was divided by {world}.", Each([times(mean, size / world) for mean in means])),
    ]
    what = f"the process groups of the models are {names(members[0])}, and {names(members[1])}. The mean in its group"
    tolerance = rounding(torch.float16)
    for feedback, how in enumerate(("", "With error feedback, ")):
        came = [each[feedback] for each in seen]
        grader.explain(
            capital(how + what), came, Each(means), mistakes, otherwise="ignores-group", at=GROUP, tolerance=tolerance
        )


@pytest.mark.needs("test_bytes")
def test_no_feedback(grader: Grader) -> None:
    """without error feedback no step depends on an earlier one"""
    run, _ = reduce(grader)
    apart = [rank for rank, steps in enumerate(run.observed("seen")) if difference(steps[-1], steps[-2])]
    said = f"Steps {STEPS - 2} and {STEPS - 1} had the same gradients, and others came out on {{ranks}}. error_feedback was not asked for."
    grader.fail_on(apart, "feedback-always-on", said, at=RESIDUAL)


@pytest.mark.needs("test_dtype", "test_overflow")
def test_feedback(grader: Grader) -> None:
    """with error feedback, the next step sends what the cast lost"""
    judge_feedback(grader, *feed_back(grader, CAP))
    judge_what_is_tiny(grader)


def judge_what_is_tiny(grader: Grader) -> None:
    """Gradients too small for float16 arrive when there is enough of them. A float16 residual has no room for them either."""
    unit, share = 2.0**-24, 0.42
    steps = [draw(grader, f"tiny {step}") for step in range(LONG)]
    for own in steps:
        for rank, gradients in enumerate(own):
            gradients["a"] = torch.full(SHAPES["a"], WORLD * share * unit if rank == 0 else 0.0)
    options = {"dtype": "float16", "error_feedback": True}
    run = grader.run("reduces", WORLD, each=by_rank(steps), cap=CAP, **options)
    for rank, seen in enumerate(run.observed("seen")):
        came = sum(gradients["a"].double() for gradients in seen) / unit
        away = (came - LONG * share).abs().max().item()
        said = (
            f"The smallest float16 above 0 is {unit:.2g}. In each of {LONG} steps the mean gradient of a was {share} of it. "
            f"After them {came.flatten()[0].item():.3g} of it had come out on rank {rank}, where {LONG * share:.3g} is right, "
            "to within one half. Float16 has no residual here, or one that is kept in float16 and is 0."
        )
        grader.fail_on([rank] if not away <= 0.55 else [], "wrong-residual", said, at=RESIDUAL)
    for rank, again in enumerate(run.observed("seen again")):
        apart = difference(again, run.observed("seen")[rank][0])
        said = "A module was taken out of DDP, wrapped again and registered again. Its first step, with the gradients of its first step before, came out different: it was given what its former wrapper had kept."
        grader.fail_on([rank] if apart else [], "residual-of-others", said, at=RESIDUAL)
    judge_bytes(grader, run, steps, torch.float16, "With error feedback, ")
    judge_waits(grader, run, LONG - 1, "With error feedback, ")


@pytest.mark.needs("test_feedback")
def test_rebuilt_order(grader: Grader) -> None:
    """a residual stays with its parameter when DDP reorders a bucket"""
    judge_feedback(grader, *feed_back(grader, ONE_BUCKET))


def judge_what_is_dropped(grader: Grader) -> None:
    """An element that overflows owes nothing afterwards, and all others are as if it had not."""
    run, shares, units = overflow(grader)
    place = torch.zeros(SHAPES["a"], dtype=torch.bool)
    place[0, : len(OVERFLOWS)] = True
    what = f"With error feedback, the first {len(OVERFLOWS)} numbers of a were {', '.join(f'{one:g}' for one in OVERFLOWS)} in step 2, for which float16 has no room. "
    for rank, seen in enumerate(run.observed("seen")):
        if (hidden := seen[1]["a"][place].isfinite()).any():
            number = int(hidden.nonzero()[0])
            said = f"{what}For {OVERFLOWS[number]:g} the mean on rank {rank} is {seen[1]['a'][place][number].item():.6g}, not inf or NaN: a gradient scaler would not notice."
            grader.fail("hides-overflow", said, of=[rank], at=HIDES)
        for step in (1, 2, 3):
            for name, unit in units.items():
                came = sum(one[name].double() for one in seen[: step + 1])
                away = (
                    ((came - sum(one[name].double() for one in shares[: step + 1])) / unit)
                    .nan_to_num(nan=torch.inf)
                    .abs()
                )
                if (spoiled := (away > 0.55) & (~place if name == "a" else True)).any():
                    said = f"{what}After step {step + 1}, {int(spoiled.sum())} other numbers of {name} are away from the sum of the true ones on rank {rank}, "
                    said += f"by up to {away[spoiled].max().item():.3g} units in the last place. One cast loses half a unit."
                    grader.fail("overflow-spreads", said, of=[rank], at=SPREADS)
    right = 1 + 20 * units["a"]
    mistakes = [
        Hypothesis("overflow-keeps-residual", "That is the gradient and the residual of step 1, which step 2 had added already.",
                   torch.full((len(OVERFLOWS),), right + units["a"])),
    ]  # fmt: skip
    came = [seen[2]["a"][place] for seen in run.observed("seen")]
    id, tolerance = "residual-poisoned", Tolerance(0.0, units["a"] / 4)
    grader.explain(
        f"{what}In step 3 their mean",
        came,
        torch.full((len(OVERFLOWS),), right),
        mistakes,
        otherwise=id,
        at=RESIDUAL,
        tolerance=tolerance,
    )


@pytest.mark.needs("test_rebuilt_order")
def test_digits(grader: Grader) -> None:
    """training on digits gets as far as plain DDP, even when gradients overflow or are NaN in some steps"""
    judge_what_is_dropped(grader)
    pixels, classes = digits()
    each = [{"pixels": pixels[rank::2], "classes": classes[rank::2]} for rank in range(2)]
    options = {"steps": EPOCHS, "scale": SCALE, "nan_step": NAN_STEP, "dtype": "float16", "error_feedback": True}
    seen = grader.run("trains", 2, each=each, **options).observed("compressed")
    for rank, plain in enumerate(train_plainly(pixels, classes)):
        losses, scale = seen[rank]["losses"], seen[rank]["scale"]
        skipped = round(math.log2(SCALE / scale))
        right = plain[max(-1 - skipped, -EPOCHS)]
        poisoned = f" With a loss scale of {SCALE:.3g} the gradients overflow float16 in the first steps, in step {NAN_STEP} they are NaN, "
        poisoned += f"and here that never stopped: the scaler has gone down to {scale:.2g}."
        hidden = f" The loss scale was {SCALE:.3g}, with which the gradients do not fit float16, and no gradient came out infinite: the scaler saw nothing."
        behind = f" {skipped} steps were skipped because gradients overflowed; that many steps earlier plain DDP had {right:.3f}."
        mistakes = [
            (scale < 1, "residual-poisoned", poisoned, RESIDUAL),
            (scale >= SCALE / 2, "hides-overflow", hidden, HIDES),
            (not losses[-1] <= 1.5 * right + 0.01, "does-not-converge", behind, REDUCE),
        ]  # fmt: skip
        what = f"After {EPOCHS} steps the loss on rank {rank} is {losses[-1]:.3f}, with plain DDP {plain[-1]:.3f}."
        for found, id, says, at in mistakes:
            grader.fail_on([rank] if found else [], id, what + says, at=at)
    if apart := difference(seen[0]["weight"], seen[1]["weight"]):
        said = f"After {EPOCHS} steps the first layer's weights differ by up to {apart.distance:.2g} between rank 0 and rank 1."
        grader.fail("gradients-differ", said, of=[1], at=RESULT)
