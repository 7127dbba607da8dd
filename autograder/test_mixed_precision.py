"""What `train_step` of mixed_precision has to do.

    train_step(ddp_model, x, y, loss_fn, optimizer, scaler, *, dtype, max_norm) -> StepResult(loss, grad_norm, skipped)

The model notes in what type its layers compute. The gradients are computed here once more, in double precision, and with
them what the usual wrong orders of scaling, unscaling and clipping would have made of them. They lie further apart than
half precision rounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from lockstep.grading import Grader
from lockstep.grading.verdict import Diagnosis
from lockstep.ranks import Collective, Run
from lockstep.ranks.explain import names
from lockstep.ranks.text import evidence

WORLD = 3  # not a power of two: a fixed 2 or 4 in the code shows
BATCH, FEATURES, HIDDEN, MIDDLE, CLASSES = 6, 6, 16, 8, 5
SHAPES = {
    "first.weight": (HIDDEN, FEATURES), "first.bias": (HIDDEN,), "middle.weight": (MIDDLE, HIDDEN),
    "middle.bias": (MIDDLE,), "last.weight": (CLASSES, MIDDLE), "last.bias": (CLASSES,),
}  # fmt: skip
PAYLOAD = 4 * sum(torch.Size(shape).numel() for shape in SHAPES.values())
FREE = 64  # bytes: a collective this small carries a flag or a loss
SCALE, STALE = 1024.0, 0.75
WIDE, NARROW = 1e6, 0.05  # a norm that the gradients never reach, not even scaled, and one that they always exceed
NORMS = [WIDE, NARROW, WIDE, NARROW, NARROW]
CLIPPED = 1  # a step in which they have to be clipped
# How far half precision may lie from double: five times the worst of 400 random draws (1.6e-3 and 1.6e-2 for gradients,
# 3.7e-4 and 3.2e-3 for losses). The mistakes lie further away.
TOLERANCE = {"float16": 8e-3, "bfloat16": 8e-2}
LOSS_TOLERANCE = {"float16": 2e-3, "bfloat16": 1.6e-2}

FUNCTION = r"def train_step"
AUTOCAST = r"autocast || " + FUNCTION
FORWARD = r"(ddp_)?model\(|net\( || " + FUNCTION
BACKWARD = r"\.backward\( || " + FUNCTION
CLIP = r"clip_grad || clamp || [*/] *max_norm|max_norm *[*/]|> *max_norm || norm = || " + FUNCTION
STEP = r"\.step\( || " + FUNCTION
UPDATE = r"\.update\( || " + STEP
RETURN = r"^\s+return .*StepResult || StepResult\( || ^\s+return || " + FUNCTION
SKIPPED = r"skipped\w* *= || isfinite|isnan|isinf || get_scale || " + RETURN


# What is drawn, and what follows from it -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Played:
    """A run of some steps, and the data that each rank had: `x[rank, step]`, `y[rank, step]`, `sizes[rank, step]`."""

    run: Run
    dtype: str
    x: torch.Tensor
    y: torch.Tensor
    sizes: torch.Tensor
    max_norms: list[float]

    @property
    def steps(self) -> list[list[dict[str, Any]]]:
        """What each rank saw in each step."""
        return self.run.observed("steps")

    def losses(self, step: int) -> list[float]:
        """The loss of each rank's batch."""
        return [self._compute(rank, step)[0] for rank in range(WORLD)]

    def gradient(self, step: int) -> torch.Tensor:
        """The mean over the ranks: unscaled, unclipped."""
        return torch.stack([self._compute(rank, step)[1] for rank in range(WORLD)]).mean(0)

    def _compute(self, rank: int, step: int) -> tuple[float, torch.Tensor]:
        start = self.steps[rank][step]["start"]
        own = {name: start[name].detach().double().cpu().requires_grad_() for name in SHAPES}
        hidden = torch.tanh(F.linear(self.x[rank, step].double(), own["first.weight"], own["first.bias"]))
        hidden = torch.tanh(F.linear(hidden, own["middle.weight"], own["middle.bias"]))
        logits = F.linear(hidden, own["last.weight"], own["last.bias"])
        loss = F.cross_entropy(logits, self.y[rank, step], label_smoothing=0.3) * self.sizes[rank, step].item()
        gradients = torch.autograd.grad(loss, list(own.values()))
        return loss.item(), torch.cat([gradient.flatten() for gradient in gradients])


