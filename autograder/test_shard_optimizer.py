"""What `ShardedOptimizer` has to do.

    ShardedOptimizer(params, optimizer_class, **defaults)    .param_groups    .step()    .zero_grad()

Every rank is given the same parameters and, before each step, the same gradients, as DDP leaves them. Both were drawn
here, so one plain optimizer for all parameters says what has to come out. The class that is handed over can be found
again: whose state a rank keeps is counted there. What is sent is read from the recorded collectives.
"""

from __future__ import annotations

import math
from collections.abc import Container
from typing import Any

import pytest
import torch
from judging.apart import read_apart

from lockstep.grading import EXACT, Cause, Diagnosis, Each, Grader, Hypothesis, Run, Tolerance, difference, names

# Three large ones, where numbering the owners in turn gives all of them to rank 0, on two ranks and on three; and so
# many small ones behind them that half of the *number* is not half of the elements.
LARGE, SMALL = (40, 30), [(7, 5), (11,), (3, 6), (9,), ()]
SHAPES = [LARGE if n in (0, 6, 12) else SMALL[n % len(SMALL)] for n in range(27)]
SIZES = [math.prod(shape) for shape in SHAPES]
WITHOUT = 4  # never has a gradient, and weight decay would move it
LATE = 7  # has none in step 0
PAUSED = 8  # has none in the last step, and momentum would move it
ZEROED = 10  # has one of zeros in the last step, and momentum moves it
STEPS = 3
WORLDS = (2, 3)
OPTIONS = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}
CLOSE = Tolerance(relative=1e-5, absolute=1e-6)
CLOSE_IN_DOUBLE = Tolerance(relative=1e-10, absolute=1e-11)

CLASS = r"class ShardedOptimizer"
MAKE = r"optimizer_class\( || optimizer_class || " + CLASS
OWNERS = r"owner.* = || sorted\( || numel || % || " + MAKE
SEND = r"broadcast || all_gather || all_reduce || scatter || def step"
LOCAL = r"\.step\( || def step"
GRAD = r"\.grad\b || " + LOCAL
GROUPS = r"param_groups || params\"\] || " + MAKE
ZERO = r"\.grad = None || zero_grad\( || def zero_grad"

Steps = list[list[torch.Tensor]]


