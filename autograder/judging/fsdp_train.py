"""A model and batches for `ShardedTraining`, how steps with them went, and what one process makes of the joined batches.

A plain copy of the model in float64 says what has to come out, and what each known mistake would give.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from lockstep.grading import Collective, Grader, Hypothesis, Tolerance

TOKENS = 5  # of a sample: neither a number of ranks nor of replicas
VOCABULARY, WIDTH, HIDDEN, LAYERS = 61, 96, 50, 3  # neither two ranks nor three can divide all of it
FROZEN = "layers.1.first.weight"
SIZES = {
    2: [[5, 2], [1, 6], [4, 3]],
    3: [[4, 1, 2], [4, 0, 3], [1, 5, 1]],
    4: [[3, 1, 2, 1], [3, 2, 0, 2], [1, 1, 1, 4]],
}
"""By the number of ranks: how many samples each rank has in each step."""
SGD = {"lr": 0.2, "momentum": 0.5, "weight_decay": 0.01}
ADAMW = {"lr": 0.02, "weight_decay": 0.05, "eps": 1e-3}  # so large an eps that a gradient's rounding stays rounding
UNCLIPPED, CLIPPED = [50.0, 50.0, 50.0], [0.05, 50.0, 0.03]  # the norm is about 1, the largest element 0.11 or more
CLOSE = Tolerance(relative=1e-4, absolute=1e-5)
COARSE = Tolerance(relative=0.1, absolute=0.02, norm=0.02)  # bfloat16 has three digits
STEPS = 3

CLASS = r"class ShardedTraining"
SHARD = r"fully_shard\(.*[lm]o?d?a?ye?r? || fully_shard\( || def __init__ || " + CLASS
RESHARD = r"fully_shard\(.*reshard_after_forward || reshard_after_forward= || " + SHARD
POLICY = r"MixedPrecisionPolicy || mp_policy || \.to\( || bfloat16 || " + SHARD
OPTIMIZER = r"make_optimizer\( || " + SHARD
MESH = r"mesh= || mesh || " + SHARD
WEIGHT = r"\.backward\( || sum_of_losses\( || def step"
CLIP = r"clip_grad || norm || def step"
ZERO = r"zero_grad || \.grad\b || def step"
LOSS = r"return .*(item|loss|total) || all_reduce || def step"
NORM = r"return .*norm || norm || def step"
SAVE = r"dcp\.save || torch\.save || save\( || def save"
LOAD = r"set_\w*state_dict || dcp\.load || load_state_dict || torch\.load || def load"

State = dict[str, torch.Tensor]
Gradients = list[State]
"""Of each rank: the gradient of the sum of its samples' losses."""
Combine = Callable[[Gradients, list[int]], State]
Clip = Callable[["Played", State, float], State]


