"""What `ShardedLinear` has to do.

    ShardedLinear(linear)    layer(inputs)    .full_state_dict()

Every rank is given the same layer and inputs of its own, and instead of a loss the gradient with respect to the output.
All of them were drawn here: a few lines of algebra say what one whole layer under DDP makes of them. What a layer returns
is compared with the weights that it says it has, so that a wrong step is told once. The collectives are read from the
record, and the bytes that are held from the storages that operations made.
"""

from __future__ import annotations

import pytest
import torch
from judging.apart import read_apart
from judging.sharded_linear import (
    CASES,
    CLOSE,
    CLOSEST,
    COLUMNS,
    DTYPE,
    EVAL,
    FORWARD,
    GATHER,
    INPUTS,
    KEPT,
    MAKE,
    NO_INPUTS,
    REDUCE,
    ROWS,
    SCALE,
    SHAPES,
    WORLDS,
    Played,
    counted,
    judge_held,
    judge_input_gradients,
    judge_outputs,
    judge_parts,
    judge_state,
    judge_three_calls,
    judge_training,
    mean,
    phases,
)

from lockstep.grading import Cause, Diagnosis, Grader, Run, equal, evidence, names, sentence, wrong_ranks

ERRORS = (
    ("does not require grad and does not have a grad_fn", "output-without-graph", FORWARD),
    ("returned an invalid gradient", "gradient-of-wrong-shape", REDUCE),
    ("returned an incorrect number of gradients", "gradient-of-wrong-shape", REDUCE),
    ("cannot register a hook", "needs-a-graph", FORWARD),
    ("leaf variable", "gradient-of-wrong-shape", REDUCE),
    ("same size", "ranks-gather-differently", GATHER),
    ("invalid tensor size", "ranks-gather-differently", GATHER),
)
"""What torch says, what it means here, and where to look."""


def read_failure(grader: Grader, run: Run, cause: Cause) -> Diagnosis | None:
    """Name what a failed run of this exercise usually means."""
    if found := grader.read_error(run, ERRORS):
        return found
    found = read_apart(
        grader, run, "ranks-gather-differently", "All ranks had the same layer, but their calls differ.", GATHER
    )
    last = [calls[-1] for calls in run.collectives if calls]
    if found and len({one.shape for one in last if one.kind == "all_reduce" and one.shape[-1:] == (COLUMNS,)}) > 1:
        said = sentence(cause.headline, "Those are gradients of the inputs, of which each rank has a different number.")
        return grader.diagnosis("input-gradient-averaged", said, of=cause.ranks, at=last[0].frame)
    return found


# The checks ----------------------------------------------------------------------------------------------------------


def test_full_state(grader: Grader) -> None:
    """full_state_dict has the whole layer, on every rank"""
    for world_size in WORLDS:
        judge_state(grader, Played(grader, world_size))


@pytest.mark.needs("test_full_state")
def test_output(grader: Grader) -> None:
    """forward returns what the whole layer would, before and after a step"""
    for world_size in WORLDS:
        judge_outputs(grader, Played(grader, world_size))


@pytest.mark.needs("test_output")
def test_training(grader: Grader) -> None:
    """training gives the same weights as DDP"""
    for world_size in WORLDS:
        judge_training(grader, Played(grader, world_size))
    judge_three_calls(grader, Played(grader, 3))
    for rank, cases in enumerate(_held(grader, Played(grader, 3))):
        for (how, _, _), seen in zip(CASES, cases, strict=True):
            said = f"With a layer {how}, a step of SGD changes no weight: backward gave the rows no gradient."
            grader.fail_on([] if seen["changed"] else [rank], "shard-not-trained", said, at=EVAL)