class Played:
    """Parameters and gradients as drawn, and how the submission's steps with them went."""

    def __init__(
        self,
        grader: Grader,
        purpose: str,
        world_size: int,
        shapes: list[tuple[int, ...]],
        optimizer: str = "SGD",
        groups: list[list[int]] | None = None,
        options: list[dict[str, Any]] | None = None,
        changes: list[list[dict[str, Any]]] | None = None,
        dtype: torch.dtype = torch.float32,
        **defaults: Any,
    ) -> None:
        generator = grader.generator(purpose)
        self.initial = [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]
        self.gradients: list[list[torch.Tensor | None]] = [
            [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes] for _ in range(STEPS)
        ]
        if shapes is SHAPES:
            for step, drawn in enumerate(self.gradients):
                drawn[WITHOUT] = None
                drawn[LATE] = drawn[LATE] if step else None
            self.gradients[-1][PAUSED] = None
            self.gradients[-1][ZEROED] = torch.zeros(shapes[ZEROED])
        self.optimizer, self.defaults = getattr(torch.optim, optimizer), defaults
        self.groups, self.options, self.changes = groups or [], options or [], changes or []
        self.world_size, self.payload = world_size, sum(4 * tensor.numel() for tensor in self.initial)
        self.run = grader.run(
            "steps",
            world_size,
            parameters=self.initial,
            gradients=self.gradients,
            optimizer=optimizer,
            groups=self.groups,
            options=self.options,
            changes=self.changes,
            **defaults,
        )
        self.seen: list[Steps] = self.run.observed("parameters")
        self.state: list[list[int]] = self.run.observed("state")

    def plain(
        self,
        defaults: dict[str, Any] | None = None,
        scale: float = 1.0,
        zeros: Container[int] = (),
        grouped: bool = True,
        scheduled: Container[str] = ("lr", "momentum"),
    ) -> Steps:
        """All parameters after each step of one optimizer; or with a mistake: other options, other gradients, no groups."""
        own = [torch.nn.Parameter(tensor.clone()) for tensor in self.initial]
        options = self.options if grouped else [{} for _ in self.groups]
        groups = [{"params": [own[n] for n in group], **more} for group, more in zip(self.groups, options, strict=True)]
        optimizer = self.optimizer(groups or own, **(self.defaults if defaults is None else defaults))
        after = []
        for step, drawn in enumerate(self.gradients):
            for group, change in zip(optimizer.param_groups, self.changes[step] if self.changes else ()):  # noqa: B905
                group.update({name: value for name, value in change.items() if name in scheduled})
            for number, (parameter, gradient) in enumerate(zip(own, drawn, strict=True)):
                parameter.grad = gradient * scale if gradient is not None else None
                if gradient is None and number in zeros:
                    parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            after.append([parameter.detach().clone() for parameter in own])
        return after

    def owned(self, rank: int) -> list[bool]:
        """Which parameters this rank keeps state of."""
        return [nbytes > 0 for nbytes in self.state[rank][:-1]]

    @property
    def parts(self) -> list[int]:
        """How many elements each rank keeps state of."""
        sizes, ranks = [one.numel() for one in self.initial], range(self.world_size)
        return [sum(n for n, own in zip(sizes, self.owned(rank), strict=True) if own) for rank in ranks]

    def kept(self, right: Steps, rank: int, owner: int) -> Steps:
        """What a rank has after each step if only what `owner` updates arrives, besides what it updates itself."""
        arrives = [a or b for a, b in zip(self.owned(rank), self.owned(owner), strict=True)]
        return [
            [new if came else old for new, old, came in zip(step, self.initial, arrives, strict=True)] for step in right
        ]

    def without_late(self, right: Steps, rank: int | None = None) -> Steps:
        """What a rank has after each step if only parameters with a gradient in the first step are ever sent; without a
        rank, if only these are updated.
        """
        late = {number for number, gradient in enumerate(self.gradients[0]) if gradient is None}
        others = [self.owned(other) for other in range(self.world_size) if other != rank]
        stay = {number for number in late if rank is None or any(own[number] for own in others)}
        return [[self.initial[n] if n in stay else new for n, new in enumerate(step)] for step in right]

    def rounded(self, right: Steps, rank: int) -> Steps:
        """What a rank has after each step if what it doesn't own arrives in float32."""
        own = self.owned(rank)
        return [[new if kept else new.float().double() for new, kept in zip(step, own, strict=True)] for step in right]

    def without_zeroed(self, right: Steps, rank: int) -> Steps:
        """What a rank has after each step if a parameter whose gradient is zero isn't sent."""
        last = list(right[-1])
        if not self.owned(rank)[ZEROED]:
            last[ZEROED] = right[-2][ZEROED]
        return [*right[:-1], last]


def main_run(grader: Grader, world_size: int = 3) -> Played:
    """SGD with momentum and weight decay, on parameters of very different sizes."""
    return Played(grader, "main", world_size, SHAPES, **OPTIONS)


def read_failure(grader: Grader, run: Run, cause: Cause) -> Diagnosis | None:
    """Name what a failed run of this exercise usually means."""
    if cause.error is not None and "empty parameter list" in cause.error.message:
        said = f"{names(cause.ranks).capitalize()} raised {cause.error}. There were fewer parameters than ranks."
        return grader.diagnosis("owns-nothing", said, of=cause.ranks, at=cause.error.frame or MAKE)
    if cause.error is not None and "leaf Variable" in cause.error.message:
        said = f"{names(cause.ranks).capitalize()} raised {cause.error}"
        return grader.diagnosis("writes-with-autograd", said, of=cause.ranks, at=cause.error.frame or SEND)
    had = "All ranks had the same parameters and the same gradients, but their calls differ."
    return read_apart(grader, run, "ranks-disagree-on-owners", had, SEND)