def flat(gradients: dict[str, torch.Tensor]) -> torch.Tensor:
    """All gradients in one vector; a missing one counts as zeros."""
    found = [gradients.get(name, torch.zeros(shape)).flatten() for name, shape in SHAPES.items()]
    return torch.cat(found).double().cpu()


def by_parameter(vector: torch.Tensor) -> list[torch.Tensor]:
    """The vector cut into what belongs to each parameter."""
    return list(vector.split([torch.Size(shape).numel() for shape in SHAPES.values()]))


def draw(grader: Grader, purpose: str, dtype: str, max_norms: list[float]) -> dict[str, Any]:
    """Weights and data for these steps."""
    generator = torch.Generator().manual_seed(grader.random(purpose).randrange(1 << 30))
    count = len(max_norms)
    # Each rank's samples lie somewhere else, so that the ranks' gradients differ.
    place = torch.randn(WORLD, 1, 1, 1, generator=generator)
    return {
        "initial": {name: torch.randn(shape, generator=generator) / 2 for name, shape in SHAPES.items()},
        "dtype": dtype,
        "scale": SCALE if dtype == "float16" else 0.0,
        "stale": STALE * SCALE if dtype == "float16" else STALE,  # unscale_ divides what is left over as well
        "x": torch.randn(WORLD, count, BATCH, FEATURES, generator=generator) + place,
        "y": torch.randint(0, CLASSES, (WORLD, count, BATCH), generator=generator),
        "sizes": torch.ones(WORLD, count),
        "max_norms": max_norms,
    }


def play(grader: Grader, drawn: dict[str, Any]) -> Played:
    """Call the submission once a step."""
    own = ("x", "y", "sizes")
    each = [{name: drawn[name][rank] for name in own} for rank in range(WORLD)]
    run = grader.run("steps", WORLD, each=each, **{name: value for name, value in drawn.items() if name not in own})
    return Played(run, drawn["dtype"], drawn["x"], drawn["y"], drawn["sizes"], drawn["max_norms"])


def float16_run(grader: Grader) -> Played:
    """Five good steps with a scaler; some have to be clipped."""
    return play(grader, draw(grader, "float16", "float16", NORMS))


def bfloat16_run(grader: Grader) -> Played:
    """Two steps without a scaler."""
    return play(grader, draw(grader, "bfloat16", "bfloat16", [WIDE, NARROW]))


def overflow_run(grader: Grader) -> Played:
    """A good step; one in which rank 1 overflows in backward; one in which it does in forward; a good one."""
    drawn = draw(grader, "overflow", "float16", [NARROW] * 4)
    drawn["sizes"][1, 1] = 1e6  # a loss that float32 can hold, with gradients that float16 cannot
    drawn["x"][1, 2] *= 1e6  # beyond float16 as soon as the first layer takes it in
    return play(grader, drawn)


OVERFLOWS = {1: "rank 1's gradients overflowed float16, its loss did not", 2: "rank 1's forward overflowed float16"}


def sent(run: Run, rank: int, step: int) -> list[Collective]:
    """The collectives of one call that carry gradients, not a few numbers or DDP's own bookkeeping."""
    report = run.ranks[rank]
    begin = [mark.number for mark in report.marks if mark.name == "call"][step]
    end = [mark.number for mark in report.marks if mark.name == "done"][step]
    found = [one for one in report.collectives if begin < one.number < end]
    return [one for one in found if one.nbytes > FREE and one.inside not in ("forward", "DDP()")]