@pytest.mark.needs("test_training")
def test_input_gradient(grader: Grader) -> None:
    """inputs get the gradient of their own rank's loss, if they need one"""
    played = Played(grader, 3)
    judge_input_gradients(grader, played)
    batch = played.batches[0][0][0]
    run = grader.run("work", 3, state=played.state, batch=batch)
    for rank, direction in enumerate(run.observed("direction")):
        if not equal(direction, batch[1]):
            said = f"On rank {rank} backward changed the output's gradient in place: it starts with {float(direction.flatten()[0]):.4g} instead of {float(batch[1].flatten()[0]):.4g}."
            grader.fail("changes-output-gradient", said, of=[rank], at=r"div_\(|/= || mul_\(|\*= || " + SCALE)
    for rank, (needed, not_needed) in enumerate(run.observed("operations")):
        if not_needed > 0.75 * needed:
            said = f"Backward made {needed} floating-point operations for inputs that need a gradient and {not_needed} for inputs that don't, where half is enough."
            grader.fail("input-gradient-needless", said, of=[rank], at=INPUTS)


@pytest.mark.needs("test_full_state")
def test_share(grader: Grader) -> None:
    """a rank keeps its share of the rows, and nothing else of the layer"""
    for world_size in WORLDS:
        judge_parts(grader, Played(grader, world_size))
    played = Played(grader, 3)
    nbytes = 4 * ROWS * played.width
    for rank, (seen, *_) in enumerate(_held(grader, played)):
        if seen["made"] > nbytes / 3 + nbytes / 2:
            said = f"After ShardedLinear(linear) and `del linear`, {seen['made']} bytes of the layer are in memory; the rank's rows are {nbytes // 3}, the whole layer is {nbytes}."
            grader.fail("whole-layer-kept", said, of=[rank], at=MAKE)


@pytest.mark.needs("test_share", "test_training")
def test_freed(grader: Grader) -> None:
    """the whole weight is freed after forward, after backward and after the step"""
    for rank, cases in enumerate(_held(grader, Played(grader, 3))):
        for case, seen in zip(CASES, cases, strict=True):
            judge_held(grader, rank, case, seen)


def _held(grader: Grader, played: Played) -> list[list[dict[str, int]]]:
    batch = tuple(tensor[:2] for tensor in played.batches[0][0][0])
    run = grader.run("held", 3, state=played.state, batch=batch, cases=[case[1:] for case in CASES])
    found: list[list[dict[str, int]]] = run.observed("held")
    return found


@pytest.mark.needs("test_training")
def test_collectives(grader: Grader) -> None:
    """forward gathers once; backward gathers once and reduce-scatters once"""
    played = Played(grader, 3)
    share = 4 * played.share * played.width
    for rank in range(3):
        for forward, backward in phases(played, rank):
            gathers, reductions = ([call for call in backward if kind in call.kind] for kind in ("gather", "reduce"))
            before, after = (f"{which} on rank {rank} called" for which in ("Forward", "Backward"))
            mistakes = [
                (not forward, "gathered-once-for-all", GATHER,
                 f"A forward on rank {rank} called no collective: the weight was gathered before, and kept."),
                (["gather" in call.kind for call in forward] != [True], "too-many-collectives", GATHER,
                 f"{before} {counted(forward)}. One all_gather brings weight and bias together."),
                (any(call.kind == "all_reduce" for call in backward), "gradient-all-reduced", REDUCE,
                 f"{after} {counted(backward)}. An all_reduce brings the whole gradient to every rank, for twice the bytes; "
                 "a rank needs the gradient of its own rows."),
                (backward and not gathers, "weight-held", KEPT,
                 f"{after} {counted(backward)}, and no all_gather: forward's weight was kept."),
                (backward and not len(gathers) == len(reductions) == len(backward) - 1 == 1, "too-many-collectives", REDUCE,
                 f"{after} {counted(backward)}, where one all_gather and one reduce_scatter do."),
            ]  # fmt: skip
            for is_so, id, at, said in mistakes:
                grader.fail_on([rank] if is_so else [], id, said, at=at)
            for call in (*forward, *backward):
                if call.nbytes > (share if "gather" in call.kind else 3 * share):
                    said = f"Rank {rank} put {call.nbytes} bytes into {call.kind}. Its rows are {share} bytes, the whole layer is {3 * share}."
                    grader.fail("shard-sends-too-much", said, of=[rank], at=call.frame or GATHER)


SHAPES_GIVEN = ([5, 50], True), ([2, 3, 50], False), ([2, 3, 50], True), ([50], False), ([2, 2, 3, 50], False)
"""Each with whether its last two dimensions are swapped in memory."""