def judge_steps(grader: Grader, played: Played, more: list[Hypothesis] | None = None) -> None:
    """All parameters after each step on every rank, against one optimizer and what the usual mistakes give."""
    right = played.plain()
    world, ranks = played.world_size, range(played.world_size)
    rate = {"lr": played.defaults["lr"]} if "lr" in played.defaults else {}
    mistakes = [
        Hypothesis("shard-not-sent", "That is where it started: what its owner made of it never arrived.",
                   lambda: Each([played.kept(right, rank, rank) for rank in ranks]), SEND),
        Hypothesis("sent-by-wrong-rank", "Only what rank 0 owns arrived; everything else is where it started.",
                   lambda: Each([played.kept(right, 0, 0)] * world), SEND),
        Hypothesis("shard-not-sent", "This parameter had no gradient in the first step. Later its owner updated it, and that never arrived.",
                   lambda: Each([played.without_late(right, rank) for rank in ranks]), SEND),
        Hypothesis("averages-again", f"That comes from gradients that were divided by {world} once more.",
                   lambda: played.plain(scale=1 / world), GRAD),
        Hypothesis("averages-again", f"That comes from gradients that were multiplied by {world}: DDP's mean was summed.",
                   lambda: played.plain(scale=world), GRAD),
        Hypothesis("options-lost", f"That is what {played.optimizer.__name__} makes of it without the options, save lr.",
                   lambda: played.plain(defaults=rate), MAKE),
        Hypothesis("options-lost", f"That is what {played.optimizer.__name__} makes of it with its own defaults.",
                   lambda: played.plain(defaults={}), MAKE),
        *[Hypothesis("none-becomes-zero", f"That is what {by} makes of a parameter whose gradient is zero, not None.",
                     lambda those=those: played.plain(zeros=those), GRAD)
          for by, those in (("weight decay", range(len(SHAPES))), ("momentum", [PAUSED]))],
        Hypothesis("wrong-sharded-step", "It was frozen when the optimizer was made, and later steps left it where it started although it had gradients.",
                   lambda: played.without_late(right), MAKE),
        Hypothesis("wrong-sharded-step", "It was rounded to float32 on its way from its owner.",
                   lambda: Each([played.rounded(right, rank) for rank in ranks]), SEND),
        *(more or []),
    ]  # fmt: skip
    double = played.initial[0].dtype == torch.float64
    kind = "float64 parameters" if double else "parameters"
    what = f"With {world} ranks, [step][parameter] of the {kind}" if world > 1 else "With one rank, the parameter"
    grader.explain(what, played.seen, right, mistakes, otherwise="wrong-sharded-step", at=LOCAL,
                   tolerance=CLOSE_IN_DOUBLE if double else CLOSE)  # fmt: skip


# The checks ----------------------------------------------------------------------------------------------------------


def test_step(grader: Grader) -> None:
    """a step gives every rank the parameters that one optimizer for all of them would"""
    for world_size in WORLDS:
        played = main_run(grader, world_size)
        if not any(played.run.observed("optimizers")):
            said = "No optimizer of the class that was passed was made on any rank."
            grader.fail("optimizer-class-unused", said, at=MAKE)
        unsent = Hypothesis(
            "shard-not-sent",
            "Its gradient was zero in this step. Momentum moved it on its owner, and no other rank received it.",
            lambda played=played: Each(
                [played.without_zeroed(played.plain(), rank) for rank in range(played.world_size)]
            ),
            SEND,
        )
        judge_steps(grader, played, [unsent])


@pytest.mark.needs("test_step")
def test_equal(grader: Grader) -> None:
    """after a step the ranks have exactly the same parameters"""
    seen = main_run(grader).seen
    for rank in range(1, len(seen)):
        if apart := difference(seen[rank], seen[0], EXACT):
            said = (
                f"[step][parameter] {apart.path} is {apart.right!r} on rank 0 and {apart.seen!r} on rank {rank}. "
                "Both are nearly right, and they are not the same."
            )
            grader.fail("ranks-drift", said, of=[0, rank], at=SEND)


