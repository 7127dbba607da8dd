"""What `ShardedTraining` has to do.

    ShardedTraining(model, layers, mesh, make_optimizer)    .step(…)    .save(folder, step)    .load(folder)

Every rank is given the same model and batches of its own. All of them were drawn here, so a plain copy of the model in
float64, trained on the joined batches, says what has to come out. The model is made to break code that works on an easy
one: two modules share a weight, a weight is frozen, one parameter has a single row. The ranks' batches differ in size,
and one is empty. What is gathered and summed is read from the record of the collectives.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from judging.apart import read_apart
from judging.fsdp_train import (
    ADAMW,
    CLIPPED,
    CLOSE,
    COARSE,
    FROZEN,
    LAYERS,
    LOAD,
    LOSS,
    MESH,
    NORM,
    POLICY,
    RESHARD,
    SAVE,
    SHARD,
    SIZES,
    STEPS,
    WEIGHT,
    Plain,
    Played,
    State,
    batches,
    clipping_mistakes,
    gathers,
    judge_floats,
    judge_forward_gathers,
    judge_kept,
    judge_rows,
    judge_steps,
    listed,
    loss_of,
    phases,
)

from lockstep.grading import Cause, Diagnosis, Each, Grader, Hypothesis, Lacking, Run, ending, names

OWN_GPUS = True  # FSDP2 over gloo with CUDA tensors ends in a segmentation fault (torch 2.11)
ERRORS = (
    ("overlapping meshes", "fsdp-order", SHARD),
    ("shared with a parameter already", "fsdp-shared-apart", SHARD),
    ("got mixed torch.Tensor and DTensor", "fsdp-not-sharded", SHARD),
    ("must have the same dtype", "fsdp-dtypes-meet", POLICY),
    ("'str' object has no attribute", "fsdp-folder-type", SAVE),
    ("PosixPath", "fsdp-folder-type", SAVE),
)
"""What torch says, what it means here, and where to look."""


@pytest.fixture(autouse=True)
def _divides() -> None:
    """Torch 2.8 adds gradients over gloo and forgets to divide; 2.9.1 does."""
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 9):
        raise Lacking(f"it needs torch 2.9: fully_shard of {torch.__version__} doesn't divide the gradients over gloo")


def read_failure(grader: Grader, run: Run, cause: Cause) -> Diagnosis | None:
    """Name what a failed run of this exercise usually means."""
    if found := grader.read_error(run, ERRORS):
        return found
    error = cause.error
    if error is not None and any(mark.name == "load" for report in run.ranks for mark in report.marks):
        told = f"Two ranks loaded what three had saved. {names(cause.ranks).capitalize()} raised {error}"
        return grader.diagnosis("fsdp-load-fails", told, of=cause.ranks, at=error.frame or LOAD)
    had = "All ranks had the same model, and batches of different sizes, but their calls differ."
    found = read_apart(grader, run, "fsdp-ranks-differ", had, WEIGHT)
    every = enumerate(SIZES.get(run.world_size, []), 1)
    empty = next(((step, sizes.index(0)) for step, sizes in every if 0 in sizes), None)
    if found and empty and cause.ranks == (empty[1],):
        said = f"In step {empty[0]} rank {empty[1]} has no samples, and it doesn't call what the others call.{ending(cause)}"
        return grader.diagnosis(found.id, said, evidence=found.proof, of=cause.ranks, at=WEIGHT)
    return found


# The checks ----------------------------------------------------------------------------------------------------------


def main_run(grader: Grader) -> Played:
    """Three ranks, batches of different sizes and an empty one, no clipping."""
    return Played(grader, 3)


def clipped_run(grader: Grader) -> Played:
    """Two ranks, clipping, and layers that come from an iterator and stay gathered until backward."""
    return Played(grader, 2, CLIPPED, reshard_after_forward=False, once=True)


def test_rows(grader: Grader) -> None:
    """each rank keeps its rows of every parameter and of the optimizer's state"""
    judge_rows(grader, main_run(grader))


@pytest.mark.needs("test_rows")
def test_steps(grader: Grader) -> None:
    """steps give the parameters of one process with all batches joined"""
    judge_steps(grader, main_run(grader))


def rounded(value: float) -> float:
    """To the nearest bfloat16."""
    return torch.tensor(value, dtype=torch.bfloat16).item()