@pytest.mark.needs("test_input_gradient")
def test_shapes(grader: Grader) -> None:
    """inputs of any number of dimensions, contiguous or not"""
    state = Played(grader, 2).state
    uneven = [{"shape": [0, COLUMNS]}, {"shape": [5, COLUMNS]}]
    run = grader.attempt("once", 2, each=uneven, state=state, strided=False)
    if run.cause is not None:
        error = run.cause.error
        what = f"{names(run.cause.ranks)} raised {error}" if error else run.cause.headline
        said = f"Rank 0 had no inputs and rank 1 had 5: {what}"
        grader.fail("no-inputs-on-a-rank", said, evidence=evidence(run), of=run.cause.ranks, at=NO_INPUTS)
    for shape, strided in SHAPES_GIVEN:
        memory = "not contiguous" if strided else "contiguous"
        what = f"inputs of shape {tuple(shape)}, {memory} in memory like the output's gradient"
        run = grader.attempt("once", 2, state=state, shape=shape, strided=strided)
        if run.cause is not None and run.cause.error is not None:
            said = f"With {what}, {names(run.cause.ranks)} raised {run.cause.error}"
            grader.fail("leading-shape", said, of=run.cause.ranks, at=run.cause.error.frame or SHAPES)
        seen = grader.require(run).observed("seen")
        inputs = torch.linspace(-1, 1, torch.Size(shape).numel()).reshape(shape).requires_grad_()
        whole = {name: tensor.float().clone().requires_grad_() for name, tensor in state.items()}
        output = torch.nn.functional.linear(inputs, whole["weight"], whole["bias"])
        (output * torch.cos(torch.arange(float(output.numel()))).reshape(output.shape)).sum().backward()
        after = {name: (tensor - tensor.grad).detach() for name, tensor in whole.items()}
        for part, right in enumerate((output.detach(), inputs.grad, after)):
            name = ("The output of", "The inputs' gradient of", "After a step of SGD with lr=1, the layer with")[part]
            values = [one[part] for one in seen]
            grader.explain(f"{name} {what},", values, right, otherwise="leading-shape", at=SHAPES, tolerance=CLOSE)


@pytest.mark.needs("test_input_gradient")
def test_dtype(grader: Grader) -> None:
    """parameters, outputs and what is gathered have the layer's dtype"""
    for dtype in (torch.float64, torch.bfloat16):
        played = Played(grader, 2, dtype=dtype)
        name = str(dtype).removeprefix("torch.")
        for rank in range(2):
            found = {
                "parameters": [kept for _, kept in played.parameters[rank]],
                "outputs": [str(one.dtype) for one in played.outputs[rank]],
                "full_state_dict": [str(one.dtype) for one in played.states[rank][0].values()],
                "collectives": [call.dtype for pair in phases(played, rank) for calls in pair for call in calls
                                if call.dtype != "float32" or "reduce" not in call.kind or dtype.itemsize > 4],
            }  # fmt: skip
            for what, dtypes in found.items():
                if other := {one.removeprefix("torch.") for one in dtypes} - {name}:
                    said = f"The layer is {name}; on rank {rank}, {what} are {', '.join(sorted(other))}."
                    grader.fail("dtype-changed", said, of=[rank], at=DTYPE)
        if dtype == torch.float64:
            right, first = played.trained(mean), [states[0] for states in played.states]
            said = "In float64, full_state_dict has only the digits of float32, even before the first step: it converts the rows."
            grader.fail_on(wrong_ranks(first, right[0], CLOSEST), "dtype-changed", said, at=DTYPE)
            said = "In float64 the layer after three steps is right to the digits of float32 only: it was converted."
            grader.fail_on(wrong_ranks(played.states, right, CLOSEST), "dtype-changed", said, at=DTYPE)


@pytest.mark.needs("test_input_gradient")
def test_any_rows(grader: Grader) -> None:
    """rows that the ranks can't divide evenly, fewer rows than ranks, no bias, one process"""
    for world_size, rows, bias in ((3, 37, True), (3, 38, False), (3, 2, True), (1, 5, True)):
        played = Played(grader, world_size, rows, bias)
        judge_state(grader, played)
        judge_outputs(grader, played)
        judge_training(grader, played)
        judge_input_gradients(grader, played)
        judge_parts(grader, played)
