"""What `ring_all_reduce` has to do.

    ring_all_reduce(tensor) -> None

The sum is easy to get right; an all-reduce is worth its name only when it does not move more than it must. So besides
the numbers every message is counted, below the learner's code: how many, how long, from whom to whom. The operating
system counts the bytes as well, of numbers of 16 bits: no collective of gloo's can add those without widening them.
"""

from __future__ import annotations

import math

import pytest
import torch

from lockstep.grading import Cause, Collective, Diagnosis, Grader, Run, ending, evidence, names

OWN_GPUS = True  # gloo sends no CUDA tensor from rank to rank
WORLD, LENGTH = 4, 4000
LENGTHS = (10, 7, 5, 3, 1)  # on four ranks: not divisible, shorter than the world
WHOLE, DOUBLE = "length 8 and type int64", "length 8 and type float64"
HALVES = {"length 9 and type float16": torch.float16, "length 9 and type bfloat16": torch.bfloat16}
SHORT, SHORT_LENGTH = "length 40000 and type int16", 40_000
SLACK, HEADERS = 1.1, 4096  # what may be sent besides: headers, and gloo's own notes to each other

FUNCTION = r"def ring_all_reduce"
SEND = r"isend || send\( || P2POp || " + FUNCTION
CUT = r"chunk || split || // || " + SEND
ADD = r"\+= || add_\( || \+ || " + FUNCTION

Inputs = dict[str, list[torch.Tensor]]


def draw(grader: Grader, purpose: str, world: int, shapes: dict[str, tuple[int, ...]]) -> Inputs:
    """Whole numbers, so that their sums are exact in whichever order they are added."""
    generator = grader.generator(purpose)
    return {
        name: [torch.randint(1, 1000, shape, generator=generator).float() for _ in range(world)]
        for name, shape in shapes.items()
    }


def sums(grader: Grader, inputs: Inputs, views: dict[str, str] | None = None) -> Run:
    """Give each rank its own tensors, and nobody else's."""
    world = len(next(iter(inputs.values())))
    each = [{"inputs": {name: tensors[rank] for name, tensors in inputs.items()}} for rank in range(world)]
    return grader.run("sums", world, each=each, views=views or {})


def main_run(grader: Grader) -> tuple[Run, Inputs]:
    """The run that most checks look at: everything divides evenly."""
    inputs = draw(grader, "main", WORLD, {"tensor": (LENGTH,)})
    return sums(grader, inputs), inputs


def short_run(grader: Grader) -> Run:
    """Numbers of all 16 bits, whose sum has no more: what is sent is counted by the operating system."""
    generator = grader.generator("short")
    inputs = {
        SHORT: [torch.randint(-(2**15), 2**15, (SHORT_LENGTH,), generator=generator).short() for _ in range(WORLD)]
    }
    run = sums(grader, inputs)
    judge_sum(grader, run, inputs, SHORT)
    return run


def calls_for(run: Run, rank: int, name: str) -> list[Collective]:
    """What a rank called while it summed that tensor."""
    marks = {mark.name: mark.number for mark in run.ranks[rank].marks}
    first, last = marks.get(name, 0), marks.get(f"{name} done", 1 << 60)
    return [call for call in run.collectives[rank] if first < call.number < last]


def type_of(name: str) -> str:
    """The dtype of the tensor of that name."""
    return name.partition("type ")[2] or "float32"