def read_failure(grader: Grader, run: Run) -> Diagnosis | None:
    """Name what a failed run of this exercise usually means."""
    cause = run.cause
    assert cause is not None
    step = max((number for number in run.observed("step") if number is not None), default=0)
    if cause.error is not None:
        return read_error(grader, cause.error, cause.ranks, step)
    if cause.kind not in ("hang", "mismatch", "crashed", "exited") or not step:
        return None
    return grader.diagnosis(
        "skips-alone",
        f"{cause.headline[0].upper()}{cause.headline[1:].rstrip('.')}. Before that rank 1 had overflowed, and the others "
        "had not: whoever leaves a step early leaves the others in its all-reduce.",
        evidence=evidence(run),
        of=cause.ranks,
        at=r"isfinite || isnan || isinf || " + BACKWARD,
    )


def read_error(grader: Grader, error: Any, ranks: tuple[int, ...], step: int) -> Diagnosis | None:
    """Name what the scaler, or the clipping, complains of."""
    said = f"In step {step} {names(ranks)} raised {error.type}: {error.message.strip().splitlines()[0].rstrip('.')}"
    text = error.message
    if "unscale_() has already been called" in text and step == 0:
        return grader.diagnosis("unscales-twice", f"{said}.", of=ranks, at=error.frame)
    if step and ("has already been called" in text or "after step()" in text):
        what = f"{said}: step {step - 1} had ended without update()."
        return grader.diagnosis("never-updates-scale", what, of=ranks, at=UPDATE)
    if "after step()" in text:
        return grader.diagnosis("unscales-too-late", f"{said}.", of=ranks, at=error.frame)
    if "No inf checks were recorded" in text:
        what = f"{said}. The scaler was never asked to step or to unscale."
        return grader.diagnosis("steps-past-the-scaler", what, of=ranks, at=r"optimizer\.step\( || " + STEP)
    if "_scale is None" in text:
        what = f"{said.partition('  This may')[0].rstrip('.')}. scaler.scale was never called."
        return grader.diagnosis("never-scales-loss", what, of=ranks, at=BACKWARD)
    if "unscale FP16 gradients" in text:
        what = f"{said}. The parameters are float16."
        return grader.diagnosis("casts-the-model", what, of=ranks, at=r"\.half\( || \.to\( || " + FUNCTION)
    if "is non-finite, so it cannot be clipped" in text:
        return grader.diagnosis("raises-on-overflow", f"{said}.", of=ranks, at=error.frame)
    return None


# Precision -----------------------------------------------------------------------------------------------------------


def judge_precision(grader: Grader, played: Played) -> None:
    """What the layers, the loss, the parameters and the backward ran in."""
    wanted = played.dtype
    for rank, step in ((rank, step) for rank in range(WORLD) for step in range(len(played.max_norms))):
        seen = played.steps[rank][step]
        types = seen["types"]
        if seen["parameters"] != ["float32"]:
            grader.fail(
                "casts-the-model",
                f"After step {step} the parameters of rank {rank} are {' and '.join(seen['parameters'])}; they came as "
                "float32.",
                of=[rank],
                at=r"\.half\( || \.bfloat16\( || \.to\( || " + FUNCTION,
            )
        if types["first"] == types["last"] == "float32":
            grader.fail(
                "no-autocast",
                f"With dtype=torch.{wanted} the layers of rank {rank} computed in float32. Autocast was off, or on for "
                "another type of device than the batch is on.",
                of=[rank],
                at=AUTOCAST,
            )
        other = next((name for name in ("first", "last") if types[name] != wanted), None)
        if other is not None:
            grader.fail(
                "dtype-hard-coded",
                f"With dtype=torch.{wanted} the {other} layer of rank {rank} computed in {types[other]}.",
                of=[rank],
                at=r"float16 || autocast || " + FUNCTION,
            )
        if types["loss"] != "float32":
            grader.fail(
                "loss-in-half",
                f"The loss of rank {rank} is a {types['loss']}: with an output in {wanted}, loss_fn was called where autocast "
                "no longer looked after it.",
                of=[rank],
                at=r"loss_fn\( || " + AUTOCAST,
            )
        if seen["autocast_in_backward"]:
            grader.fail(
                "backward-under-autocast",
                f"On rank {rank} autocast was still on in backward. The model has a layer that computes in float32, and its "
                f"gradient was computed in {wanted}.",
                of=[rank],
                at=BACKWARD,
            )


