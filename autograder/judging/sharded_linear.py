"""A layer and batches for `ShardedLinear`, how steps with them went, and what one whole layer under DDP makes of them.

A few lines of algebra say what has to come out, and what each known mistake would give.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from lockstep.grading import Collective, Each, Grader, Hypothesis, Tolerance

ROWS, COLUMNS = 36, 50  # two ranks and three can divide the rows evenly
BATCHES = [1, 1, 2]  # before each step: the gradients of the last two are added up
LR, MOMENTUM = 0.05, 0.9
CLOSE = Tolerance(relative=1e-4, absolute=1e-5)
CLOSEST = Tolerance(relative=1e-11, absolute=1e-11)  # float64 all the way
WORLDS = (3, 2)
CASES = [("with a bias", True, True), ("without a bias", False, True), ("in eval mode", True, False)]
"""In words, whether it has a bias, whether it is in training mode."""

CLASS = r"class ShardedLinear"
MAKE = r"Parameter\( || def __init__ || " + CLASS
FORWARD = r"F\.linear || linear\( || @ || def forward || " + CLASS
GATHER = r"all_gather || broadcast || def forward || " + CLASS
REDUCE = r"reduce_scatter || all_reduce || def backward || " + GATHER
SCALE = r"/=? .*(world|size)|\.div_?\(|ReduceOp\.AVG || " + REDUCE
INPUTS = r"needs_input_grad || def backward || " + FORWARD
VIEW = r"reduce_scatter || \.grad = || " + REDUCE
EVAL = r"\.training || " + FORWARD
KEPT = (
    r"(ctx|layer|self)\.\w+ = .*(whole|full|gather|collect) || save_for_backward || ctx\.\w+ = || self\.\w+ = .*gather || def forward || "
    + CLASS
)
SHAPES = r"\.view\( || \.T\b || \.t\(\) || reshape || flatten || def backward || " + FORWARD
NO_INPUTS = r"numel\(\) || len\( || == 0 || def forward || " + CLASS
STATE = r"def full_state_dict || " + CLASS
DTYPE = r"\.float\(\) || dtype || torch\.(zeros|empty)\( || new_ || " + GATHER

State = dict[str, torch.Tensor]
Combine = Callable[[Sequence[torch.Tensor]], torch.Tensor]
"""From the ranks' gradients of [weight | bias] to the one that a step uses."""