def read_failure(grader: Grader, run: Run, cause: Cause) -> Diagnosis | None:
    """Name what a failed run of this exercise usually means."""
    table = evidence(run)
    rank = cause.ranks[0] if cause.ranks else 0
    shown = [mark.name for mark in run.ranks[rank].marks if not mark.name.endswith(" done")]
    length = f"with a tensor of {shown[-1]} on {run.world_size} ranks" if shown else ""
    waiting = [row.what for row in cause.rows]
    if cause.kind == "hang" and waiting and all(what.startswith("send") for what in waiting):
        return grader.diagnosis(
            "everybody-sends-first",
            f"All {len(waiting)} ranks wait for a receiver, and no rank receives.",
            evidence=table,
            of=cause.ranks,
            at=r"(?<!i)send\( || " + SEND,
        )
    if cause.error is not None and "Invalid scalar type" in cause.error.message:
        return grader.diagnosis(
            "calls-a-collective",
            f"{names(cause.ranks).capitalize()} raised {cause.error}, {length}: gloo's collectives don't add numbers of that type.",
            of=cause.ranks,
            at=cause.error.frame,
        )
    if run.world_size == 1 and cause.error is not None and cause.error.type != "NotImplementedError":
        return grader.diagnosis(
            "talks-to-itself",
            f"On a single rank it raised {cause.error}: the neighbor is the rank itself.",
            of=[0],
            at=cause.error.frame,
        )
    if cause.error is not None and shown and shown[-1] in ("transposed", "column"):
        return grader.diagnosis(
            "loses-the-view",
            f"{names(cause.ranks).capitalize()} raised {cause.error} The tensor was a view that is not contiguous.",
            of=cause.ranks,
            at=cause.error.frame,
        )
    if shown and shown[-1].startswith("length "):
        unequal = cause.error is not None and "size" in cause.error.message and shown[-1] != "length 0"
        unequal |= shown[-1] == SHORT  # into a tensor of another type
        if cause.kind in ("crashed", "hang", "mismatch") or unequal:
            said, at = "one rank sends a different length from what its neighbor expects", CUT
            calls = [call for rank in range(run.world_size) for call in calls_for(run, rank, shown[-1])]
            if other := [call for call in calls if call.kind == "recv" and call.dtype != type_of(shown[-1])]:
                said = f"rank {other[0].rank} receives into a buffer of type {other[0].dtype}"
                at = r"cache || setdefault || empty\( || " + CUT
            return grader.diagnosis(
                "wrong-chunk-length",
                f"{length.capitalize()}, {said}.{ending(cause)}",
                evidence=table,
                of=cause.ranks,
                at=at,
            )
        if cause.error is not None and cause.error.type in ("IndexError", "RuntimeError", "ValueError"):
            return grader.diagnosis(
                "fewer-chunks-than-ranks",
                f"{names(cause.ranks).capitalize()} raised {cause.error}, {length}.",
                of=cause.ranks,
                at=cause.error.frame,
            )
    return None


# The sum -------------------------------------------------------------------------------------------------------------


