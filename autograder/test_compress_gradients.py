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
    ONE_BUCKET,
    SCALE,
    SHAPES,
    STEPS,
    WORLD,
    Gradients,
    Keep,
    Owing,
    by_rank,
    collectives,
    digits,
    draw,
    feed_back,
    follow,
    mean_of,
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
RESULT = r"\.then\( || set_result || return || " + REDUCE
WAIT = r"\.wait\( || all_reduce\( || " + REGISTER
RESIDUAL = (
    r"(residual|owed|memory|error|feedback)\w*\[.*\] *[+-]?=[^=] || (residual|owed|memory)\w*\.(update|setdefault|copy_)\( || "
    r"_residual = || (lost|rest|missing|owed) = || error_feedback || def register"
)
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


def judge_bytes(grader: Grader, run: Run, steps: list[list[Gradients]], dtype: torch.dtype) -> None:
    """One all-reduce for each of plain DDP's, of half its bytes, in every step on every rank."""
    places = [(rank, step) for rank in range(WORLD) for step in range(STEPS)]
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
        what = (
            f"In step {step} rank {rank} put {now} bytes into {say(sent)}; plain DDP puts {before} into {say(plain)}."
        )
        for found, id, says, at in mistakes:
            grader.fail_on([rank] if found else [], id, what + says, at=at)


# Error feedback: what each mistake would give ------------------------------------------------------------------------

FEEDBACK: list[tuple[str, str, Keep]] = [
    ("ignores-error-feedback", "Each step is cast separately: what one step loses is never sent.",
     lambda step, owed, share, total, sent: torch.zeros_like(share)),
    ("residual-never-updated", "What step 0 had lost is added in every step, and what later steps lose is dropped.",
     lambda step, owed, share, total, sent: owed if step else total - sent),
    ("drops-residual", "What step 0 had lost was never sent; from step 1 on nothing is lost.",
     lambda step, owed, share, total, sent: total - sent if step else torch.zeros_like(share)),
    ("wrong-residual", "Residuals accumulate, although each was already sent in the following step.",
     lambda step, owed, share, total, sent: owed + total - sent),
    ("wrong-residual", "The residual has the wrong sign: what was lost is subtracted again.",
     lambda step, owed, share, total, sent: sent - total),
    ("wrong-residual", "The residual is gradient minus what was sent, and leaves out the previous residual.",
     lambda step, owed, share, total, sent: share - sent),
    ("wrong-residual", f"The residual is {WORLD} times too large, and leaves out the previous one: it is what was not divided minus what was sent.",
     lambda step, owed, share, total, sent: WORLD * (share - sent)),
    ("wrong-residual", f"The residual is {WORLD} times too large: it was taken before the division and added after it.",
     lambda step, owed, share, total, sent: WORLD * (total - sent)),
    ("wrong-residual", f"The residual is {WORLD} times too small: it was taken after the division and added before it.",
     lambda step, owed, share, total, sent: (total - sent) / WORLD),
]  # fmt: skip
"""What it is, what is seen, and what is owed after a step."""


def judge_feedback(grader: Grader, run: Run, drawn: list[Owing]) -> None:
    """The sums over 1, 2, … LONG steps against the true ones, in units of the last place that the cast keeps."""
    found: list[tuple[float, int, int, str, torch.Tensor]] = []
    for model, (shares, units) in enumerate(drawn):
        for rank in range(WORLD):
            seen: list[Gradients] = run.observed("seen")[rank][model]
            for name in SHAPES:
                came = torch.stack([gradients[name] for gradients in seen]).double().cumsum(0)
                true = torch.stack([step[name] for step in shares]).double().cumsum(0)
                away = ((came - true) / units[name]).nan_to_num(nan=torch.inf).abs().reshape(LONG, -1).amax(1)
                if away.max() > 0.55:
                    found.append((away.max().item(), model, rank, name, away))
    if not found:
        return
    largest, model, rank, name, away = max(found, key=lambda one: one[0])
    if largest <= 4:
        largest, model, rank, name, away = found[0]
    shares, units = drawn[model]
    seen = [gradients[name] for gradients in run.observed("seen")[rank][model]]
    step = int((away > 0.55).nonzero()[0])
    other = " of the second model" if model else ""
    what = f"After {step + 1} step{'s' if step else ''} the gradients of {name}{other} that came out on rank {rank} are away from the sum of the true ones "
    what += f"by up to {away[step].item():.3g} units in the last place of bfloat16, after {LONG} steps by {away[-1].item():.3g}. One cast loses half a unit."
    for id, said, keep in FEEDBACK:
        would = follow([one[name] for one in shares], keep)
        if all(torch.allclose(a, b, rtol=0, atol=0.05 * units[name]) for a, b in zip(seen, would, strict=True)):
            grader.fail(id, f"{what} {said}", of=[rank], at=RESIDUAL)
    if largest > 4:
        said = "That is far more than its own casts can have lost: it received the residuals of other parameters."
        grader.fail("residual-of-others", f"{what} {said}", of=[rank], at=RESIDUAL)
    grader.fail("wrong-residual", what, of=[rank], at=RESIDUAL)


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
    run, given = reduce(grader, dtype="bfloat16")
    judge_mean(grader, run, given, torch.bfloat16)
    judge_bytes(grader, run, given, torch.bfloat16)