class Played:
    """A layer and batches as drawn, and how the submission's steps with them went."""

    def __init__(
        self, grader: Grader, world_size: int, rows: int = ROWS, bias: bool = True, dtype: torch.dtype = torch.float32
    ) -> None:  # fmt: skip
        purpose = f"{rows} rows on {world_size}, bias {bias}, {dtype}"
        self.generator = grader.generator(purpose)
        self.world_size, self.rows, self.dtype = world_size, rows, dtype
        self.state: State = {"weight": self._draw(rows, COLUMNS).to(dtype)}
        if bias:
            self.state["bias"] = self._draw(rows).to(dtype)
        # Each rank has batches of another length.
        self.batches = [
            [[(self._draw(3 + rank, COLUMNS).to(dtype), self._draw(3 + rank, rows).to(dtype)) for _ in range(count)]
             for count in BATCHES]
            for rank in range(world_size)
        ]  # fmt: skip
        each = [{"batches": own} for own in self.batches]
        self.run = grader.run("steps", world_size, each=each, state=self.state, lr=LR, momentum=MOMENTUM)
        self.states: list[list[State]] = self.run.observed("states")
        self.outputs: list[list[torch.Tensor]] = self.run.observed("outputs")
        self.gradients: list[list[torch.Tensor | None]] = self.run.observed("gradients")
        self.parameters: list[list[tuple[tuple[int, ...], str]]] = self.run.observed("parameters")

    def _draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    @property
    def share(self) -> int:
        """The most rows that a rank may keep."""
        return -(-self.rows // self.world_size)

    @property
    def width(self) -> int:
        """The elements that one row has, of weight and bias together."""
        return COLUMNS + len(self.state) - 1

    def rows_of(self, rank: int) -> slice:
        """The rows that are this rank's if they are divided in order."""
        return slice(rank * self.share, (rank + 1) * self.share)

    def trained(self, combine: Combine, last_only: bool = False) -> list[State]:
        """The layer at first and after each step, if a step uses what `combine` makes of the ranks' gradients."""
        layer = torch.cat([tensor.double().view(self.rows, -1) for tensor in self.state.values()], dim=1)
        speed, after = torch.zeros_like(layer), [layer]
        for step in range(len(BATCHES)):
            own = [batches[step][-1:] if last_only else batches[step] for batches in self.batches]
            speed = MOMENTUM * speed + combine([self.gradient(batches) for batches in own])
            after.append(after[-1] - LR * speed)
        return [self.named(one) for one in after]

    def gradient(self, batches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """The gradient of [weight | bias] from these inputs and directions."""
        parts = [
            torch.cat([direction.double().T @ inputs.double(), direction.double().sum(0)[:, None]], 1)
            for inputs, direction in batches
        ]
        return torch.stack(parts).sum(0)[:, : self.width]

    def named(self, layer: torch.Tensor) -> State:
        """[weight | bias] as a state."""
        return {"weight": layer[:, :COLUMNS]} | ({"bias": layer[:, -1]} if "bias" in self.state else {})

    def asked(self, rank: int) -> list[tuple[State, torch.Tensor, torch.Tensor | None]]:
        """For each forward: the layer that the submission says it had then, the inputs, the direction if there was one."""
        steps = enumerate(self.batches[rank])
        before = [(self.states[rank][step], *batch) for step, batches in steps for batch in batches]
        return [*before, (self.states[rank][-1], self.batches[rank][0][0][0], None)]

    def returned(self, output_of: Callable[[State, torch.Tensor, int], torch.Tensor]) -> Each:
        """For each rank and forward, what `output_of` makes of the layer, the inputs and the rank."""
        ranks = range(self.world_size)
        return Each([[output_of(state, inputs, rank) for state, inputs, _ in self.asked(rank)] for rank in ranks])


def whole(state: State, inputs: torch.Tensor, rank: int = 0) -> torch.Tensor:
    """What a plain linear layer returns."""
    del rank
    return torch.nn.functional.linear(inputs.double(), *(tensor.double() for tensor in state.values()))


def mean(own: Sequence[torch.Tensor]) -> torch.Tensor:
    """What DDP makes of the ranks' gradients."""
    return torch.stack(list(own)).mean(0)


def judge_state(grader: Grader, played: Played) -> None:
    """What `full_state_dict` has before any step."""
    ranks, state = range(played.world_size), played.state
    seen = [states[0] for states in played.states]
    bare, divided = {"weight": state["weight"]}, played.rows - played.rows % played.world_size

    def cut(rank: int) -> State:
        return {name: tensor[played.rows_of(rank)] for name, tensor in state.items()}

    mistakes = [
        Hypothesis("full-state-incomplete", "Those are the rank's own rows.", lambda: Each([cut(rank) for rank in ranks])),
        Hypothesis("full-state-incomplete", "The bias is missing.", bare),
        Hypothesis("full-state-incomplete", "Only rank 0 has the layer.", Each([{} if rank else state for rank in ranks])),
        Hypothesis("rows-lost", f"Only {divided} rows are left: the ranks kept {divided // played.world_size} each.",
                   {name: tensor[:divided] for name, tensor in state.items()}, MAKE),
    ]  # fmt: skip
    for rank, one in enumerate(seen):
        tensors = {name: tensor for name, tensor in one.items() if isinstance(tensor, torch.Tensor)}
        if any(len(tensors[name]) > len(tensor) for name, tensor in state.items() if name in tensors):
            shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
            said = f"full_state_dict returns {shapes} for a layer of {played.rows} rows: the padding is still there."
            grader.fail("padding-left", said, of=[rank], at=STATE)
    what = f"The layer that full_state_dict returns for {played.rows} rows on {played.world_size} ranks,"
    grader.explain(what, seen, state, mistakes, otherwise="wrong-full-state", at=STATE, tolerance=CLOSE)


def judge_outputs(grader: Grader, played: Played) -> None:
    """What each forward returned, against the layer as the submission says it was before it."""
    first = [states[0] for states in played.states]

    def own_rows(state: State, inputs: torch.Tensor, rank: int) -> torch.Tensor:
        kept = torch.zeros(played.rows, dtype=torch.float64)
        kept[played.rows_of(rank)] = 1
        return whole(state, inputs) * kept

    mistakes = [
        Hypothesis("output-of-own-rows", "Only the columns of the rank's own rows are filled.", lambda: played.returned(own_rows), GATHER),
        Hypothesis("output-of-own-rows", "It has the columns of the rank's own rows only.",
                   lambda: played.returned(lambda state, inputs, rank: whole(state, inputs)[:, played.rows_of(rank)]), GATHER),
        Hypothesis("bias-forgotten", "That is what the weight gives without the bias.",
                   lambda: played.returned(lambda state, inputs, rank: whole({"weight": state["weight"]}, inputs))),
        Hypothesis("gathered-once-for-all", "That is what the weights gave before the first step: they were not gathered again.",
                   lambda: played.returned(lambda state, inputs, rank: whole(first[rank], inputs)), GATHER),
    ]  # fmt: skip
    what, right, id = "[forward] of the output", played.returned(whole), "wrong-linear-output"
    grader.explain(what, played.outputs, right, mistakes, otherwise=id, at=FORWARD, tolerance=CLOSE)


def judge_training(grader: Grader, played: Played) -> None:
    """The layer after each step on every rank, against DDP's and what the usual mistakes give."""
    world = played.world_size

    def local(own: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat([own[rank][played.rows_of(rank)] for rank in range(world)])

    def shifted(own: Sequence[torch.Tensor]) -> torch.Tensor:
        return mean(own).roll(played.share, 0)

    def without_bias(own: Sequence[torch.Tensor]) -> torch.Tensor:
        found = mean(own).clone()
        found[:, COLUMNS:] = 0
        return found

    def bias_alone(way: Combine) -> Combine:
        return lambda own: torch.cat([mean(own)[:, :COLUMNS], way(own)[:, COLUMNS:]], 1)

    def total(own: Sequence[torch.Tensor]) -> torch.Tensor:
        return mean(own) * world

    def per_input(own: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [one / len(played.batches[rank][0][0][0]) for rank, one in enumerate(own)]

    def hypothesis(id: str, says: str, combine: Combine, at: str = REDUCE, last_only: bool = False) -> Hypothesis:
        return Hypothesis(id, says, lambda: played.trained(combine, last_only), at)

    mistakes = [
        hypothesis("shard-not-trained", "That is where it started: no step has changed it.", lambda own: own[0] * 0, MAKE),
        hypothesis("shard-gradient-summed", f"That comes from the sum over {world} ranks, not the mean.", total),
        hypothesis("shard-gradient-scaled", f"That comes from the mean divided by {world} once more.",
                   lambda own: mean(own) / world, SCALE),
        hypothesis("shard-gradient-not-reduced", "Each rank's rows have the gradient of that rank's inputs alone.", local),
        hypothesis("shard-gradient-not-reduced", "All rows have the gradient of rank 0's inputs alone.", lambda own: own[0]),
        hypothesis("shard-gradient-not-reduced", f"Each rank's rows have its own gradient, divided by {world}.",
                   lambda own: local(own) / world),
        hypothesis("gradient-of-other-rows", "Each rank's rows have the gradient of the rows before them.", shifted),
        hypothesis("bias-not-trained", "The weight is right, and the bias is where it started.", without_bias),
        hypothesis("bias-not-averaged", "The weight is right, and the bias has the gradient of each rank's inputs alone.",
                   bias_alone(local)),
        hypothesis("bias-not-averaged", "The weight is right, and the bias has the sum over the ranks.", bias_alone(total)),
        hypothesis("wrong-sharded-gradient", "The weight is right, and the bias has the mean over the inputs, not their sum.",
                   bias_alone(lambda own: mean(per_input(own)))),
        hypothesis("wrong-sharded-gradient", "Each rank's gradient is divided by its number of inputs, and then they are summed.",
                   lambda own: total(per_input(own))),
        hypothesis("wrong-sharded-gradient", "Each rank's gradient is divided by its number of inputs before the mean.",
                   lambda own: mean(per_input(own))),
        hypothesis("gradient-overwritten", "The second of two backwards before a step has replaced the first.", mean,
                   r"\.grad = || " + REDUCE, last_only=True),
    ]  # fmt: skip
    several = f"With {world} ranks, [step] of the layer (0 is before the first)"
    what, right = several if world > 1 else "With one rank, the layer", played.trained(mean)
    grader.explain(what, played.states, right, mistakes, otherwise="wrong-sharded-gradient", at=REDUCE, tolerance=CLOSE)


def judge_three_calls(grader: Grader, played: Played) -> None:
    """The layer after a step for the outputs of three calls, on every rank."""
    world = played.world_size
    given = [[*batches[0], *batches[2]] for batches in played.batches]
    run = grader.run("both", world, each=[{"batches": own} for own in given], state=played.state, lr=LR)

    def after(batches: Sequence[Sequence[tuple[torch.Tensor, torch.Tensor]]]) -> State:
        layer = torch.cat([tensor.double().view(played.rows, -1) for tensor in played.state.values()], dim=1)
        return played.named(layer - LR * mean([played.gradient(own) for own in batches]))

    def taken(*calls: int) -> Callable[[], State]:
        return lambda: after([[(own[call][0], own[n][1]) for n, call in enumerate(calls)] for own in given])

    table = [
        ("All outputs were taken for results of the third call's inputs.", taken(2, 2, 2)),
        ("Backward of the second output took the inputs of the third call, the last.", taken(0, 2, 1)),
        ("Backward of the second output took the inputs of the first call.", taken(2, 0, 1)),
        ("Only the third call's inputs count.", lambda: after([own[2:] for own in given])),
    ]
    mistakes = [Hypothesis("call-overwrites-call", says, gives, r"\.pop\( || " + KEPT) for says, gives in table]
    what = f"With {world} ranks, three calls of the layer, backward of the second output and then of the other two, the layer after a step"
    seen, id = run.observed("state"), "wrong-sharded-gradient"
    grader.explain(what, seen, after(given), mistakes, otherwise=id, at=REDUCE, tolerance=CLOSE)


def judge_input_gradients(grader: Grader, played: Played) -> None:
    """The gradient of each batch of inputs, against the layer as the submission says it was then."""
    world = played.world_size

    def gradient(scale: float = 1.0, own: bool = False) -> Each:
        found = []
        for rank in range(world):
            rows = played.rows_of(rank) if own else slice(None)
            asked = [(state, direction) for state, _, direction in played.asked(rank) if direction is not None]
            found.append([one[:, rows].double() @ state["weight"][rows].double() * scale for state, one in asked])
        return Each(found)

    mistakes = [
        Hypothesis("input-gradient-missing", "No gradient came back to the inputs.",
                   Each([[None for _ in seen] for seen in played.gradients])),
        Hypothesis("input-gradient-averaged", f"That is the right one divided by {world}.", lambda: gradient(1 / world), SCALE),
        Hypothesis("input-gradient-averaged", f"That is the right one times {world}.", lambda: gradient(world), SCALE),
        Hypothesis("input-gradient-of-own-rows", "That comes from the rank's own rows alone.", lambda: gradient(own=True), GATHER),
    ]  # fmt: skip
    what, id = "[backward] of the inputs' gradient", "wrong-input-gradient"
    grader.explain(what, played.gradients, gradient(), mistakes, otherwise=id, at=INPUTS, tolerance=CLOSE)


def judge_held(grader: Grader, rank: int, case: tuple[str, bool, bool], seen: dict[str, int]) -> None:
    """What is in memory after each call."""
    how, biased, _ = case
    nbytes = 4 * ROWS * (COLUMNS + biased)
    # After backward there is the gradient of the own rows, too. The output and the inputs are a tenth of the layer.
    points = (
        ("forward", 1, "Between forward and backward"),
        ("backward", 2, "After backward"),
        ("step", 1, "After the step"),
        ("no_grad", 1, "After a forward under torch.no_grad()"),
    )
    for point, rows, when in points:
        if seen[point] > rows * nbytes / 3 + nbytes / 2:
            said = f"{when} of a layer {how}, rank {rank} holds {seen[point]} bytes of what the layer was given and has made. Its rows are {nbytes // 3} bytes, the whole layer {nbytes}."
            if point == "backward" and seen["gradient"] > nbytes / 2:
                said += f" The `.grad` of its rows is a view of {seen['gradient']} bytes."
                grader.fail("gradient-held", said, of=[rank], at=VIEW)
            grader.fail("weight-held", said, of=[rank], at=KEPT)


def judge_parts(grader: Grader, played: Played) -> None:
    """How many elements each rank's parameters have."""
    most = played.share * played.width
    parts = [sum(torch.Size(shape).numel() for shape, _ in own) for own in played.parameters]
    said = f"The ranks' parameters have {', '.join(map(str, parts))} elements. The layer has {played.rows * played.width} in {played.rows} rows, "
    said += f"and none of {played.world_size} ranks may keep more than {played.share} rows: {most} elements."
    grader.fail_on([rank for rank, part in enumerate(parts) if part > most], "rows-not-sharded", said, at=MAKE)


def phases(played: Played, rank: int) -> list[tuple[list[Collective], list[Collective]]]:
    """The collectives of each forward and of the backward after it."""
    found, marks = [], played.run.ranks[rank].marks
    calls = [call for call in played.run.collectives[rank] if not call.is_point_to_point]
    for start, middle, end in zip(marks, marks[1:], [*marks[2:], None], strict=False):
        if start.name == "forward":
            forward = [call for call in calls if start.number < call.number < middle.number]
            last = end.number if end is not None else middle.number
            found.append((forward, [call for call in calls if middle.number < call.number < last]))
    return found


def counted(calls: list[Collective]) -> str:
    """`2 × all_gather and 1 × all_reduce`."""
    kinds = [call.kind.removesuffix("_into_tensor").removesuffix("_tensor") for call in calls]
    return " and ".join(f"{kinds.count(kind)} × {kind}" for kind in dict.fromkeys(kinds)) or "no collective"