def judge_sum(grader: Grader, run: Run, inputs: Inputs, name: str) -> None:
    """One tensor on every rank, against the sum; fails with what it is instead."""
    world = run.world_size
    wanted = torch.stack(inputs[name]).sum(0, dtype=inputs[name][0].dtype)
    seen = run.observed(name)
    wrong = [rank for rank in range(world) if not torch.equal(seen[rank], wanted)]
    for place, memory in enumerate(run.observed(f"{name} memory")):
        if not wrong and memory.shape == wanted.shape and not torch.equal(memory, wanted):
            said = (
                f"On rank {place} the tensor was given new memory. It holds the sum; a view of the same tensor, made before the call, "
                f"has the old values: its first element is {memory.flatten()[0].item():g} instead of {wanted.flatten()[0].item():g}."
            )
            grader.fail("not-in-place", said, of=[place], at=r"\.data = || set_\( || " + FUNCTION)
    if not wrong:
        return
    rank = wrong[0]
    got, own = seen[rank], inputs[name][rank]
    returned = run.observed(f"{name} returned")[rank]
    places = (got != wanted).flatten().nonzero().flatten()
    first = int(places[0])
    what = (
        f"On rank {rank}, {len(places)} of {wanted.numel()} elements are not the sum over {world} ranks; element {first} "
        f"is {got.flatten()[first].item():g}, the sum is {wanted.flatten()[first].item():g}."
    )
    if wanted.flatten()[places].isinf().all() and got.flatten()[places].isfinite().all():
        said = f"On rank {rank}, element {first} is {got.flatten()[first].item():.3g}. One rank's is {wanted.flatten()[first].item():g}, and so is the sum."
        grader.fail("leaves-out-inf", said, of=wrong, at=r"nan_to_num || isfinite|isinf|isnan || clamp || " + ADD)
    if returned is not None and torch.equal(returned.reshape(wanted.shape), wanted):
        grader.fail(
            "not-in-place", f"{what} The tensor that was returned holds the sum.", of=wrong, at=r"return || " + FUNCTION
        )
    if torch.allclose(got * world, wanted):
        grader.fail("divides-the-sum", f"{what} It is the mean.", of=wrong, at=r"/ || div || " + ADD)
    if torch.equal(got, own) and not wanted.dim():
        said = f"On rank {rank} a tensor without dimensions hasn't changed: it is {got.item():g}, the sum over {world} ranks is {wanted.item():g}."
        grader.fail("leaves-scalars", said, of=wrong, at=r"dim\( || ndim || \.shape || " + FUNCTION)
    if torch.allclose(got.double(), wanted.double(), rtol=1e-6, atol=0):
        said = (
            f"On rank {rank} the sum of numbers of type {str(wanted.dtype).removeprefix('torch.')} was rounded: element {first} is "
            f"{int(got.flatten()[first])}, the sum is {int(wanted.flatten()[first])}."
        )
        grader.fail("rounds-the-sum", said, of=wrong, at=r"float || double || empty\( || " + ADD)
    if torch.equal(got, own) and run.collectives[rank]:
        at = r"reshape || view || clone || " + FUNCTION
        grader.fail("not-in-place", f"{what} The tensor hasn't changed.", of=wrong, at=at)
    if len(places) < world and wanted.numel() % world and first == wanted.numel() // world * world:
        rest = f"{wanted.numel()} elements on {world} ranks leave a remainder of {wanted.numel() % world}"
        said = f"{what} {rest}: the ones at the end were left out."
        grader.fail("loses-the-remainder", said, of=wrong, at=CUT)
    chunks = [list(one.flatten().tensor_split(world)) for one in inputs[name]]
    mine = list(got.flatten().tensor_split(world))
    sums = list(wanted.flatten().tensor_split(world))
    if wanted.numel() % world == 0:
        for place, chunk in enumerate(mine):
            other = next((c for c in range(world) if c != place and torch.equal(chunk, sums[c])), None)
            if other is not None:
                said = f"{what} Chunk {place} holds the sum of chunk {other}."
                grader.fail("wrong-chunk", said, of=wrong, at=r"% || " + CUT)
        complete = [torch.equal(a, b) for a, b in zip(mine, sums, strict=True)]
        single = [any(torch.equal(part, own[place]) for own in chunks) for place, part in enumerate(mine)]
        if all(single):
            grader.fail(
                "never-adds", f"{what} Each chunk holds one rank's values.", of=wrong, at=r"copy_ || = || " + ADD
            )
        if complete.count(True) == 1 and all(
            sum(torch.equal(a, b) for a, b in zip(seen[r].flatten().tensor_split(world), sums, strict=True)) == 1
            for r in range(world)
        ):
            said = f"{what} Its chunk {complete.index(True)} alone is complete; every rank has the sum of one chunk and lacks the others."
            grader.fail("no-all-gather", said, of=wrong, at=SEND)
        partial = [place for place, done in enumerate(complete) if not done]
        said = f"{what} Chunks {partial} hold the sum over only some of the ranks."
        grader.fail("incomplete-sum", said, of=wrong, at=r"range\( || " + SEND)
    grader.fail("incomplete-sum", what, of=wrong, at=CUT)


def judge_calls(grader: Grader, run: Run, name: str) -> None:
    """That no collective took part in the sum of this tensor."""
    for rank in range(run.world_size):
        collectives = [call for call in calls_for(run, rank, name) if not call.is_point_to_point]
        if collectives:
            moved = sum(call.nbytes for call in collectives)
            kinds = ", ".join(sorted({call.kind for call in collectives}))
            what = "Rank" if name == "tensor" else f"With a tensor ({name}) on {run.world_size} ranks, rank"
            said = f"{what} {rank} called {kinds} ({moved} bytes). Build it from send and recv."
            grader.fail("calls-a-collective", said, of=[rank], at=collectives[0].frame)


