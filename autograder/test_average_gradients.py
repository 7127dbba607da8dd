"""What `average_gradients` has to do.

    average_gradients(model) -> None

Every rank is given gradients that were drawn here, and no rank another's; each reports those that it has afterwards.
When they are not the mean, the usual mistakes are computed as well: the one that gives the same numbers is the
diagnosis.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from lockstep.grading import Cause, Diagnosis, Grader, Run, ending, equal, evidence, names, one_or_more, say_mismatch

WORLD = 3  # not a power of two: a fixed 2 or 4 in the code shows
SHAPES = {
    "encoder.weight": (7, 5), "frozen": (4, 5), "left.weight": (3, 5), "left.bias": (3,), "right.weight": (3, 5),
    "right.bias": (3,), "scale": (), "left.spare": (0, 5), "right.spare": (0, 5),
}  # fmt: skip
TRAINED = [name for name in SHAPES if name != "frozen"]
COMMON = ["encoder.weight", "scale"]  # what every rank has a gradient for when the branches are not all taken
ZERO_TOGETHER = (3.0, 1.0, -4.0)  # gradients whose mean is exactly 0: that is not the same as none
ONE_SIDED = "The check's model has two branches, and only rank 1 has gradients for the left one"
ALL_BUT_ONE = "Rank 1 had no gradients for the branches, the other ranks had all gradients"
LEFT, RIGHT = ["left.weight", "left.bias", "left.spare"], ["right.weight", "right.bias", "right.spare"]

FUNCTION = r"def average_gradients"
REDUCE = r"all_reduce\(.*grad || all_reduce\( || reduce\( || all_gather || " + FUNCTION
DIVIDE = r"/ || div || AVG || " + REDUCE
MISSING = r"grad is None || is not None || " + REDUCE
WALK = r"parameters\( || state_dict || " + FUNCTION

Gradients = list[dict[str, torch.Tensor]]


def draw(grader: Grader, purpose: str, held: list[list[str]]) -> Gradients:
    """Gradients for every rank: `held[rank]` says which it has. What is large on one rank is small on the next."""
    generator = grader.generator(purpose)

    def one(rank: int, name: str) -> torch.Tensor:
        size = 4 if (name in RIGHT) == (rank % 2 == 0) else 1
        return size * (torch.randn(SHAPES[name], generator=generator) + 1)

    return [{name: one(rank, name) for name in names} for rank, names in enumerate(held)]


def averages(grader: Grader, gradients: Gradients, **options: Any) -> Run:
    """Give each rank its own, and nobody else's."""
    usual: dict[str, Any] = {key: [] for key in ("freeze", "doubles", "earlier", "thawed")}
    usual |= {"dtype": "float32", "variables": {}, "training": True}
    each = [{"gradients": own} for own in gradients]
    return grader.run("averages", len(gradients), each=each, **usual | options)


def everywhere(grader: Grader) -> tuple[Run, Gradients]:
    """Every rank has a gradient for everything that is trained."""
    gradients = draw(grader, "everywhere", [TRAINED] * WORLD)
    for own, number in zip(gradients, ZERO_TOGETHER, strict=True):
        own["scale"] = torch.tensor(number)
    return averages(grader, gradients), gradients


def branches(grader: Grader) -> tuple[Run, Gradients]:
    """The left branch was taken on rank 1 only, the right one by nobody."""
    gradients = draw(grader, "branches", [COMMON, COMMON + LEFT, COMMON])
    gradients[1]["left.bias"].zero_()  # all zeros, and a gradient
    return averages(grader, gradients), gradients