def judge_traffic(grader: Grader, played: Played, step: int) -> None:
    """The gradients cross the network once, through DDP."""
    for rank in range(WORLD):
        marks = [mark for mark in played.run.ranks[rank].marks if mark.name == "ddp"]
        carried = sent(played.run, rank, step)
        total = sum(one.nbytes for one in carried)
        if not marks and total < PAYLOAD / 2:
            grader.fail(
                "bypasses-ddp",
                f"Rank {rank} ran the model, and never through the DDP wrapper: none of its {PAYLOAD} bytes of gradients "
                "was sent.",
                of=[rank],
                at=r"\.module || " + FORWARD,
            )
        if total > 1.5 * PAYLOAD:
            again = next((one.frame for one in carried if one.inside != "backward"), carried[-1].frame)
            grader.fail(
                "double-work",
                f"In step {step} rank {rank} put {total} bytes into {len(carried)} gradient collectives; its gradients have "
                f"{PAYLOAD} bytes, in float32.",
                of=[rank],
                at=again,
            )


# Gradients -----------------------------------------------------------------------------------------------------------


def judge_scale(grader: Grader, played: Played, step: int) -> None:
    """What backward began with."""
    for rank in range(WORLD):
        seen = played.steps[rank][step]
        factor, scale = seen["factor"], seen["scale_before"]
        if factor is None or factor == scale:
            continue
        what = f"In step {step} the scaler's scale was {scale:g}, and backward of rank {rank} began with {factor:g}."
        if factor == 1:
            what += " In float16 gradients below 6e-8 are lost."
        grader.fail("never-scales-loss" if factor == 1 else "other-scale", what, of=[rank], at=BACKWARD)


def judge_step(grader: Grader, played: Played, step: int) -> None:
    """The gradients that the optimizer used in a good step; fails with what they are instead."""
    wanted_norm = played.max_norms[step]
    gradient = played.gradient(step)
    norm = float(gradient.norm())
    wanted = gradient * min(1.0, wanted_norm / norm)
    tolerance = TOLERANCE[played.dtype]

    def close(seen: torch.Tensor, other: torch.Tensor) -> bool:
        return bool((seen - other).norm() <= tolerance * other.norm())

    for rank in range(WORLD):
        used = played.steps[rank][step]["used"]
        scale = played.steps[rank][step]["scale_before"]
        if len(used) != 1:
            grader.fail(
                "no-step" if not used else "steps-twice",
                f"In step {step} nothing overflowed, and rank {rank}'s optimizer took {len(used)} steps.",
                of=[rank],
                at=STEP,
            )
        seen = flat(used[0])
        if close(seen, wanted):
            continue
        found = float(seen.norm())
        what = (
            f"In step {step} the gradients have a norm of {norm:.4g}, max_norm is {wanted_norm:g}, and rank {rank} stepped "
            f"with a norm of {found:.4g}."
        )
        surplus = seen - wanted
        if step == 0 and surplus.std() < 0.05 * surplus.abs().mean():
            left = f"each held {surplus.mean() * scale:.3g} before the call"
            left += f", which unscaling has divided by {scale:g}." if scale > 1 else "."
            grader.fail(
                "missing-zero-grad",
                f"{what} Every gradient is {surplus.mean():.3g} too large: {left}",
                of=[rank],
                at=r"zero_grad || " + BACKWARD,
            )
        if close(seen, gradient):
            grader.fail("never-clips", f"{what} They were not clipped.", of=[rank], at=CLIP)
        if scale > 1 and close(seen, gradient * min(1.0, wanted_norm / (norm * scale))):
            grader.fail(
                "clips-scaled-gradients",
                f"{what} They were clipped while they were still {scale:g} times as large, and divided by that afterwards.",
                of=[rank],
                at=CLIP,
            )
        if scale > 1 and close(seen, gradient * scale):
            grader.fail(
                "steps-past-the-scaler",
                f"{what} They were still scaled by {scale:g} when the optimizer took them.",
                of=[rank],
                at=r"optimizer\.step\( || " + STEP,
            )
        if close(seen, gradient.clamp(-wanted_norm, wanted_norm)):
            grader.fail(
                "clips-by-value",
                f"{what} Each number was cut off at {wanted_norm:g} by itself, so the gradient points elsewhere.",
                of=[rank],
                at=r"clip_grad_value || clamp || " + CLIP,
            )
        pieces = [piece * min(1.0, wanted_norm / float(piece.norm())) for piece in by_parameter(gradient)]
        if close(seen, torch.cat(pieces)):
            grader.fail(
                "clips-each-parameter",
                f"{what} Each parameter's gradient was clipped to {wanted_norm:g} by itself.",
                of=[rank],
                at=CLIP,
            )
        if close(seen, gradient / norm * found):
            grader.fail(
                "wrong-clip",
                f"{what} The direction is right, the length is {found / float(wanted.norm()):.4g} times what it should be.",
                of=[rank],
                at=CLIP,
            )
        grader.fail("wrong-amp-gradient", what, of=[rank], at=BACKWARD)