@pytest.mark.needs("test_steps")
def test_loss(grader: Grader) -> None:
    """step returns the mean loss of all samples, on every rank"""
    played = main_run(grader)
    plain = Plain(played)
    counts = SIZES[3]
    later = [
        sum(float(loss_of(plain.states[step + 1], *own)) for own in batch) / sum(counts[step])
        for step, batch in enumerate(played.batches)
    ]
    own = [
        [total / max(n, 1) for total, n in zip(sums, sizes, strict=True)]
        for sums, sizes in zip(plain.sums, counts, strict=True)
    ]
    ranks, steps = range(3), range(STEPS)
    by_rank = Each([[plain.sums[s][r] / sum(counts[s]) for s in steps] for r in ranks])
    table = [
        ("That is the mean over the rank's own samples.", Each([[own[s][r] for s in steps] for r in ranks])),
        ("That is the rank's own sum, divided by the number of all samples.", by_rank),
        ("That is the mean of the ranks' means.", [sum(own[s]) / 3 for s in steps]),
        ("That is the sum over all samples.", [sum(plain.sums[s]) for s in steps]),
        ("That is the loss after the step.", later),
        (
            "That comes from sums that were rounded to bfloat16.",
            [sum(map(rounded, plain.sums[s])) / sum(counts[s]) for s in steps],
        ),
        ("That is 3 times the loss.", [3 * loss for loss in plain.losses]),
        ("That is a third of the loss.", [loss / 3 for loss in plain.losses]),
    ]
    mistakes = [Hypothesis("fsdp-own-loss", says, gives) for says, gives in table]
    seen = played.run.observed("losses")
    what, id = "[step] of the loss", "fsdp-own-loss"
    judge_floats(grader, "loss", seen, id, LOSS)
    grader.explain(what, seen, plain.losses, mistakes, otherwise=id, at=LOSS, tolerance=CLOSE)


@pytest.mark.needs("test_steps")
def test_clipping(grader: Grader) -> None:
    """the gradient is clipped by the norm of all ranks' rows together, and step returns this norm"""
    played = clipped_run(grader)
    judge_steps(grader, played, more=clipping_mistakes(played))
    plain = Plain(played)
    shown = [min(norm, most) for norm, most in zip(plain.norms, played.norms, strict=True)]
    wrong = [
        Hypothesis("fsdp-wrong-norm", "That is the norm after clipping.", shown),
        Hypothesis("fsdp-wrong-norm", "That is twice the norm.", [2 * norm for norm in plain.norms]),
    ]
    what, seen = "[step] of the norm", played.run.observed("norms")
    judge_floats(grader, "norm", seen, "fsdp-wrong-norm", NORM)
    grader.explain(what, seen, plain.norms, wrong, otherwise="fsdp-wrong-norm", at=NORM, tolerance=CLOSE)


@pytest.mark.needs("test_steps")
def test_gathers(grader: Grader) -> None:
    """each layer is gathered by itself, freed after forward and gathered again in backward"""
    played = main_run(grader)
    judge_forward_gathers(grader, played)
    expected = [4 * size for size in played.groups()]
    for rank in range(3):
        for _, backward in phases(played, rank)[1:]:
            seen = gathers(backward)
            if sorted(seen)[-LAYERS:] != sorted(expected[1:])[-LAYERS:] and len(seen) < LAYERS:
                said = f"Backward on rank {rank} called {listed(seen)}. If forward had freed the {LAYERS} layers, it would need {LAYERS}."
                grader.fail("fsdp-stays-gathered", said, of=[rank], at=RESHARD)


@pytest.mark.needs("test_gathers", "test_clipping")
def test_kept(grader: Grader) -> None:
    """with reshard_after_forward=False backward gathers no layer"""
    played = clipped_run(grader)
    judge_forward_gathers(grader, played, once=True)
    judge_kept(grader, played, 4, "reshard_after_forward=False")