def judge_chunks(grader: Grader, run: Run, name: str, length: int) -> None:
    """That no chunk of this tensor is longer or shorter than it has to be, and no message is one too many."""
    world, what = run.world_size, "a matrix of 4×6" if name == "transposed" else f"{length} numbers"
    least, steps = length // world, 2 * (world - 1)
    equal = [least, least + 1] if length % world else [least]
    for rank in range(world):
        calls = [call for call in calls_for(run, rank, name) if call.kind == "send"]
        sent = {min(call.nbytes // 4, math.prod(call.shape)) for call in calls}  # a wider type is named elsewhere
        if len(calls) > steps:
            types = " and ".join(sorted({call.dtype for call in calls}))
            said = f"With {what} on {world} ranks, rank {rank} sent {len(calls)} messages ({types}); {world - 1} to reduce and {world - 1} to gather make {steps}."
            grader.fail("wrong-number-of-steps", said, of=[rank], at=SEND)
        if sent == {length} and length > max(equal):
            said = f"With {what} on {world} ranks, rank {rank} sent the whole tensor in each message. A chunk has {max(equal)} at most."
            grader.fail("moves-whole-tensor", said, of=[rank], at=calls[0].frame)
        if sent - set(equal):
            sizes, wanted = (" and ".join(map(str, sorted(found, reverse=True))) for found in (sent, equal))
            said = f"With {what} on {world} ranks, rank {rank} sent chunks of {sizes} numbers. As equal as possible is {wanted}."
            grader.fail("unequal-chunks", said, of=[rank], at=CUT)


# The checks ----------------------------------------------------------------------------------------------------------


def test_sum(grader: Grader) -> None:
    """the tensor becomes the sum over all ranks, in place"""
    run, inputs = main_run(grader)
    judge_sum(grader, run, inputs, "tensor")


@pytest.mark.needs("test_sum")
def test_point_to_point(grader: Grader) -> None:
    """ranks only send and receive"""
    run, _ = main_run(grader)
    judge_calls(grader, run, "tensor")
    for rank in range(WORLD):
        if not calls_for(run, rank, "tensor"):
            said = f"The sum is correct, but rank {rank} neither sent nor received a message."
            grader.fail("no-communication", said, of=[rank], at=FUNCTION)
    judge_bytes(grader, short_run(grader))


def judge_bytes(grader: Grader, run: Run) -> None:
    """Whether what the ranks sent is what the operating system counted."""
    if run.wire is None or run.device != "cpu":
        return
    for rank, row in enumerate(run.wire):
        for other, counted in enumerate(row):
            sent = sum(call.nbytes for call in calls_for(run, rank, SHORT) if (call.kind, call.peer) == ("send", other))
            what = (f"With {SHORT_LENGTH:,} numbers of type int16, rank {rank} sent messages of {sent:,} bytes to rank {other}, but the operating "
                    f"system counted {counted:,} bytes.")  # fmt: skip
            less, more = counted < sent, counted > SLACK * sent + HEADERS
            grader.fail_on([rank] * less, "no-communication", f"{what} The numbers took a different path.", at=FUNCTION)
            said = f"{what} Something other than send and recv moved the rest."
            grader.fail_on([rank] * more, "calls-a-collective", said, at=FUNCTION)


@pytest.mark.needs("test_point_to_point")
def test_traffic(grader: Grader) -> None:
    """each rank sends 2(N-1)/N of the tensor, in 2(N-1) steps, to one neighbor"""
    run, _ = main_run(grader)
    judge_traffic(grader, run, "tensor", 4 * LENGTH)
    judge_traffic(grader, short_run(grader), SHORT, 2 * SHORT_LENGTH)


def judge_traffic(grader: Grader, run: Run, name: str, size: int) -> None:
    """The messages by which this tensor of so many bytes was summed."""
    world = run.world_size
    sent = [[call for call in calls_for(run, rank, name) if call.kind == "send"] for rank in range(world)]
    steps, chunk = 2 * (world - 1), size // world
    allowed = steps * chunk + 4 * world
    moved = [sum(call.nbytes for call in calls) for calls in sent]
    most = max(range(world), key=lambda rank: moved[rank])
    all_of_them = ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(moved))
    count = f"{moved[most]} bytes in {len(sent[most])} messages to sum {size} bytes over {world} ranks; a ring sends {steps * chunk} in {steps}."
    what = f"Rank {most} sent {count}"
    types = ", ".join(sorted({call.dtype for call in sent[most]}))
    own = type_of(name)
    if moved[most] > allowed and moved[most] >= 2 * min(moved):
        said = f"{what} All data goes through that rank (bytes sent by {all_of_them}), and the others wait for it."
        grader.fail("through-one-rank", said, of=[most], at=SEND)
    if moved[most] > allowed and types != own:
        said = f"Rank {most} sent numbers of type {own} as {types}: {count}"
        grader.fail("sends-too-much", said, of=[most], at=r"float || double || \.to\( || " + SEND)
    if moved[most] > allowed and any(call.nbytes >= size for call in sent[most]):
        said = f"{what} Its messages are of {sent[most][0].nbytes} bytes, the whole tensor, instead of {chunk}."
        grader.fail("moves-whole-tensor", said, of=[most], at=sent[most][0].frame)
    if moved[most] > allowed:
        longest = max(call.nbytes for call in sent[most])
        grader.fail("sends-too-much", f"{what} The longest has {longest} bytes.", of=[most], at=sent[most][0].frame)
    for rank, calls in enumerate(sent):
        peers = sorted({call.peer for call in calls if call.peer is not None})
        if len(peers) > 1:
            how = "both its neighbors, " if set(peers) == {(rank - 1) % world, (rank + 1) % world} else ""
            said = f"Rank {rank} sent to {how}{names(peers)}. In a ring each rank sends to one neighbor only."
            grader.fail("not-a-ring", said, of=[rank], at=SEND)
        if len(calls) != steps:
            sizes = sorted({call.nbytes for call in calls})
            said = f"Rank {rank} sent {len(calls)} messages of {sizes} bytes; {world - 1} to reduce and {world - 1} to gather make {steps}."
            grader.fail("wrong-number-of-steps", said, of=[rank], at=SEND)


@pytest.mark.needs("test_point_to_point")
def test_any_length(grader: Grader) -> None:
    """any length: not divisible, shorter than the world, empty"""
    inputs = draw(grader, "lengths", WORLD, {f"length {n}": (n,) for n in (*LENGTHS, 0)})
    run = sums(grader, inputs)
    for name in inputs:
        judge_sum(grader, run, inputs, name)
        judge_calls(grader, run, name)
    for length, name in zip(LENGTHS, inputs, strict=False):
        judge_chunks(grader, run, name, length)


@pytest.mark.needs("test_any_length")
def test_any_shape(grader: Grader) -> None:
    """any shape, also a view whose elements do not lie side by side"""
    shapes = {"matrix": (3, 5), "scalar": (), "transposed": (4, 6), "column": (9,), WHOLE: (8,), DOUBLE: (8,)}
    shapes |= dict.fromkeys(HALVES, (9,))
    inputs = draw(grader, "shapes", 3, shapes)
    inputs["matrix"][1][0, 0] = float("inf")
    inputs[WHOLE] = [tensor.long() * (2**51 + 1) for tensor in inputs[WHOLE]]  # more than a float64 has room for
    inputs[DOUBLE] = [tensor.double() * (2**40 + 1) for tensor in inputs[DOUBLE]]  # more than a float32 has room for
    for name, dtype in HALVES.items():
        inputs[name] = [(tensor % 64).to(dtype) for tensor in inputs[name]]  # their sums have room in eight bits
    run = sums(grader, inputs, {"transposed": "transposed", "column": "column"})
    for rank, memory in enumerate(run.observed("column memory")):
        if not (memory[..., 0::2] == -7).all():
            said = f"On rank {rank} the elements outside the view were changed. The view was one column of a matrix; the other columns must stay as they are."
            grader.fail("changes-other-memory", said, of=[rank], at=r"as_strided || storage || " + FUNCTION)
    for name in shapes:
        seen = run.observed(name)
        wrong = [rank for rank in range(3) if not torch.equal(seen[rank], torch.stack(inputs[name]).sum(0))]
        if name == "transposed" and 0 in wrong:
            by_memory = inputs[name][0].flatten() + sum(own.t().flatten() for own in inputs[name][1:])
            if torch.equal(seen[0].flatten(), by_memory):
                said = "A matrix is stored by rows on rank 0 and by columns on ranks 1 and 2. Elements at the same place in memory were added, although their indices differ."
                at = r"stride || storage || permute || \.t\(|\.T\b || " + FUNCTION
                grader.fail("adds-in-order-of-memory", said, of=wrong, at=at)
        if wrong and name in ("transposed", "column"):
            same = torch.equal(seen[wrong[0]], inputs[name][wrong[0]])
            grader.fail(
                "loses-the-view",
                f"The tensor was a {'transposed matrix' if name == 'transposed' else 'column of a matrix'}, a view that "
                f"is not contiguous, and on {names(wrong)} it {'is as it was' if same else 'is not the sum'} afterwards.",
                of=wrong,
                at=r"reshape || flatten || contiguous || view || " + FUNCTION,
            )
        judge_sum(grader, run, inputs, name)
        judge_calls(grader, run, name)
    judge_chunks(grader, run, "transposed", 24)
    for name in HALVES:
        judge_traffic(grader, run, name, 2 * 9)


@pytest.mark.needs("test_sum")
def test_any_world(grader: Grader) -> None:
    """two ranks, and one alone"""
    for world in (2, 1):
        inputs = draw(grader, f"world {world}", world, {"tensor": (6,)})
        run = sums(grader, inputs)
        judge_sum(grader, run, inputs, "tensor")