def read_failure(grader: Grader, run: Run, cause: Cause) -> Diagnosis | None:
    """Name what a failed run of this exercise usually means."""
    if cause.error is not None and "NoneType" in cause.error.message:
        said = f"{names(cause.ranks).capitalize()} raised {cause.error}. A parameter that isn't part of the loss has a gradient of None."
        return grader.diagnosis("trips-over-none", said, of=cause.ranks, at=cause.error.frame)
    if cause.error is not None and any(run.observed("again")) and "stride" not in cause.error.message:
        said = f"In the first call left.bias was frozen. In a second call it no longer was, and {names(cause.ranks)} raised {cause.error}"
        return grader.diagnosis("goes-by-the-first-call", said, of=cause.ranks, at=cause.error.frame)
    if cause.kind not in ("hang", "mismatch", "crashed"):
        return None
    sizes = [[call.nbytes for call in calls if call.nbytes] for calls in run.collectives]
    if cause.kind == "crashed" and not any(sizes):  # for a reason of its own
        return None
    brought = "; ".join(f"rank {rank}: {len(own)}, together {sum(own)} bytes" for rank, own in enumerate(sizes))
    held = [len(names or []) for names in run.observed("held")]
    uneven, lack = len(set(held)) > 1, [rank for rank, count in enumerate(held) if count < max(held)]
    if not uneven:
        had = "All ranks had a gradient for every parameter, but their collectives don't match"
    elif max(held) == len(TRAINED):
        had = f"{ALL_BUT_ONE}, and the ranks stopped calling the same collectives"
    elif all(held):
        had = f"{ONE_SIDED}, and the ranks stopped calling the same collectives"
    elif any(call.nbytes == 24 and "float64" in str(call.dtype) for call in run.collectives[1]):  # right.bias
        uneven = False
        had = "Rank 0 had a gradient for encoder.weight alone, which is float32, rank 1 had none, and the ranks started with parameters of different dtypes"
    else:
        had = f"Rank 1 had no gradient at all and made {len(sizes[1]) or 'no'} communication calls; every rank must make the same ones"
    return grader.diagnosis(
        "skips-missing-gradients" if uneven else "order-differs",
        f"{had}.{ending(cause)} Collectives seen: {brought}.",
        evidence=evidence(run, lack if uneven and all(held) else None),
        of=cause.ranks,
        at=MISSING if uneven else r"\.dtype || " + WALK,
    )


# What can have happened to one gradient ------------------------------------------------------------------------------


