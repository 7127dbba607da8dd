"""What `train_step` of mixed_precision has to do.

    train_step(ddp_model, x, y, loss_fn, optimizer, scaler, *, dtype, max_norm) -> StepResult(loss, grad_norm, skipped)

The model notes in what type its layers compute. The gradients are computed here once more, in double precision, and
with them what the usual wrong orders of scaling, unscaling and clipping would have made of them. They lie further
apart than half precision rounds.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from judging.mixed_precision import (
    CLIPPED,
    FIRST_GROUP,
    NORMS,
    NUMBERS,
    OVERFLOWS,
    PAYLOAD,
    SCALE,
    STALE,
    WORLD,
    Played,
    bfloat16_overflow_run,
    bfloat16_run,
    clipped,
    float16_run,
    overflow_run,
)  # fmt: skip

from lockstep.grading import (
    Cause,
    Diagnosis,
    Each,
    Grader,
    Hypothesis,
    Run,
    Tolerance,
    ending,
    evidence,
    fitting,
    names,
    wrong_ranks,
)

# How far half precision may lie from double: five times the worst of 400 random draws (1.6e-3 and 1.6e-2 for gradients,
# 3.7e-4 and 3.2e-3 for losses). The mistakes lie further away.
GRADIENT = {"float16": Tolerance(0.0, 0.0, norm=8e-3), "bfloat16": Tolerance(0.0, 0.0, norm=8e-2)}
NORM = {"float16": Tolerance(8e-3, 0.0), "bfloat16": Tolerance(8e-2, 0.0)}
LOSS = {"float16": Tolerance(2e-3, 0.0), "bfloat16": Tolerance(1.6e-2, 0.0)}

FUNCTION = r"def train_step"
AUTOCAST = r"autocast || " + FUNCTION
FORWARD = r"(ddp_)?model\(|net\( || " + FUNCTION
BACKWARD = r"\.backward\( || " + FUNCTION
CLIP = r"clip_grad || clamp || [*/] *max_norm|max_norm *[*/]|> *max_norm || norm = || " + FUNCTION
STEP = r"\.step\( || " + FUNCTION
PAST = r"optimizer\.step\( || " + STEP
UPDATE = r"\.update\( || " + STEP
RETURN = r"^\s+return .*StepResult || StepResult\( || ^\s+return || " + FUNCTION
SKIPPED = r"skipped\w* *= || isfinite|isnan|isinf || get_scale || " + RETURN
HALF = r"\.half\( || \.bfloat16\( || \.to\( || " + FUNCTION


# A run that failed ---------------------------------------------------------------------------------------------------


def read_failure(grader: Grader, run: Run, cause: Cause) -> Diagnosis | None:
    """Name what a failed run of this exercise usually means."""
    step = max((number for number in run.observed("step") if number is not None), default=0)
    if cause.error is not None:
        return read_error(grader, cause.error, cause.ranks, step)
    if cause.kind not in ("hang", "mismatch", "crashed", "exited") or not step:
        return None
    said = "Rank 1 had overflowed, and the others had not: a rank that leaves a step early leaves the others in its all-reduce."
    said, at = f"{said}{ending(cause)}", r"isfinite || isnan || isinf || " + BACKWARD
    return grader.diagnosis("skips-alone", said, evidence=evidence(run), of=cause.ranks, at=at)


def read_error(grader: Grader, error: Any, ranks: tuple[int, ...], step: int) -> Diagnosis | None:
    """Name what the scaler, or the clipping, complains of."""
    raised = f"In step {step} {names(ranks)} raised {error.type}: {error.message.strip().splitlines()[0]}"
    said = f"{raised.partition('  This may')[0].rstrip('.')}."
    not_updated = [
        ("has already been called", "never-updates-scale", f" Step {step - 1} had ended without update().", UPDATE),
        ("after step()", "never-updates-scale", f" Step {step - 1} had ended without update().", UPDATE),
    ]
    known = [
        ("division by zero", "wrong-clip", " All gradients were zero, and so was their norm.", error.frame),
        *(not_updated if step else ()),
        ("unscale_() has already been called", "unscales-twice", "", error.frame),
        ("after step()", "unscales-too-late", "", error.frame),
        ("No inf checks were recorded", "steps-past-the-scaler", " The scaler was never asked to step or to unscale.", PAST),
        ("_scale is None", "never-scales-loss", " scaler.scale was never called.", BACKWARD),
        ("unscale FP16 gradients", "casts-the-model", " The parameters are float16.", r"\.half\( || \.to\( || " + FUNCTION),
        ("is non-finite, so it cannot be clipped", "raises-on-overflow", "", error.frame),
    ]  # fmt: skip
    for text, id, more, at in known:
        if text in error.message:
            return grader.diagnosis(id, said + more, of=ranks, at=at)
    return None


# Precision and traffic -----------------------------------------------------------------------------------------------


def judge_precision(grader: Grader, played: Played) -> None:
    """What the layers, the loss, the parameters and the backward ran in."""
    wanted, given = played.dtype, str(played.y.dtype).removeprefix("torch.")
    for step, seen in enumerate(played.steps):
        types = [one["types"] for one in seen]
        asked = f"In step {step}, with dtype=torch.{wanted},"
        hard_coded = r"float16 || autocast || " + FUNCTION
        mistakes = [
            ("casts-the-model", "the parameters of {ranks} came as float32, and are " + " and ".join(seen[0]["parameters"]) + " after it.",
             HALF, [one["parameters"] != ["float32"] for one in seen]),
            ("half-state", "the optimizer of {ranks} keeps a state of " + " and ".join(seen[0]["state"]) + ".",
             r"\.state\b || " + HALF, [any(kind != "float32" for kind in one["state"]) for one in seen]),
            ("no-autocast", "the layers of {ranks} computed in float32. Autocast was off, or on for a different device type than the batch's.",
             AUTOCAST, [one["first"] == one["last"] == "float32" for one in types]),
            *(("dtype-hard-coded", f"the {layer} layer of {{ranks}} computed in {types[0][layer]}.",
               hard_coded, [one[layer] != wanted for one in types]) for layer in ("first", "last")),
            ("ignores-loss-fn", "{ranks} never called loss_fn.", r"cross_entropy || " + BACKWARD, [not one["loss"] for one in types]),
            ("loss-in-half", f"the loss of {{ranks}} is a {types[0]['loss']}: the output was {wanted}, and loss_fn was called outside "
             "autocast.", r"loss_fn\( || " + AUTOCAST, [one["loss"] != "float32" for one in types]),
            ("loss-in-half", f"loss_fn of {{ranks}} was given targets in {types[0]['targets']}, and y is in {given}.",
             r"\by\.(to|half|bfloat16)\( || " + AUTOCAST, [one["targets"] != given for one in types]),
            ("backward-under-autocast", f"autocast was still on in the backward of {{ranks}}. The model has a layer that computes in float32, "
             f"and its gradient was computed in {wanted}.", BACKWARD, [one["autocast_in_backward"] for one in seen]),
        ]  # fmt: skip
        for id, says, at, found in mistakes:
            grader.fail_on([rank for rank, is_so in enumerate(found) if is_so], id, f"{asked} {says}", at=at)


def judge_traffic(grader: Grader, played: Played, step: int) -> None:
    """The gradients cross the network once, through DDP."""
    for rank in range(WORLD):
        marks = [mark for mark in played.run.ranks[rank].marks if mark.name == "ddp"]
        carried = played.sent(rank, step)
        total = sum(one.nbytes for one in carried)
        if not marks and total < PAYLOAD / 2:
            said = f"Rank {rank}'s forward never went through the DDP wrapper: none of its {PAYLOAD} bytes of gradients was sent."
            grader.fail("bypasses-ddp", said, of=[rank], at=r"\.module || " + FORWARD)
        narrow = [one for one in carried if one.dtype != "float32"]
        said = f"In step {step} rank {rank} put gradients of {narrow[0].dtype} into a collective." if narrow else ""
        grader.fail_on([rank] * bool(narrow), "sends-half", said, at=r"comm_hook || " + HALF)
        if total > 1.5 * PAYLOAD:
            said = (
                f"In step {step} rank {rank} put {total} bytes into {len(carried)} gradient collectives; its gradients have "
                f"{PAYLOAD} bytes, in float32."
            )
            again = next((one.frame for one in carried if one.inside != "backward"), carried[-1].frame)
            grader.fail("double-work", said, of=[rank], at=again)


def judge_scale(grader: Grader, played: Played, step: int) -> None:
    """What backward began with."""
    seen = played.steps[step]
    scale = seen[0]["scale_before"]
    factors = [scale if one["factor"] is None else one["factor"] for one in seen]
    lost = "It is the loss itself: float16 rounds gradients below 3e-8 to zero."
    grader.explain(
        f"The scaler's scale was {scale:g} in step {step}. What backward started from", factors, scale,
        [Hypothesis("never-scales-loss", lost, 1.0)], otherwise="other-scale", at=BACKWARD,
    )  # fmt: skip


# Gradients and result ------------------------------------------------------------------------------------------------


def gradients_of_mistakes(
    gradient: torch.Tensor, max_norm: float, scale: float, found: float, first: bool
) -> list[Hypothesis]:
    """What the usual mistakes step with. `found` is the norm that was seen; `first`: STALE was left in the gradients."""
    norm, right = float(gradient.norm()), clipped(gradient, max_norm)
    left = f"each held {STALE * scale:.3g} before the call" + (
        f", which unscaling has divided by {scale:g}." if scale > 1 else "."
    )
    while_scaled = f"They were clipped while they were still {scale:g} times as large, and divided by that afterwards."
    by_value = f"Each element was clamped to {max_norm:g} by itself, so the gradient points elsewhere."
    each = torch.cat([clipped(piece, max_norm) for piece in gradient.split(NUMBERS)])
    begin, rest = gradient.split([sum(NUMBERS[:FIRST_GROUP]), sum(NUMBERS[FIRST_GROUP:])])
    one_group = torch.cat([clipped(begin, max_norm), rest])
    each_group = torch.cat([clipped(begin, max_norm), clipped(rest, max_norm)])
    largest, sum_ = float(gradient.norm(torch.inf)), float(gradient.norm(1))
    by_largest = f"They were clipped by their largest number ({largest:.4g}) instead of their 2-norm."
    by_sum = f"They were clipped by their 1-norm ({sum_:.4g}) instead of their 2-norm."
    length = f"The direction is correct, but the length is {found / float(right.norm()):.4g} times what it should be."
    stale = gradient + STALE
    return [
        *[Hypothesis("missing-zero-grad", f"Every gradient is {STALE:g} too large: {left}", after, r"zero_grad || " + BACKWARD)
          for after in (stale, clipped(stale, max_norm)) if first],
        Hypothesis("never-clips", "They were not clipped.", gradient, CLIP),
        *[Hypothesis("clips-scaled-gradients", while_scaled, gradient * min(1.0, max_norm / (norm * scale)), CLIP),
          Hypothesis("steps-past-the-scaler", f"They were still scaled by {scale:g} when the optimizer took them.", gradient * scale, PAST)] * (scale > 1),
        Hypothesis("clips-by-value", by_value, gradient.clamp(-max_norm, max_norm), r"clip_grad_value || clamp || " + CLIP),
        Hypothesis("clips-each-parameter", f"Each parameter's gradient was clipped to {max_norm:g} by itself.", each, CLIP),
        Hypothesis("wrong-clip", "Only the optimizer's first group of parameters was clipped.", one_group, CLIP),
        Hypothesis("wrong-clip", f"Each of the optimizer's two groups was clipped to {max_norm:g} by itself.", each_group, CLIP),
        Hypothesis("wrong-clip", by_largest, gradient * min(1.0, max_norm / largest), CLIP),
        Hypothesis("wrong-clip", by_sum, gradient * min(1.0, max_norm / sum_), CLIP),
        Hypothesis("wrong-clip", length, gradient / norm * found, CLIP),
    ]  # fmt: skip


def judge_cleared(grader: Grader, played: Played, step: int) -> None:
    """Whether inf or nan was left from the step before, though this one has none."""
    seen = played.steps[step]
    left = [r for r, one in enumerate(seen) if not one["used"] and not math.isfinite(one["grad_norm"]["value"] or 0)]
    said = f"In step {step} nothing overflowed, and {{ranks}} skipped it: the gradients still held the inf or nan of step {step - 1}. 0 * nan is nan: set `grad` to None, or fill it with zeros."
    at = r"\* *0|0\.? *\*|mul || zero_grad || " + BACKWARD
    grader.fail_on(left if step else [], "missing-zero-grad", said, at=at)


def judge_step(grader: Grader, played: Played, step: int) -> None:
    """The gradients that the optimizer used in a good step; fails with what they are instead."""
    taken = [len(one["used"]) for one in played.steps[step]]
    says = f"In step {step} nothing overflowed, and {{ranks}} took {{}} steps with the optimizer."
    judge_cleared(grader, played, step)
    for id, bad in (("no-step", [count == 0 for count in taken]), ("steps-twice", [count > 1 for count in taken])):
        ranks = [rank for rank in range(WORLD) if bad[rank]]
        grader.fail_on(ranks, id, says.replace("{}", str(taken[ranks[0]]) if ranks else ""), at=STEP)
    gradient, max_norm, seen = played.gradient(step), played.max_norms[step], played.used(step)
    wrong = wrong_ranks(seen, clipped(gradient, max_norm), GRADIENT[played.dtype])
    if not wrong:
        return
    found, scale = float(seen[wrong[0]].norm()), played.steps[step][0]["scale_before"]
    mistakes = gradients_of_mistakes(gradient, max_norm, scale, found, first=step == 0)
    why = fitting(seen, mistakes, GRADIENT[played.dtype], wrong) or Hypothesis("wrong-amp-gradient", "", None, BACKWARD)
    what = (
        f"In step {step} the gradients have a norm of {float(gradient.norm()):.4g}, max_norm is {max_norm:g}, and {{ranks}} "
        f"stepped with a norm of {found:.4g}."
    )
    grader.fail_on(wrong, why.id, f"{what} {why.says}".rstrip(), at=why.at)


def judge_result(grader: Grader, played: Played, step: int) -> None:
    """What a good step returned."""
    seen, losses, gradient = played.steps[step], played.losses(step), played.gradient(step)
    norm, scale, after = float(gradient.norm()), seen[0]["scale_before"], seen[0]["scale"]
    for name, kind in (("loss", "float"), ("grad_norm", "float"), ("skipped", "bool")):
        got, type_ = seen[0]["result"], seen[0][name]["type"]
        lacks = [rank for rank, one in enumerate(seen) if not one[name]["there"]]
        grader.fail_on(lacks, "no-step-result", f"A {got} came back on {{ranks}}, which has no {name}.", at=RETURN)
        other = [rank for rank, one in enumerate(seen) if one[name]["type"] != kind]
        grader.fail_on(
            other, "returns-a-tensor", f"On {{ranks}} {name} is a {type_}, where a {kind} is promised.", at=RETURN
        )
    larger = f"It is {scale:g} times as large."
    with_new = f"The loss was multiplied by {scale:g}, the scale before update(), and divided by {after:g}, the scale after it."
    grader.explain(
        f"The loss that step {step} returned", [one["loss"]["value"] for one in seen], Each(losses),
        [
            *[Hypothesis("returns-scaled-loss", larger, Each([loss * scale for loss in losses]))] * (scale > 1),
            *[Hypothesis("returns-scaled-loss", with_new, Each([loss * scale / after for loss in losses]))] * (scale != after),
            Hypothesis("wrong-batch-loss", "It is the mean over the ranks.", sum(losses) / WORLD),
            Hypothesis("wrong-batch-loss", f"It is the rank's part of the mean over {WORLD}.", Each([loss / WORLD for loss in losses])),
        ],
        otherwise="wrong-batch-loss", at=RETURN, tolerance=LOSS[played.dtype],
    )  # fmt: skip
    apart = sum(float(piece.norm()) for piece in gradient.split(NUMBERS))
    grader.explain(
        f"The grad_norm that step {step} returned", [one["grad_norm"]["value"] for one in seen], norm,
        [
            *[Hypothesis("norm-of-scaled-gradients", larger, norm * scale, CLIP)] * (scale > 1),
            Hypothesis("norm-after-clipping", "It is the norm after clipping.", played.max_norms[step], RETURN),
            Hypothesis("wrong-norm", "It is the sum of the parameters' norms.", apart),
            Hypothesis("wrong-norm", "It is the square of the norm.", norm**2),
        ],
        otherwise="wrong-norm", at=CLIP, tolerance=NORM[played.dtype],
    )  # fmt: skip
    said = f"In step {step} the optimizer of {{ranks}} took its step, and skipped is True. The scale went from {scale:g} to {after:g}."
    grader.fail_on(
        [r for r, one in enumerate(seen) if one["skipped"]["value"]], "misreports-skipping", said, at=SKIPPED
    )


# The checks ----------------------------------------------------------------------------------------------------------


def test_precision(grader: Grader) -> None:
    """forward and loss run under autocast, backward does not, and the parameters stay float32"""
    judge_precision(grader, float16_run(grader))


@pytest.mark.needs("test_precision")
def test_traffic(grader: Grader) -> None:
    """the gradients are sent once, in float32"""
    judge_traffic(grader, float16_run(grader), CLIPPED)


@pytest.mark.needs("test_traffic")
def test_scaled(grader: Grader) -> None:
    """float16's loss is scaled as the scaler says"""
    for step in range(len(NORMS)):
        judge_scale(grader, float16_run(grader), step)