@pytest.mark.needs("test_step")
def test_state(grader: Grader) -> None:
    """each parameter's state is on exactly one rank"""
    for played in (main_run(grader, world_size) for world_size in WORLDS):
        for rank, state in enumerate(played.state):
            if state[-1]:
                said = f"Rank {rank} has {state[-1]} bytes of state for tensors that are none of the parameters."
                grader.fail("parameter-cut", said, of=[rank], at=MAKE)
        for number, shape in enumerate(SHAPES):
            having = [rank for rank in range(played.world_size) if played.owned(rank)[number]]
            if len(having) > 1:
                said = (
                    f"Right after an update, parameter {number}, of shape {tuple(shape)}, has state on {names(having)}. In all, "
                    f"the ranks have {sum(map(sum, played.state))} bytes of state; one optimizer for all parameters has "
                    f"{played.payload - 4 * SIZES[WITHOUT]}."
                )
                grader.fail("state-not-sharded", said, of=having, at=MAKE)
    shapes = [(8, 5), (6,), (4, 9), (3,)]
    played = Played(grader, "at once", 2, shapes, "Adagrad", lr=0.1)
    for number, shape in enumerate(shapes):
        if len(having := [rank for rank in range(2) if played.owned(rank)[number]]) > 1:
            said = (
                f"Adagrad makes its state in its __init__, not in the first step. After {STEPS} steps parameter {number}, of "
                f"shape {shape}, has state on {names(having)}."
            )
            grader.fail("state-not-sharded", said, of=having, at=MAKE)


@pytest.mark.needs("test_state")
def test_balance(grader: Grader) -> None:
    """no rank's part is larger than an even share and the largest parameter"""
    # In groups of one large and one small parameter, balanced each by itself, the large ones are all on one rank. And of
    # five large ones, two do not fit into an even share: ranks that are filled up to it leave three for the last rank.
    shapes = [(10, 12), (2,), (11, 11), (3,), (12, 10), (4,), (10, 11), (5,), (11, 10), (2,)]
    groups = [[n, n + 1] for n in range(0, len(shapes), 2)]
    grouped = Played(grader, "balance", 3, shapes, "AdamW", groups, [{} for _ in groups], lr=0.1)
    for played in (*(main_run(grader, world_size) for world_size in WORLDS), grouped):
        sizes, parts = [one.numel() for one in played.initial], played.parts
        share = sum(sizes) / played.world_size
        said = (
            f"The ranks own {', '.join(map(str, parts))} elements. An even share is {share:.0f}, and the largest parameter "
            f"has {max(sizes)}: no part may have more than {share + max(sizes):.0f}."
        )
        if played is grouped:
            said += f" The parameters were given in {len(played.groups)} groups."
        too_large = [rank for rank, part in enumerate(parts) if part > share + max(sizes)]
        grader.fail_on(too_large, "parts-unbalanced", said, at=OWNERS)


@pytest.mark.needs("test_step")
def test_sent_once(grader: Grader) -> None:
    """a step sends each parameter once"""
    played = main_run(grader)
    for step in range(STEPS):
        calls = [
            [call for call in played.run.collectives[rank] if start < call.number < end]
            for rank in range(played.world_size)
            for start, end in [_between(played.run, rank, step)]
        ]
        # A broadcast moves its tensor once, and all ranks name its size; a reduction moves it twice; in a gather each
        # rank names what it brings: its part, which may be made as long as the longest.
        sent, brought = 0, [0] * played.world_size
        for own in zip(*calls, strict=False):
            if own[0].kind == "broadcast":
                sent += own[0].nbytes
            elif "reduce" in own[0].kind:
                sent += 2 * own[0].nbytes
            else:
                brought = [so_far + call.nbytes for so_far, call in zip(brought, own, strict=True)]
        longest = 4 * (max(played.parts) + SIZES[WITHOUT])
        sent += min(sum(brought), played.payload) if max(brought) <= longest else sum(brought)
        if sent > 1.5 * played.payload:
            kinds = sorted({call.kind for own in calls for call in own})
            said = (
                f"Step {step} moved {sent} bytes through {', '.join(kinds)}; the parameters are {played.payload} bytes."
            )
            grader.fail("step-sends-too-much", said, at=SEND)