def judge_result(grader: Grader, played: Played, step: int) -> None:
    """What a good step returned."""
    losses = played.losses(step)
    norm = float(played.gradient(step).norm())
    for rank in range(WORLD):
        seen = played.steps[rank][step]
        missing = [name for name in ("loss", "grad_norm", "skipped") if not seen[name]["there"]]
        if missing:
            grader.fail(
                "no-step-result",
                f"Rank {rank} got a {seen['result']} back, which has no {missing[0]}.",
                of=[rank],
                at=RETURN,
            )
        for name, kind in (("loss", "float"), ("grad_norm", "float"), ("skipped", "bool")):
            if seen[name]["type"] != kind:
                grader.fail(
                    "returns-a-tensor",
                    f"On rank {rank} {name} is a {seen[name]['type']}, where a {kind} is promised.",
                    of=[rank],
                    at=RETURN,
                )
        loss, given, scale = losses[rank], seen["loss"]["value"], seen["scale_before"]
        tolerance = LOSS_TOLERANCE[played.dtype]
        if abs(given - loss) > tolerance * loss:
            what = f"In step {step} rank {rank} returned a loss of {given:.4g}; that of its batch is {loss:.4g}."
            if scale > 1 and abs(given - loss * scale) <= tolerance * loss * scale:
                grader.fail("returns-scaled-loss", f"{what} It is {scale:g} times as large.", of=[rank], at=RETURN)
            grader.fail("wrong-batch-loss", what, of=[rank], at=RETURN)
        given = seen["grad_norm"]["value"]
        tolerance = TOLERANCE[played.dtype]
        if abs(given - norm) > tolerance * norm:
            what = f"In step {step} rank {rank} returned a grad_norm of {given:.4g}; before clipping it is {norm:.4g}."
            if scale > 1 and abs(given - norm * scale) <= tolerance * norm * scale:
                grader.fail("norm-of-scaled-gradients", f"{what} It is {scale:g} times as large.", of=[rank], at=CLIP)
            if abs(given - played.max_norms[step]) <= tolerance * played.max_norms[step]:
                grader.fail("norm-after-clipping", f"{what} It is what clipping has left of it.", of=[rank], at=RETURN)
            grader.fail("wrong-norm", what, of=[rank], at=CLIP)
        if seen["skipped"]["value"]:
            grader.fail(
                "misreports-skipping",
                f"In step {step} rank {rank}'s optimizer took its step, and skipped is True. The scale went from {scale:g} "
                f"to {seen['scale']:g}.",
                of=[rank],
                at=SKIPPED,
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
    played = float16_run(grader)
    for step in range(len(NORMS)):
        judge_scale(grader, played, step)


@pytest.mark.needs("test_scaled")
def test_gradients(grader: Grader) -> None:
    """the optimizer steps with unscaled gradients, clipped by their common norm"""
    played = float16_run(grader)
    for step in range(len(NORMS)):
        judge_step(grader, played, step)


@pytest.mark.needs("test_gradients")
def test_scale_grows(grader: Grader) -> None:
    """the scale grows after good steps"""
    played = float16_run(grader)
    wanted = [SCALE * 2 ** ((step + 1) // 2) for step in range(len(NORMS))]
    for rank in range(WORLD):
        seen = [one["scale"] for one in played.steps[rank]]
        if seen != wanted:
            grader.fail(
                "sets-the-scale",
                f"The scaler began with {SCALE:g} and doubles after two good steps. After each of {len(NORMS)} good steps on "
                f"rank {rank} it had {', '.join(f'{scale:g}' for scale in seen)} instead of "
                f"{', '.join(f'{scale:g}' for scale in wanted)}.",
                of=[rank],
                at=UPDATE,
            )


@pytest.mark.needs("test_gradients")
def test_result(grader: Grader) -> None:
    """it returns the unscaled loss and norm, and that nothing was skipped"""
    played = float16_run(grader)
    for step in range(len(NORMS)):
        judge_result(grader, played, step)


@pytest.mark.needs("test_gradients")
def test_overflow(grader: Grader) -> None:
    """an overflow on one rank skips the step on all ranks"""
    played = overflow_run(grader)
    scale = SCALE
    for step, what in OVERFLOWS.items():
        scale /= 2
        for rank in range(WORLD):
            seen = played.steps[rank][step]
            if seen["used"]:
                broken = [name for name, tensor in seen["end"].items() if not bool(tensor.isfinite().all())]
                after = f"; now {broken[0]} holds nan" if broken else ""
                grader.fail(
                    "steps-past-the-scaler",
                    f"In step {step} {what}, and rank {rank}'s optimizer took a step with the mean of that{after}.",
                    of=[rank],
                    at=r"optimizer\.step\( || " + STEP,
                )
            moved = [name for name, tensor in seen["end"].items() if not torch.equal(tensor, seen["start"][name])]
            if moved:
                grader.fail(
                    "steps-past-the-scaler",
                    f"In step {step} {what}, and {moved[0]} of rank {rank} has changed.",
                    of=[rank],
                    at=STEP,
                )
            if seen["scale"] != scale:
                grader.fail(
                    "sets-the-scale",
                    f"In step {step} {what}. The scale on rank {rank} is {seen['scale']:g} after it; the scaler halves it, to "
                    f"{scale:g}.",
                    of=[rank],
                    at=UPDATE,
                )


@pytest.mark.needs("test_overflow", "test_result")
def test_says_skipped(grader: Grader) -> None:
    """every rank says that the step was skipped, and that only then"""
    played = overflow_run(grader)
    for step in range(len(played.max_norms)):
        said = [bool(played.steps[rank][step]["skipped"]["value"]) for rank in range(WORLD)]
        norms = [played.steps[rank][step]["grad_norm"]["value"] for rank in range(WORLD)]
        wrong = [rank for rank in range(WORLD) if said[rank] != (step in OVERFLOWS)]
        if wrong:
            what = f"{OVERFLOWS[step]}, and all ranks skipped" if step in OVERFLOWS else "nothing overflowed"
            grader.fail(
                "misreports-skipping",
                f"In step {step} {what}. skipped is {said[wrong[0]]} on {names(wrong)}.",
                of=wrong,
                at=SKIPPED,
            )
        finite = [rank for rank in range(WORLD) if step in OVERFLOWS and math.isfinite(norms[rank])]
        if finite:
            grader.fail(
                "wrong-norm",
                f"In step {step} {OVERFLOWS[step]}, and grad_norm is {norms[finite[0]]:g} on {names(finite)}.",
                of=finite,
                at=CLIP,
            )


@pytest.mark.needs("test_overflow")
def test_after_overflow(grader: Grader) -> None:
    """the step after an overflow is a good one"""
    judge_step(grader, overflow_run(grader), 3)


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