@pytest.mark.needs("test_scaled")
def test_gradients(grader: Grader) -> None:
    """the optimizer steps with unscaled gradients, clipped by their common norm"""
    for step in range(len(NORMS)):
        judge_step(grader, float16_run(grader), step)


@pytest.mark.needs("test_gradients")
def test_scale_grows(grader: Grader) -> None:
    """the scale grows after good steps"""
    steps = float16_run(grader).steps
    seen = [[step[rank]["scale"] for step in steps] for rank in range(WORLD)]
    wanted = [SCALE * 2 ** ((step + 1) // 2) for step in range(len(NORMS))]
    what = f"The scaler started with {SCALE:g} and doubles after two good steps. Its scale after each of {len(NORMS)} good steps"
    grader.explain(what, seen, wanted, otherwise="sets-the-scale", at=UPDATE)


@pytest.mark.needs("test_gradients")
def test_result(grader: Grader) -> None:
    """it returns the unscaled loss and norm, and that nothing was skipped"""
    for step in range(len(NORMS)):
        judge_result(grader, float16_run(grader), step)


@pytest.mark.needs("test_gradients")
def test_overflow(grader: Grader) -> None:
    """an overflow on one rank skips the step on all ranks"""
    played = overflow_run(grader)
    for step, what in OVERFLOWS.items():
        seen = played.steps[step]
        moved = [[n for n, end in one["end"].items() if not torch.equal(end, one["start"][n])] for one in seen]
        broken = [n for n, end in seen[0]["end"].items() if not bool(end.isfinite().all())]
        after = f"; now {broken[0]} holds nan" if broken else ""
        took = [rank for rank in range(WORLD) if seen[rank]["used"]]
        hidden = [rank for rank in took if all(bool(g.isfinite().all()) for g in seen[rank]["used"][0].values())]
        said = f"In step {step} {what}, and {{ranks}} stepped with finite gradients: inf and nan were replaced before the scaler looked."
        grader.fail_on(hidden, "hides-overflow", said, at=r"nan_to_num || isfinite || isnan || " + PAST)
        said = f"In step {step} {what}, and the optimizer of {{ranks}} took a step with the mean of that{after}."
        grader.fail_on(took, "steps-past-the-scaler", said, at=PAST)
        changed = [rank for rank in range(WORLD) if moved[rank]]
        said = f"In step {step} {what}, and parameters of {{ranks}} have changed."
        grader.fail_on(changed, "steps-past-the-scaler", said, at=STEP)
        scales = [one["scale"] for one in seen]
        what = f"In step {step} {what}, and the scaler halves its scale. The scale"
        grader.explain(what, scales, SCALE / 2**step, otherwise="sets-the-scale", at=UPDATE)


@pytest.mark.needs("test_overflow", "test_result")
def test_says_skipped(grader: Grader) -> None:
    """every rank reports a skipped step as skipped, and no other step"""
    for step, seen in enumerate(overflow_run(grader).steps):
        right = step in OVERFLOWS
        if not right:
            judge_cleared(grader, overflow_run(grader), step)
        good = "nothing overflowed" if step else "all gradients were zero, and the optimizer took its step"
        what = f"{OVERFLOWS[step]}, and all ranks skipped" if right else good
        wrong = [rank for rank, one in enumerate(seen) if bool(one["skipped"]["value"]) != right]
        said = f"In step {step} {what}. skipped is {not right} on {{ranks}}."
        grader.fail_on(wrong, "misreports-skipping", said, at=SKIPPED)
        finite = [rank for rank, one in enumerate(seen) if right and math.isfinite(one["grad_norm"]["value"])]
        said = f"In step {step} {what}, and grad_norm is a finite number on {{ranks}}."
        grader.fail_on(finite, "wrong-norm", said, at=CLIP)
    seen = bfloat16_overflow_run(grader).steps[0]
    for took, did in ((True, "took its step"), (False, "took no step")):
        wrong = [r for r, one in enumerate(seen) if bool(one["used"]) is took and bool(one["skipped"]["value"]) is took]
        said = f"With bfloat16 rank 1's gradients were nan, and the scaler isn't enabled. The optimizer of {{ranks}} {did}, and skipped is {took} there."
        grader.fail_on(wrong, "misreports-skipping", said, at=SKIPPED)


@pytest.mark.needs("test_overflow")
def test_after_overflow(grader: Grader) -> None:
    """the step after an overflow is a good one"""
    judge_step(grader, overflow_run(grader), len(OVERFLOWS) + 1)


@pytest.mark.needs("test_gradients")
def test_bfloat16(grader: Grader) -> None:
    """bfloat16 works with a scaler that is not enabled"""
    played = bfloat16_run(grader)
    judge_precision(grader, played)
    for step in range(len(played.max_norms)):
        judge_scale(grader, played, step)
        judge_step(grader, played, step)


@pytest.mark.needs("test_bfloat16", "test_result")
def test_bfloat16_result(grader: Grader) -> None:
    """with bfloat16 it returns loss and norm as well"""
    played = bfloat16_run(grader)
    for step in range(len(played.max_norms)):
        judge_result(grader, played, step)