@pytest.mark.needs("test_gathers")
def test_compute_dtype(grader: Grader) -> None:
    """with compute_dtype only gathering and computing are in this dtype"""
    played = Played(grader, 2, compute_dtype="float16", reshard_after_forward=False)
    run, elements = played.run, sum(played.groups())
    for rank in range(2):
        kept = {kind for _, kind in run.observed("kept")[rank].values()}
        state = {kind for one in run.observed("state")[rank].values() for _, kind in one}
        given = {kind for step in run.observed("gradients")[rank] for _, kind in step}
        for what, kinds, id in (("the parameters", kept, "fsdp-low-parameters"), ("the optimizer's state", state, "fsdp-low-parameters"),
                                ("the gradients", given, "fsdp-low-gradients"),
                                ("the model's outputs", set(run.observed("outputs")[rank]), "fsdp-low-outputs")):  # fmt: skip
            if kinds - {"torch.float32"}:
                said = f"With compute_dtype=torch.float16, {what} on rank {rank} are {', '.join(sorted(kinds))}."
                grader.fail(id, said, of=[rank], at=POLICY)
        forward, backward = phases(played, rank)[-1]
        moved = sum(gathers(forward))
        if moved != 2 * elements:
            said = f"Forward on rank {rank} gathered {moved} bytes for its {elements} elements. In float16 an element has 2 bytes."
            grader.fail("fsdp-computes-in-float32", said, of=[rank], at=POLICY)
        if other := {call.dtype for call in forward if "gather" in call.kind and call.nbytes > 64} - {"float16"}:
            said = f"With compute_dtype=torch.float16, forward on rank {rank} gathered in {', '.join(sorted(other))}."
            grader.fail("fsdp-other-dtype", said, of=[rank], at=r"bfloat16 || " + POLICY)
        for call in backward:
            if "reduce" in call.kind and call.nbytes > 64 and call.dtype.removeprefix("torch.") != "float32":
                said = f"Backward on rank {rank} summed the gradients in {call.dtype} ({call.kind} of {call.nbytes} bytes)."
                grader.fail("fsdp-low-gradients", said, of=[rank], at=POLICY)
    judge_steps(grader, played, COARSE)
    judge_kept(grader, played, 2, "compute_dtype=torch.float16 and reshard_after_forward=False")