def close(seen: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Equal but for the rounding of single precision."""
    return seen.shape == wanted.shape and torch.allclose(seen.float(), wanted, rtol=1e-4, atol=1e-5)


def short(tensor: torch.Tensor) -> str:
    """Its first number, as a learner would print it."""
    return f"{tensor.flatten()[0].item():.4f}" if tensor.numel() else "nothing"


def mean_of(gradients: Gradients, name: str) -> torch.Tensor:
    """The mean over the world size, where missing counts as zero."""
    return torch.stack([own.get(name, torch.zeros(SHAPES[name])) for own in gradients]).sum(0) / WORLD


def judge_mean(grader: Grader, seen: Gradients, gradients: Gradients, name: str) -> None:
    """One parameter's gradient on every rank, against the mean; fails with what it is instead."""
    wanted = mean_of(gradients, name)
    having = [r for r in range(WORLD) if name in gradients[r]]
    if without := [rank for rank in range(WORLD) if name not in seen[rank]]:
        it = f"The mean starts with {short(wanted)}" if wanted.numel() else "It has no elements, but it isn't None"
        what = f"{name}.grad is still None on {names(without)}, but {names(having)} had one. {it}."
        at = MISSING if wanted.numel() else r"numel\( || data_ptr || " + MISSING
        grader.fail("missing-stays-missing", what, of=without, at=at)
    wrong = [rank for rank in range(WORLD) if not close(seen[rank][name], wanted)]
    if not wrong:
        return
    rank = wrong[0]
    got = seen[rank][name]
    missing = torch.zeros(SHAPES[name])
    own = gradients[rank].get(name, missing)
    what = (
        f"{name}.grad starts with {short(got)} on rank {rank}; the mean over {WORLD} ranks starts with {short(wanted)}."
    )
    if wanted.isinf().any() and all(seen[r][name].isfinite().all() for r in range(WORLD)):
        said = f"{name}.grad was inf on {names([r for r in having if gradients[r][name].isinf()])} and is {got.max():.3g} on rank {rank} now. The mean is inf on all ranks."
        grader.fail("leaves-out-inf", said, of=wrong, at=r"nan_to_num || isfinite|isinf|isnan || clamp || " + REDUCE)
    if len(wrong) < WORLD and all(close(seen[r][name], wanted * WORLD) for r in wrong):
        had_none = (
            f", and had no gradient before: only {names(having)} divided" if set(wrong).isdisjoint(having) else ""
        )
        whose = f"{names(wrong).capitalize()} {one_or_more(wrong, 'has', 'have')} the sum, {WORLD} times too large{had_none}."
        grader.fail("never-divides", f"{what} {whose}", of=wrong, at=DIVIDE)
    if len(wrong) < WORLD:
        right = [r for r in range(WORLD) if r not in wrong]
        grader.fail("only-one-rank", f"{what} Only these ranks have the mean: {names(right)}.", of=wrong, at=REDUCE)
    if name in gradients[0] and all(close(seen[r][name], gradients[0][name]) for r in range(WORLD)):
        grader.fail(
            "takes-one-gradient",
            f"{what} All ranks have rank 0's gradient; the gradients of the others are lost.",
            of=range(1, WORLD),
            at=r"broadcast || " + REDUCE,
        )
    if close(got, own):
        cancel = wanted.numel() and not wanted.any()
        zero = " The ranks' gradients cancel out, which isn't the same as none." if cancel else ""
        id, at = ("takes-zero-for-missing", MISSING) if zero else ("not-averaged", REDUCE)
        grader.fail(id, f"{what} It is still that rank's own gradient.{zero}", of=wrong, at=at)
    if close(got, own / WORLD):
        grader.fail("not-averaged", f"{what} It is that rank's own gradient, divided by {WORLD}.", of=wrong, at=REDUCE)
    if len(having) < WORLD and close(got, wanted * WORLD / len(having)):
        grader.fail(
            "divides-by-contributors",
            f"{what} It was divided by {len(having)}, the number of ranks that had a gradient, instead of {WORLD}.",
            of=wrong,
            at=DIVIDE,
        )
    sums, shares = close(got, wanted * WORLD), close(got, wanted / WORLD)
    others = {other: now for other, now in seen[rank].items() if other in (*LEFT, "scale")}
    tied = name == "encoder.weight" and all(close(now, mean_of(gradients, other)) for other, now in others.items())
    if tied and (sums or shares):
        how = "divided" if shares else "all-reduced"
        what += f" The encoder and the decoder share this parameter, and it was {how} once for each."
        at = r"remove_duplicate || modules\( || children\( || "
        grader.fail("averages-tied-twice", what, of=wrong, at=at + (DIVIDE if shares else REDUCE))
    if sums:
        grader.fail("never-divides", f"{what} It is the sum, {WORLD} times too large.", of=wrong, at=REDUCE)
    if shares:
        grader.fail("divides-twice", f"{what} It was divided by {WORLD} twice.", of=wrong, at=DIVIDE)
    alike = [other for other in TRAINED if SHAPES[other] == SHAPES[name]]
    for mixed in itertools.product(alike, repeat=WORLD):
        if close(got, torch.stack([gradients[r].get(mixed[r], missing) for r in range(WORLD)]).sum(0) / WORLD):
            said = ", ".join(f"rank {r}'s {other}" for r, other in enumerate(mixed))
            grader.fail("order-differs", f"{what} It is the mean of {said}.", of=wrong, at=WALK)
    factor = (got.sum() / wanted.sum()).item()
    if math.isfinite(factor) and close(got, wanted * factor):
        grader.fail(
            "wrong-divisor",
            f"{what} It is the sum of all gradients divided by {WORLD / factor:.3g} instead of {WORLD}.",
            of=wrong,
            at=DIVIDE,
        )
    grader.fail("wrong-mean", what, of=wrong, at=REDUCE)


# The checks ----------------------------------------------------------------------------------------------------------


def test_mean(grader: Grader) -> None:
    """every gradient becomes the mean over all ranks"""
    run, gradients = everywhere(grader)
    met = run.silent_mismatch
    if met:
        said = f"All ranks had a gradient for every parameter, but {say_mismatch(met)}."
        grader.fail("order-differs", said, of=met, at=WALK)
    changed = run.observed("changed")
    for rank, parameters in enumerate(changed):
        if parameters:
            said = f"On rank {rank} the parameter {parameters[0]} itself was changed; change its gradient instead."
            grader.fail("averages-parameters", said, of=[rank], at=r"\.data || " + REDUCE)
    seen = run.observed("gradients")
    for name in TRAINED:
        gone = [rank for rank in range(WORLD) if name not in seen[rank]]
        if gone:
            if not mean_of(gradients, name).any():
                said = f"{name}.grad is None on {names(gone)}. Every rank had one, and a mean of exactly 0 is a gradient, too."
                grader.fail("takes-zero-for-missing", said, of=gone, at=r"(=|else) None || " + MISSING)
            grader.fail("not-averaged", f"{name}.grad is None on {names(gone)}.", of=gone, at=REDUCE)
    for name in sorted(TRAINED, key=lambda name: name == "encoder.weight"):  # the tied one has mistakes of its own
        judge_mean(grader, seen, gradients, name)
    for name in TRAINED:
        apart = [rank for rank in range(WORLD) if not torch.equal(seen[rank][name], seen[0][name])]
        far = max(((seen[rank][name] - seen[0][name]).abs().max().item() for rank in apart), default=0)
        what = f"{name}.grad is the mean on all ranks but for its last bits: on {{ranks}} it is up to {far:.1e} away from rank 0's. Each order of adding them rounds in its own way."
        grader.fail_on(apart, "adds-in-own-order", what, at=r"\+= || sum\( || for .* in range || " + REDUCE)
    payload = sum(own.numel() * own.element_size() for own in gradients[0].values())
    for rank, calls in enumerate(run.collectives):
        moved = sum(call.nbytes for call in calls)
        if moved < payload:
            grader.fail(
                "no-communication",
                f"The gradients are correct, but rank {rank} put {moved} bytes into {len(calls)} communication calls; its own "
                f"gradients alone are {payload}.",
                of=[rank],
                at=FUNCTION,
            )


@pytest.mark.needs("test_mean")
def test_tied_once(grader: Grader) -> None:
    """a parameter that is used in two places is averaged once"""
    run, _ = everywhere(grader)
    tied = 4 * 7 * 5
    payload = sum(4 * torch.Size(SHAPES[name]).numel() for name in TRAINED)
    for rank, calls in enumerate(run.collectives):
        moved = sum(call.nbytes for call in calls if call.kind == "all_reduce")
        reductions = [call for call in calls if call.kind == "all_reduce" and call.nbytes == tied]
        if moved >= payload + tied:
            grader.fail(
                "averages-tied-twice",
                f"Rank {rank} put {moved} bytes into all-reduces for {payload} bytes of gradients"
                + (
                    f": the {tied} bytes of encoder.weight went {len(reductions)} times."
                    if len(reductions) > 1
                    else "."
                ),
                of=[rank],
                at=r"remove_duplicate || modules\( || children\( || " + WALK,
            )


@pytest.mark.needs("test_mean")
def test_frozen(grader: Grader) -> None:
    """a frozen parameter is left alone, whatever its grad holds"""
    gradients = draw(grader, "frozen", [[*TRAINED, "frozen"]] * WORLD)
    gradients[1]["scale"].fill_(math.inf)
    # The second time a single parameter is still trained: some begin with their first or second one.
    for frozen in (["frozen"], [name for name in SHAPES if name != "scale"]):
        run = averages(grader, gradients, freeze=frozen)
        for (rank, seen), name in itertools.product(enumerate(run.observed("gradients")), frozen):
            if name not in seen or not torch.equal(seen[name], gradients[rank][name]):
                now = short(seen[name]) if name in seen else "None"
                said = f"The frozen parameter's grad, left over from before it was frozen, started with {short(gradients[rank][name])} on rank {rank} and is now {now}."
                grader.fail("touches-frozen", said, of=[rank], at=WALK)
        judge_mean(grader, run.observed("gradients"), gradients, "scale")


@pytest.mark.needs("test_mean")
def test_missing_on_some(grader: Grader) -> None:
    """a gradient that some ranks lack counts as zero there"""
    run, gradients = branches(grader)
    met = run.silent_mismatch
    if met:
        grader.fail("skips-missing-gradients", f"{ONE_SIDED}, and {say_mismatch(met)}.", of=met, at=MISSING)
    seen = run.observed("gradients")
    for name in LEFT:
        without = [rank for rank in range(WORLD) if name not in seen[rank]]
        if without:
            if gradients[1][name].numel() and not gradients[1][name].any():
                what = f"{name}.grad is still None on {names(without)}. Rank 1 has a gradient of zeros, which isn't the same as none: the mean is zeros on all ranks."
                grader.fail("takes-zero-for-missing", what, of=without, at=MISSING)
            if gradients[1][name].numel() and name in seen[1] and torch.equal(seen[1][name], gradients[1][name]):
                what = f"No rank averaged {name}.grad, although rank 1 has one: it is unchanged there, and None on {names(without)}."
                at = r"broadcast || MIN || all\(|prod || " + MISSING
                grader.fail("skips-for-one-rank", what, of=range(WORLD), at=at)
        judge_mean(grader, seen, gradients, name)
    for name in COMMON:
        judge_mean(grader, seen, gradients, name)
    used = ["encoder.weight", "right.bias"]
    nothing = draw(grader, "nothing", [used[:1], [], used])
    seen = averages(grader, nothing, doubles=["scale", "right.bias"], training=False).observed("gradients")
    left = [name for name in used if all(equal(seen[r].get(name), nothing[r].get(name)) for r in range(WORLD))]
    if left == used:
        what = "The model is in eval mode here, and no gradient changed on any rank. In train mode they were averaged."
        grader.fail("not-averaged", what, of=range(WORLD), at=r"\.training || " + FUNCTION)
    if left == ["right.bias"]:
        what = "right.bias is float64 here, and no rank averaged its gradient. That of encoder.weight, which is float32, was averaged."
        grader.fail("skips-a-dtype", what, of=range(WORLD), at=r"dtype || " + WALK)
    for name in used:
        judge_mean(grader, seen, nothing, name)
    most = draw(grader, "most", [TRAINED, COMMON, TRAINED])
    run = averages(grader, most)
    if met := run.silent_mismatch:
        grader.fail("skips-missing-gradients", f"{ALL_BUT_ONE}, and {say_mismatch(met)}.", of=met, at=MISSING)
    for name in (*LEFT, *RIGHT):
        judge_mean(grader, run.observed("gradients"), most, name)


@pytest.mark.needs("test_missing_on_some")
def test_missing_everywhere(grader: Grader) -> None:
    """a parameter without a gradient on all ranks keeps None"""
    run, _ = branches(grader)
    for rank, seen in enumerate(run.observed("gradients")):
        invented = [name for name in [*RIGHT, "frozen"] if name in seen]
        if invented:
            grader.fail(
                "invents-gradients",
                f"{invented[0]} had no gradient on any rank, and rank {rank} now has one, "
                f"{'all zeros' if not seen[invented[0]].any() else 'beginning with ' + short(seen[invented[0]])}.",
                of=[rank],
                at=r"zeros || " + MISSING,
            )


@pytest.mark.needs("test_missing_on_some")
def test_swapped_branches(grader: Grader) -> None:
    """branches of equal size are not mixed up"""
    gradients = draw(grader, "swapped", [COMMON + LEFT, COMMON + RIGHT, COMMON + LEFT])
    earlier = {"earlier": [*COMMON, "right.bias"], "thawed": ["left.bias"]}
    seen = averages(grader, gradients, dtype="float64", **earlier).observed("gradients")
    same = {
        name: all(equal(now.get(name), own.get(name)) for now, own in zip(seen, gradients, strict=True))
        for name in (*LEFT, *RIGHT)
    }
    first, kept = "goes-by-the-first-call", r"getattr|hasattr|global |cache || " + FUNCTION
    if all(alike for name, alike in same.items() if name != "right.bias"):
        what = "In the first call the ranks had gradients for encoder.weight, scale and right.bias only. In a second call with gradients for both branches, these alone were averaged."
        grader.fail(first, what, of=range(WORLD), at=kept)
    if same["left.bias"] and not same["right.weight"]:
        what = "In the first call left.bias was frozen. In a second call it no longer was, ranks 0 and 2 had gradients for it, and no rank averaged them."
        grader.fail(first, what, of=range(WORLD), at=kept)
    again = mean_of([{"right.bias": torch.ones(3)} | own for own in gradients], "right.bias")
    stale = [rank for rank, now in enumerate(seen) if "right.bias" in now and close(now["right.bias"], again)]
    right = short(mean_of(gradients, "right.bias"))
    what = f"In a second call, ranks 0 and 2 had no gradient for right.bias and contributed their 1 from the first call, not 0: its gradient starts with {short(again)} on {{ranks}}; the mean starts with {right}."
    grader.fail_on(stale, first, what, at=kept)
    if not same["left.bias"] and equal(seen[0].get("left.weight"), gradients[0]["left.weight"]):
        what = "left.weight.grad is stored by columns here, and rank 0 still has its own: a copy of it was averaged. Gradients stored by rows were averaged in place."
        grader.fail("not-averaged", what, of=[0], at=r"reshape || contiguous\( || flatten || " + REDUCE)
    for name in (*LEFT, *RIGHT):
        judge_mean(grader, seen, gradients, name)
        wanted = torch.stack([own.get(name, torch.zeros(SHAPES[name])).double() for own in gradients]).mean(0)
        off = [(now[name] - wanted).abs().max().item() if wanted.numel() else 0.0 for now in seen]
        bad = [rank for rank in range(WORLD) if not torch.allclose(seen[rank][name], wanted, rtol=1e-12, atol=1e-14)]
        what = f"{name}.grad is float64 and up to {max(off):.1e} away from the mean on {{ranks}}: only float32 rounds so much."
        grader.fail_on(bad, "rounds-the-sum", what, at=r"float\(|float32 || " + REDUCE)


@pytest.mark.needs("test_mean")
def test_one_rank(grader: Grader) -> None:
    """one rank alone keeps its gradients"""
    gradients = draw(grader, "alone", [TRAINED[:3]])
    run = averages(grader, gradients, variables={"WORLD_SIZE": "5"})
    seen = run.observed("gradients")[0]
    for name, own in gradients[0].items():
        if name in seen and close(seen[name] * 5, own):
            said = f"{name}.grad was divided by 5, which is WORLD_SIZE in the environment. The process group has a single rank."
            grader.fail("wrong-divisor", said, of=[0], at=r"environ|getenv || " + DIVIDE)
        if name not in seen or not close(seen[name], own):
            said = f"On a single rank the mean is its own gradient, but {name}.grad has changed."
            grader.fail("wrong-alone", said, of=[0], at=DIVIDE)
    for name in sorted(seen.keys() - gradients[0].keys()):
        now = f"starts with {short(seen[name])}" if seen[name].any() else "is all zeros"
        said = f"On a single rank no gradient changes, but {name}.grad was None and now {now}."
        grader.fail("invents-gradients", said, of=[0], at=r"zeros || " + MISSING)