@pytest.mark.needs("test_bytes")
def test_overlap(grader: Grader) -> None:
    """backward does not wait for the all-reduce of a bucket"""
    run, _ = reduce(grader)
    for rank in range(WORLD):
        seen = section(run, rank, "compressed", STEPS - 1)
        waits = [index for index, event in enumerate(seen) if isinstance(event, Mark) and event.name == "wait"]
        before = seen[: waits[0]] if waits else []
        ready = sum(isinstance(event, Mark) and event.name.startswith("ready") for event in before)
        launched = sum(isinstance(event, Collective) for event in before)
        buckets = len(collectives(run, rank, "compressed", STEPS - 1))
        said = f"Rank {rank} waited {len(waits)} times within backward, first when {ready} of {len(SHAPES)} gradients were ready and {launched} of {buckets} buckets on their way."
        grader.fail_on([rank] if waits else [], "hook-waits", said, at=WAIT)


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
    what = f"The process groups of the models are {names(members[0])}, and {names(members[1])}. The mean in its group"
    tolerance = rounding(torch.float16)
    grader.explain(what, seen, Each(means), mistakes, otherwise="ignores-group", at=GROUP, tolerance=tolerance)


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
            "to within one half. A residual that is kept in float16 is 0 here."
        )
        grader.fail_on([rank] if not away <= 0.55 else [], "wrong-residual", said, at=RESIDUAL)


@pytest.mark.needs("test_feedback")
def test_rebuilt_order(grader: Grader) -> None:
    """a residual stays with its parameter when DDP reorders a bucket"""
    judge_feedback(grader, *feed_back(grader, ONE_BUCKET))


def judge_what_is_dropped(grader: Grader) -> None:
    """What an overflow leaves is no debt: the step after it is as if it had not been."""
    steps = [draw(grader, f"dropped {step}") for step in range(3)]
    for own in steps[1]:
        own["a"] = own["a"].clone()
        own["a"][0, :4] = torch.tensor([1e6, -1e6, torch.nan, torch.inf])
    steps[1][1]["a"][1, 0] = 1e6  # on one rank alone: clipped, it would be a number that float16 has room for
    options = {"dtype": "float16", "error_feedback": True}
    run = grader.run("reduces", WORLD, each=by_rank(steps), cap=CAP, **options)
    for rank, (_, second, _) in enumerate(run.observed("seen")):
        if torch.isfinite(one := second["a"][1, 0]):
            said = "In step 2 rank 1 had a gradient of 1e6. A third of it is more than float16 holds, and the mean that came out on "
            said += f"rank {rank} is {one.item():.6g}, not inf or NaN: a gradient scaler would not notice."
            grader.fail("hides-overflow", said, of=[rank], at=HIDES)
    seen = [one[2]["a"] for one in run.observed("seen")]
    what = "With error feedback, numbers of step 2's gradient were 1e6, -1e6, NaN and inf, for which float16 has no room. In step 3 the mean"
    right, id = mean_of(steps[2])["a"], "residual-poisoned"
    grader.explain(what, seen, right, otherwise=id, at=RESIDUAL, tolerance=rounding(torch.float16))


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