@pytest.mark.needs("test_gathers", "test_clipping")
def test_mesh(grader: Grader) -> None:
    """on a mesh of 2 × 2 the rows are divided among two ranks and replicated on the other two"""
    played = Played(grader, 4, CLIPPED, mesh=(2, 2))
    for rank, kept in enumerate(played.run.observed("kept")):
        seen, expected = sum(numel for numel, _ in kept.values()), sum(played.kept(name) for name in played.state)
        quarter = sum(-(-len(one) // 4) * math.prod(one.shape[1:]) for one in played.state.values())
        if seen <= quarter:
            said = f"Rank {rank} keeps {seen} elements: the model is divided among all 4 ranks. On this mesh it would be about {expected}."
            grader.fail("fsdp-wrong-mesh", said, of=[rank], at=MESH)
    parts = played.run.observed("part")
    for rank, other in ((0, 2), (1, 3)):
        if parts[rank] != parts[other]:
            said = f"Ranks {rank} and {other} keep different rows: the mesh's first dimension replicates, its second shards."
            grader.fail("fsdp-wrong-mesh", said, of=[rank, other], at=MESH)
    judge_rows(grader, played)
    judge_steps(grader, played)
    judge_forward_gathers(grader, played)
    plain = Plain(played)
    for what, key, right, id, at in (
        ("loss", "losses", plain.losses, "fsdp-own-loss", LOSS), ("norm", "norms", plain.norms, "fsdp-wrong-norm", NORM),
    ):  # fmt: skip
        what, seen = f"On a mesh of 2 × 2, [step] of the {what}", played.run.observed(key)
        grader.explain(what, seen, right, otherwise=id, at=at, tolerance=CLOSE)


SAVED_AFTER = 2


def saving_run(grader: Grader) -> Played:
    """Three ranks save after the second of three steps of AdamW."""
    return Played(grader, 3, CLIPPED, scenario="saves", step=SAVED_AFTER, optimizer="AdamW", options=ADAMW)


@pytest.mark.needs("test_steps", "test_clipping")
def test_saving(grader: Grader) -> None:
    """each rank writes its own rows, and all of them together write each number once"""
    played = saving_run(grader)
    files: dict[str, int] = played.run.observed("files")[0]
    numbers = sum(one.numel() for one in played.state.values())
    trained = numbers - played.state[FROZEN].numel()
    needed, total = 4 * (numbers + 2 * trained), sum(files.values())
    said = f"save wrote {total} bytes into {len(files)} file{'s' if len(files) != 1 else ''}. Model and optimizer are {needed} bytes."
    if total < 0.9 * needed:
        grader.fail("fsdp-save-incomplete", said, at=SAVE)
    if total > 2 * needed:
        grader.fail("fsdp-saved-twice", said, at=SAVE)
    if max(files.values()) > 0.6 * total:
        grader.fail("fsdp-saved-by-one", f"{said} The largest has {max(files.values())}.", at=SAVE)
    for rank, report in enumerate(played.run.ranks):
        start, end = (next(mark.number for mark in report.marks if mark.name == name) for name in ("save", "saved"))
        calls = [call for call in report.collectives if start < call.number < end and call.dtype == "float32"]
        if seen := gathers(calls):
            said = f"During save, rank {rank} called {len(seen)} all-gathers, with {sum(seen)} bytes of its rows. It can write these without the rows of other ranks."
            grader.fail("fsdp-save-gathers", said, of=[rank], at=r"full_state_dict || full_tensor || " + SAVE)
    judge_steps(grader, played)


@pytest.mark.needs("test_saving")
def test_resuming(grader: Grader) -> None:
    """two ranks continue exactly where three have saved"""
    saved = saving_run(grader)
    left = SAVED_AFTER
    loading: dict[str, Any] = {"lr": 0.5, "weight_decay": 0.3}
    state = {name: one + 1 for name, one in saved.state.items()}
    run = grader.run(
        "loads", 2, each=[{"batches": [step[rank] for step in batches(grader, 2)[left:]]} for rank in range(2)],
        norms=CLIPPED[left:], mesh=[2], state=state, optimizer="AdamW", options=ADAMW | loading, keywords={},
        content=saved.run.observed("content")[0],
    )  # fmt: skip
    at_save = Plain(saved).states
    mistakes = [
        Hypothesis("fsdp-weights-lost", "That is what the model had before load: its parameters were not loaded.",
                   {name: one.double() for name, one in state.items()}),
        Hypothesis("fsdp-weights-lost", "Only the frozen parameter is what it was before load.",
                   at_save[left] | {FROZEN: state[FROZEN].double()}),
    ]  # fmt: skip
    seen = [states[1] for states in run.observed("states")]
    what, id = "After load, parameter", "fsdp-weights-lost"
    grader.explain(what, seen, at_save[left], mistakes, otherwise=id, at=LOAD, tolerance=CLOSE)
    again = [states[3] for states in run.observed("states")]
    what_again = "After a step and a second load, parameter"
    grader.explain(what_again, again, at_save[left], mistakes, otherwise=id, at=LOAD, tolerance=CLOSE)
    grader.explain("What load returned", run.observed("loaded"), [left, left], otherwise="fsdp-step-lost", at=LOAD)

    def after(**how: Any) -> State:
        return Plain(saved, **how).states[-1]

    mistakes = [
        Hypothesis("fsdp-moments-lost", "That is what a new optimizer makes of the loaded parameters.",
                   lambda: after(renewed=left, options=ADAMW | loading)),
        Hypothesis("fsdp-moments-lost", "That is what a new optimizer with the saved learning rate makes of the loaded parameters.",
                   lambda: after(renewed=left)),
        Hypothesis("fsdp-rate-lost", "That comes from the optimizer's own learning rate, not from the saved one.",
                   lambda: after(altered=left, options={"lr": loading["lr"]})),
        Hypothesis("fsdp-rate-lost", "That comes from the optimizer's own weight_decay, not from the saved one.",
                   lambda: after(altered=left, options={"weight_decay": loading["weight_decay"]})),
        Hypothesis("fsdp-rate-lost", "That comes from the optimizer's own learning rate and weight_decay, not from the saved ones.",
                   lambda: after(altered=left, options=loading)),
    ]  # fmt: skip
    steps_after = (
        (2, "One step after load"),
        (4, f"The job made a step, set lr={loading['lr']} and loaded again. One step later"),
    )
    for number, what in steps_after:
        seen = [states[number] for states in run.observed("states")]
        grader.explain(
            f"{what}, parameter", seen, after(), mistakes, otherwise="fsdp-moments-lost", at=LOAD, tolerance=CLOSE
        )