def _between(run: Run, rank: int, step: int) -> tuple[int, int]:
    starts, ends = ([one.number for one in run.ranks[rank].marks if one.name == name] for name in ("step", "end"))
    return starts[step], ends[step]


@pytest.mark.needs("test_step")
def test_zero_grad(grader: Grader) -> None:
    """zero_grad sets every gradient to None, also those of other ranks' parameters"""
    played = main_run(grader)
    for rank, steps in enumerate(played.run.observed("gradients left")):
        if left := steps[-1]:
            own = [number for number in left if played.owned(rank)[number]]
            whose = "some of them its own" if own else "all of them other ranks' parameters"
            said = f"After zero_grad {len(left)} parameters still have a gradient on rank {rank}, {whose}."
            grader.fail("gradients-left", said, of=[rank], at=ZERO)


@pytest.mark.needs("test_step")
def test_whole_parameters(grader: Grader) -> None:
    """an optimizer that looks at whole parameters gives the same result"""
    shapes = [(12, 10), (5, 9), (11, 3), (8, 8), (7,)]
    played = Played(grader, "whole", 2, shapes, "Adafactor", lr=0.02, weight_decay=0.1)
    right = played.plain()
    grader.explain(
        "With Adafactor, [step][parameter] of the parameters", played.seen, right,
        [Hypothesis("options-lost", "That is what Adafactor makes of it with its own defaults.", lambda: played.plain({}), MAKE)],
        otherwise="parameter-cut", at=OWNERS, tolerance=CLOSE,
    )  # fmt: skip


@pytest.mark.needs("test_step")
def test_groups(grader: Grader) -> None:
    """each parameter group keeps its own options"""
    shapes = [(6, 5), (7, 4), (8, 3), (5,), (4,), (3,)]
    groups, options = [[0, 1, 2], [3, 4, 5]], [{"weight_decay": 0.3}, {"lr": 0.2, "weight_decay": 0.0}]
    played = Played(grader, "groups", 2, shapes, "AdamW", groups, options, lr=0.02)
    lost = Hypothesis(
        "group-options-lost",
        "That is what the defaults make of it, without its group's options.",
        lambda: played.plain(grouped=False),
        GROUPS,
    )
    judge_steps(grader, played, [lost])


@pytest.mark.needs("test_groups")
def test_schedule(grader: Grader) -> None:
    """param_groups has every group on every rank, and a learning rate that is set there is used"""
    # The second group has one parameter: one of the two ranks owns nothing of it, and has the group all the same.
    groups, options = [[0, 1, 2, 3], [4]], [{}, {"lr": 0.25, "momentum": 0.5}]
    changes = [
        [{"lr": 0.05}, {"lr": 0.1}],
        [{"lr": 0.02}, {"lr": 0.01, "momentum": 0.9}],
        [{"lr": 0.4}, {"lr": 0.003, "momentum": 0.2}],
    ]
    shapes = [(6, 5), (7, 4), (8, 3), (5,), (4,)]
    played = Played(grader, "schedule", 2, shapes, "SGD", groups, options, changes, lr=0.05)
    for rank, seen in enumerate(played.run.observed("rates")):
        if seen != [0.05, 0.25]:
            said = f"The groups were made with lr 0.05 and 0.25. On rank {rank}, param_groups has {len(seen)} with lr {seen}."
            grader.fail("schedule-lost", said, of=[rank], at=GROUPS)
    lost = [
        Hypothesis("schedule-lost", says, lambda used=used: played.plain(scheduled=used), GROUPS)
        for says, used in (
            ("That is what the learning rate that it was made with gives.", ()),
            ("The learning rate that was set is used. The momentum that was set with it is not.", ("lr",)),
        )
    ]
    judge_steps(grader, played, lost)


@pytest.mark.needs("test_step")
def test_few_parameters(grader: Grader) -> None:
    """one parameter on three ranks, and on one"""
    for world_size in (3, 1):
        judge_steps(grader, Played(grader, "few", world_size, [(3, 2)], "AdamW", dtype=torch.float64, lr=0.1))