class Played:
    """A model and batches as drawn, and how the submission's steps with them went."""

    def __init__(
        self, grader: Grader, world_size: int, norms: Sequence[float] = UNCLIPPED, *, mesh: tuple[int, ...] = (),
        scenario: str = "steps", optimizer: str = "SGD", options: dict[str, Any] | None = None, **more: Any,
    ) -> None:  # fmt: skip
        self.world_size, self.mesh, self.norms = world_size, mesh or (world_size,), list(norms)
        self.optimizer, self.options = optimizer, options or SGD
        self.state = initial(grader)
        self.batches = batches(grader, world_size)
        keywords = {name: more.pop(name) for name in ("compute_dtype", "reshard_after_forward") if name in more}
        each = [{"batches": [step[rank] for step in self.batches]} for rank in range(world_size)]
        self.run = grader.run(
            scenario, world_size, each=each, norms=self.norms, mesh=list(self.mesh), state=self.state,
            optimizer=optimizer, options=self.options, keywords=keywords, **more,
        )  # fmt: skip
        self.states: list[list[State]] = self.run.observed("states")

    @property
    def shards(self) -> int:
        """Among how many ranks each parameter is divided."""
        return self.mesh[-1]

    def rows(self, name: str) -> int:
        """The most rows of this parameter that a rank keeps."""
        return -(-len(self.state[name]) // self.shards)

    def kept(self, name: str) -> int:
        """The elements of these rows."""
        return self.rows(name) * math.prod(self.state[name].shape[1:])

    def groups(self) -> list[int]:
        """The elements that a rank brings to the gather of what is outside the layers, and of each layer."""
        sizes = [sum(self.kept(name) for name in self.state if name.startswith(f"layers.{n}.")) for n in range(LAYERS)]
        return [sum(self.kept(name) for name in self.state) - sum(sizes), *sizes]


def initial(grader: Grader) -> State:
    """The model's parameters, without the second name of the shared one."""
    generator = grader.generator("model")
    shapes = {"embedding.weight": (VOCABULARY, WIDTH)}
    for n in range(LAYERS):
        shapes |= {f"layers.{n}.gain": (1,), f"layers.{n}.first.weight": (HIDDEN, WIDTH),
                   f"layers.{n}.first.bias": (HIDDEN,), f"layers.{n}.second.weight": (WIDTH, HIDDEN),
                   f"layers.{n}.second.bias": (WIDTH,)}  # fmt: skip
    shapes["head.bias"] = (VOCABULARY,)
    return {
        name: torch.randn(shape, generator=generator) * (shape[-1] ** -0.5 if len(shape) > 1 else 0.1)
        for name, shape in shapes.items()
    }  # fmt: skip


def batches(grader: Grader, world_size: int) -> list[list[list[torch.Tensor]]]:
    """`batches[step][rank]`: inputs and targets, `TOKENS` of each a sample. The joined batches are the same for every number of ranks."""
    generator = grader.generator("batches")
    drawn = [torch.randint(VOCABULARY, (2, 7, TOKENS), generator=generator) for _ in range(STEPS)]
    return [
        [list(part) for part in joined.split(sizes, 1)] for joined, sizes in zip(drawn, SIZES[world_size], strict=True)
    ]


# What one process makes of it ---------------------------------------------------------------------------------------


def loss_of(state: State, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The sum of the losses of one batch."""
    x = state["embedding.weight"][inputs]
    for n in range(LAYERS):
        own = {name.removeprefix(f"layers.{n}."): one for name, one in state.items()}
        hidden = torch.tanh(F.linear(x, own["first.weight"], own["first.bias"]))
        x = x + own["gain"] * F.linear(hidden, own["second.weight"], own["second.bias"])
    return F.cross_entropy(F.linear(x, state["embedding.weight"], state["head.bias"]).mT, targets, reduction="sum")


def joined(own: Gradients, counts: list[int]) -> State:
    """The gradient of the mean loss of all samples."""
    return {name: sum(one[name] for one in own) / sum(counts) for name in own[0]}  # type: ignore[misc]


def scaled(factor: float) -> Combine:
    """The same, times a factor."""
    return lambda own, counts: {name: one * factor for name, one in joined(own, counts).items()}


def mean_of_means(own: Gradients, counts: list[int]) -> State:
    """Each rank's mean counts the same; a rank without samples has NaN, or counts as zero."""
    return {
        name: sum(one[name] / max(count, 1) for one, count in zip(own, counts, strict=True)) / len(own)  # type: ignore[misc]
        for name in own[0]
    }


def norm_of(gradient: State) -> float:
    """The norm of all elements together."""
    return math.sqrt(sum(float(one.square().sum()) for one in gradient.values()))


def clipped(played: Played, gradient: State, most: float) -> State:
    """Scaled down to the norm `most`."""
    del played
    factor = min(1.0, most / (norm_of(gradient) + 1e-6))
    return {name: one * factor for name, one in gradient.items()}


def by_rank(played: Played, gradient: State, most: float) -> State:
    """Each rank's rows scaled down by the norm of these rows alone."""
    found = {name: one.clone() for name, one in gradient.items()}
    for shard in range(played.shards):
        rows = {name: slice(shard * played.rows(name), (shard + 1) * played.rows(name)) for name in gradient}
        part = clipped(played, {name: one[rows[name]] for name, one in gradient.items()}, most)
        for name, one in part.items():
            found[name][rows[name]] = one
    return found


def each_alone(played: Played, gradient: State, most: float) -> State:
    """Each parameter scaled down by its own norm."""
    return {name: clipped(played, {name: one}, most)[name] for name, one in gradient.items()}


def each_then_all(played: Played, gradient: State, most: float) -> State:
    """Each parameter scaled down by its own norm, and then all together."""
    return clipped(played, each_alone(played, gradient, most), most)


def each_value(played: Played, gradient: State, most: float) -> State:
    """Each element cut off at `most`."""
    del played
    return {name: one.clamp(-most, most) for name, one in gradient.items()}


def scaled_up(played: Played, gradient: State, most: float) -> State:
    """Scaled to the norm `most`, also if it was smaller."""
    del played
    return {name: one * (most / norm_of(gradient)) for name, one in gradient.items()}


def at_its_share(played: Played, gradient: State, most: float) -> State:
    """Clipped while it was divided by the number of ranks, and multiplied by it then."""
    return clipped(played, gradient, most * played.world_size)


def not_at_all(played: Played, gradient: State, most: float) -> State:
    """No clipping."""
    del played, most
    return gradient


class Plain:
    """The model in float64 on one process. `combine` and `clip` make a step's gradient from those of the ranks."""

    def __init__(self, played: Played, combine: Combine = joined, clip: Clip = clipped, *, forgets: bool = True,
                 decays_frozen: bool = False, trains_frozen: bool = False, renewed: int | None = None, altered: int | None = None,
                 options: dict[str, Any] | None = None) -> None:  # fmt: skip
        """Without `forgets`, gradients add up over the steps. At step `renewed` there is a new optimizer with `options`; at
        step `altered` the one that there is gets them.
        """
        own = {name: torch.nn.Parameter(tensor.double().clone()) for name, tensor in played.state.items()}
        trained = [one for name, one in own.items() if name != FROZEN or decays_frozen or trains_frozen]
        optimizer = getattr(torch.optim, played.optimizer)(trained, **played.options)
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.sums: list[list[float]] = []
        self.states = [self._copy(own)]
        before: State = {}
        for step, most in enumerate(played.norms):
            if step == renewed:
                optimizer = getattr(torch.optim, played.optimizer)(trained, **(options or played.options))
            elif step == altered and options:
                for group in optimizer.param_groups:
                    group |= options
            gradients, counts = [], [len(targets) for _, targets in played.batches[step]]
            self.sums.append([])
            for inputs, targets in played.batches[step]:
                loss = loss_of(own, inputs, targets)
                found = torch.autograd.grad(loss, list(own.values()))
                named = zip(own, found, strict=True)
                gradients.append({name: one for name, one in named if name != FROZEN or trains_frozen})
                self.sums[-1].append(loss.item())
            gradient = combine(gradients, counts)
            if not forgets and before:
                gradient = {name: one + before[name] for name, one in gradient.items()}
            before = clip(played, gradient, most)
            self.losses.append(sum(self.sums[-1]) / sum(counts))
            self.norms.append(norm_of(gradient))
            for name, one in own.items():
                one.grad = before.get(name, torch.zeros_like(one) if decays_frozen else None)
            optimizer.step()
            self.states.append(self._copy(own))

    def _copy(self, own: State) -> list[State] | State:
        return {name: one.detach().clone() for name, one in own.items()}


def judge_steps(grader: Grader, played: Played, tolerance: Tolerance = CLOSE, more: Sequence[Hypothesis] = ()) -> None:
    """All parameters after each step on every rank, against one process and what the usual mistakes give."""
    world = played.world_size

    def hypothesis(id: str, says: str, at: str, *args: Any, **how: Any) -> Hypothesis:
        return Hypothesis(id, says, lambda: Plain(played, *args, **how).states, at)

    mistakes = [
        hypothesis("fsdp-not-trained", "No step has changed it.", OPTIMIZER, scaled(0), not_at_all, options={"weight_decay": 0.0}, renewed=0),
        hypothesis("fsdp-mean-of-means", "That comes from the mean of the ranks' means: a rank with fewer samples counts as much.",
                   WEIGHT, mean_of_means),
        hypothesis("fsdp-gradient-scaled", f"That comes from the gradient divided by {world}.", WEIGHT, scaled(1 / world)),
        hypothesis("fsdp-gradient-scaled", f"That comes from the gradient times {world}.", WEIGHT, scaled(world)),
        hypothesis("fsdp-old-gradients", "That comes from gradients to which those of the steps before were added.", ZERO, forgets=False),
        hypothesis("fsdp-not-clipped", "That comes from a gradient that was scaled up to max_norm, although its norm was smaller.",
                   CLIP, clip=scaled_up),
        hypothesis("fsdp-frozen-moved", "That is what weight decay makes of a frozen parameter.", ZERO, decays_frozen=True),
        hypothesis("fsdp-frozen-moved", "The frozen parameter was trained.", OPTIMIZER, trains_frozen=True),
        *more,
        hypothesis("fsdp-gradient-scaled", f"That comes from the gradient divided by {TOKENS}: each sample has {TOKENS} targets, and they were counted instead of the samples.",
                   r"numel\( || " + WEIGHT, scaled(1 / TOKENS)),
    ]  # fmt: skip
    if played.shards < world:
        replicas = world // played.shards
        mistakes += [
            hypothesis("fsdp-wrong-norm", "That comes from a gradient clipped by a norm that counts the rows of every replica.",
                       CLIP, clip=lambda played, own, most: clipped(played, own, most / replicas**0.5)),
            hypothesis("fsdp-gradient-scaled", f"That comes from the gradient divided by {replicas}, the number of replicas: FSDP's mean is over all {world} ranks.", WEIGHT, scaled(1 / replicas)),
        ]  # fmt: skip
    for rank, seen in enumerate(played.states):
        if others := sorted(set(seen[0]) - set(played.state)):
            said = f"On rank {rank} the model has a parameter {others[0]}, which is the same as another one before: it was shared."
            grader.fail("fsdp-shared-apart", said, of=[rank], at=SHARD)
    what = f"With {world} ranks, [step].parameter of the model (0 is before the first step)"
    right = Plain(played).states
    grader.explain(what, played.states, right, mistakes, otherwise="fsdp-wrong-step", at=WEIGHT, tolerance=tolerance)


def phases(played: Played, rank: int) -> list[tuple[list[Collective], list[Collective]]]:
    """The collectives of each step's forward, and of the backward after it, with the clipping."""
    found, marks = [], played.run.ranks[rank].marks
    calls = [call for call in played.run.collectives[rank] if not call.is_point_to_point]
    for start, middle, end in zip(marks, marks[1:], marks[2:], strict=False):
        if (start.name, middle.name, end.name) == ("forward", "loss", "optimizer"):
            forward = [call for call in calls if start.number < call.number < middle.number]
            found.append((forward, [call for call in calls if middle.number < call.number < end.number]))
    return found


def gathers(calls: Sequence[Collective]) -> list[int]:
    """The bytes that a rank brings to each gather of weights. A gather of a few numbers is none."""
    return [call.nbytes for call in calls if "gather" in call.kind and call.nbytes > 64]


def listed(sizes: Sequence[int]) -> str:
    """`3 all-gathers (400, 300 and 200 bytes)`."""
    said = ", ".join(map(str, sizes))
    return f"{len(sizes)} all-gather{'s' if len(sizes) != 1 else ''}" + (f" ({said} bytes)" if sizes else "")


def judge_forward_gathers(grader: Grader, played: Played, once: bool = False) -> None:
    """One gather for each layer in forward, and one for the rest. `once` is as in `Job`."""
    expected = [4 * size for size in played.groups()]
    for rank in range(played.world_size):
        for forward, _ in phases(played, rank)[1:]:
            seen = gathers(forward)
            said = f"Forward on rank {rank} called {listed(seen)}. The {LAYERS} layers and all other parameters need {listed(expected)}."
            if sorted(seen) == sorted(expected):
                continue
            if once and len(seen) == 1:
                said += " `layers` is an iterator here: a second loop over it finds nothing."
                grader.fail("fsdp-layers-once", said, of=[rank], at=r"in layers || " + SHARD)
            together = len(seen) <= len(expected)
            grader.fail("fsdp-gathered-at-once" if together else "fsdp-gathered-in-pieces", said, of=[rank], at=SHARD)


def judge_kept(grader: Grader, played: Played, nbytes: int, how: str) -> None:
    """No gather of a layer in backward. An element has so many bytes."""
    layers = {nbytes * size for size in played.groups()[1:]}
    for rank in range(played.world_size):
        for _, backward in phases(played, rank)[1:]:
            if layers & set(seen := gathers(backward)):
                said = f"With {how}, backward on rank {rank} called {listed(seen)}."
                grader.fail("fsdp-gathered-again", said, of=[rank], at=RESHARD)


def judge_floats(grader: Grader, what: str, seen: Sequence[Sequence[object]], id: str, at: str) -> None:
    """What step returned in each step, on each rank."""
    for rank, values in enumerate(seen):
        if other := next((type(value).__name__ for value in values if not isinstance(value, float)), None):
            grader.fail(
                id, f"step returned the {what} as a {other} on rank {rank}; expected a float.", of=[rank], at=at
            )


def judge_rows(grader: Grader, played: Played) -> None:
    """What each rank keeps of each parameter, and of its state."""
    for rank, (kept, state) in enumerate(zip(played.run.observed("kept"), played.run.observed("state"), strict=True)):
        for name, whole in played.state.items():
            most, (seen, _) = played.kept(name), kept[name]
            if seen > most:
                said = f"Rank {rank} keeps {seen} elements of {name}, which has {whole.numel()}. Divided among {played.shards} ranks by rows, none has more than {most}."
                grader.fail("fsdp-not-sharded", said, of=[rank], at=SHARD)
            for numel, _ in state[name]:
                if numel > most:
                    said = f"Rank {rank} keeps {numel} elements of optimizer state for {name}, of which it has {seen} elements."
                    grader.fail("fsdp-not-sharded", said, of=[rank], at=OPTIMIZER)


def clipping_mistakes(played: Played) -> list[Hypothesis]:
    """The parameters after each step, if the gradient was clipped in another way."""
    table = [
        ("fsdp-clips-own-rows", "That comes from a gradient of which each rank clipped its rows by their own norm.", by_rank),
        ("fsdp-clips-each-alone", "That comes from a gradient of which each parameter was clipped by itself.", each_alone),
        ("fsdp-clips-each-alone", "That comes from a gradient of which each parameter was clipped by itself before all of them together.", each_then_all),
        ("fsdp-clips-each-alone", "That comes from a gradient whose elements were cut off one by one.", each_value),
        ("fsdp-not-clipped", "That comes from a gradient that was clipped before it was multiplied by the number of ranks.", at_its_share),
        ("fsdp-not-clipped", "That comes from the gradient without clipping.", not_at_all),
    ]  # fmt: skip
    return [Hypothesis(id, says, lambda clip=clip: Plain(played, clip=clip).states, CLIP) for id, says, clip in table]
