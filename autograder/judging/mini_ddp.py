"""What DDP's gradients are, computed here, and what a rank of `MiniDDP` did between two marks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.nn.functional import cross_entropy, linear

from lockstep.grading import Collective, Each, Grader, Hypothesis, Mark, Run, Tolerance, equal

WORLD, STEPS, BATCH = 2, 4, 6  # two ranks: a + b is b + a to the last bit, in whichever order and bucket
CAP = 0.002  # MiB: several buckets, and the huge parameter has more
FLAGS = 256  # bytes: a collective this small exchanges flags, not gradients
ASKS = ("wait", "asks")  # marks of a call that waits for a collective, or that asks for its future or its state

Tensors = dict[str, torch.Tensor]
Step = dict[str, Tensors]
PARAMETERS = {
    "embedding.weight": (11, 6), "never.weight": (2, 6), "never.bias": (2,), "huge.weight": (300, 6), "huge.bias": (300,),
    "back.weight": (6, 300), "back.bias": (6,), "frozen.weight": (6, 6), "frozen.bias": (6,), "side.weight": (6, 6),
    "side.bias": (6,),
}  # fmt: skip
LARGE = 4 * 300 * 6  # bytes of the largest parameter, above the cap
FROZEN = {name for name in PARAMETERS if name.startswith("frozen.")}
BUFFERS = {"offset", "unsaved", "count"}


@dataclass(frozen=True)
class Trained:
    """A run beside DDP, and what each rank was given: its weights, its batches `tokens[step, rank]`, and whether it
    went through the side branch, `sides[step][rank]`.
    """

    run: Run
    initial: list[Tensors]
    tokens: torch.Tensor
    sides: list[list[bool]]
    micro: int

    @cached_property
    def steps(self) -> list[list[Step]]:
        """By step and rank, the gradients that were seen. Raises ValueError when those of DDP, which runs on the
        ranks, are not what DDP gives: then somebody has had a hand in it.
        """
        found: list[list[Step]] = [list(step) for step in zip(*self.run.observed("gradients"), strict=True)]
        for step, wanted in enumerate(self._replayed()):
            for rank, seen in enumerate(found[step]):
                theirs = seen["theirs"]
                if set(theirs) != set(wanted) or not all(
                    equal(theirs[name], one, Tolerance(0.0, 1e-6 + 1e-4 * float(one.abs().max())))
                    for name, one in wanted.items()
                ):
                    raise ValueError(
                        f"in step {step} torch's own DDP, which trains beside MiniDDP, did not get the mean over the ranks on "
                        f"rank {rank}: something reached into it"
                    )
        return found

    def _replayed(self) -> Iterator[Tensors]:
        """DDP's gradients in each step: the mean over the ranks of what each has, from rank 0's weights."""
        weights = {name: value.double() for name, value in self.initial[0].items()}
        learned = [name for name in PARAMETERS if name not in FROZEN]
        momentum: Tensors = {}
        for tokens, sides in zip(self.tokens, self.sides, strict=True):
            own = {name: weights[name].clone().requires_grad_() for name in learned}
            losses = [
                loss_of(weights | own, piece, side)
                for batch, side in zip(tokens, sides, strict=True)
                for piece in batch.chunk(self.micro)
            ]
            total = torch.stack(losses).sum() / len(sides)
            gradients = torch.autograd.grad(total, list(own.values()), allow_unused=True)
            mean = {name: one for name, one in zip(learned, gradients, strict=True) if one is not None}
            yield mean
            for name, gradient in mean.items():
                momentum[name] = gradient + 0.9 * momentum[name] if name in momentum else gradient
                weights[name] = weights[name] - 0.1 * momentum[name]


def loss_of(weights: Tensors, tokens: torch.Tensor, side: bool) -> torch.Tensor:
    """The loss of one micro-batch, as the scenario's model has it."""
    layer = lambda name, x: linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])  # noqa: E731
    x = weights["embedding.weight"][tokens] * weights["unsaved"] + weights["offset"]
    x = layer("frozen", x + layer("back", torch.tanh(layer("huge", x))))
    return cross_entropy((x + layer("side", x) if side else x) @ weights["embedding.weight"].T, tokens.flip(0))


def inputs(grader: Grader, purpose: str, steps: int) -> tuple[list[Tensors], torch.Tensor]:
    """Each rank's initial values, and the batches `tokens[step, rank]`."""
    generator = grader.generator(purpose)
    tokens = torch.randint(0, 11, (steps, WORLD, BATCH), generator=generator)
    initial: list[Tensors] = []
    for rank in range(WORLD):
        parameters = {
            name: torch.randn(shape, generator=generator) / (2 * shape[-1] ** 0.5) for name, shape in PARAMETERS.items()
        }
        offset, unsaved = torch.randn(6, generator=generator), torch.rand(6, generator=generator) + 0.5
        count = torch.tensor(2**40 + 1 + rank)  # no float32 can hold it
        initial.append(parameters | {"offset": offset, "unsaved": unsaved, "count": count})
    return initial, tokens


def train(grader: Grader, purpose: str, sides: list[list[bool]], micro: int = 1, *, idle: bool = False) -> Trained:
    """Train beside DDP; `sides[step][rank]` says who goes through the side branch, `idle` makes `never` trainable."""
    initial, tokens = inputs(grader, purpose, len(sides))
    each = [
        {"initial": own, "tokens": tokens[:, rank], "sides": [step[rank] for step in sides]}
        for rank, own in enumerate(initial)
    ]
    run = grader.run("trains", WORLD, each=each, cap=CAP, micro=micro, idle=idle)
    return Trained(run, initial, tokens, sides, micro)


def events(run: Run, rank: int, ending: str = "finished", step: int = -1) -> list[Mark | Collective]:
    """What a rank did until the mark `ending` of this step (the last one), from the mark `backward` before it, in order."""
    report = run.ranks[rank]
    end = sorted(mark.number for mark in report.marks if mark.name == ending)[step]
    begin = max(mark.number for mark in report.marks if mark.name == "backward" and mark.number < end)
    both: list[Mark | Collective] = [*report.marks, *report.collectives]
    return sorted((event for event in both if begin <= event.number <= end), key=lambda event: event.number)


def name_of(event: Mark | Collective) -> str:
    """A mark's name; empty for a collective."""
    return event.name if isinstance(event, Mark) else ""


def sent(seen: list[Mark | Collective], least: int = FLAGS) -> list[Collective]:
    """The collectives that carry gradients: those of more than `least` bytes."""
    return [one for one in seen if isinstance(one, Collective) and one.kind != "broadcast" and one.nbytes > least]


def judge_waits(grader: Grader, run: Run, steps: int, at: str) -> None:
    """Whatever a rank launches it waits for: else its results are right by luck."""
    for step in range(steps):
        for rank in range(WORLD):
            seen = events(run, rank, step=step)
            launched, asked = len(sent(seen, least=0)), sum(name_of(one) in ASKS for one in seen)
            said = (
                f"In step {step} rank {rank} launched {launched} all-reduces and had waited for {asked} when "
                "finish_gradient_synchronization returned. The gradient it read may be its own share or a partial sum."
            )
            grader.fail_on([rank] * (asked < launched), "never-waits", said, at=at)


def judge_launches(grader: Grader, run: Run, step: int, when: str, id: str, at: str) -> None:
    """Every all-reduce of this backward, in which all gradients become ready, is launched before it returns."""
    for rank in range(WORLD):
        early, every = (len(sent(events(run, rank, ending, step))) for ending in ("backward done", "finished"))
        said = (
            f"{when} rank {rank} launched {early} of its {every} all-reduces. It left {every - early} to "
            "finish_gradient_synchronization, although all gradients were ready."
        )
        said = said if every else f"{when} rank {rank} launched no all-reduce at all."
        grader.fail_on([rank] * (early < every or not every), id, said, at=at)


def judge_three_ranks(grader: Grader, at: str, second: bool = False) -> None:
    """The mean on three ranks, whose number isn't that of the other checks; or that of a second backward."""
    own = [torch.full((3,), slope, dtype=torch.float64) for slope in (3.0, 6.0, 9.0)]
    run = grader.run("slopes", 3, each=[{"slope": float(one[0])} for one in own], dtype="float64")
    what = "Three ranks had gradients of 3, 6 and 9. The mean"
    mistake = Hypothesis("wrong-mean", "That is the sum divided by 2.", own[2])
    if second:
        what += " after zero_grad and a second backward from the same forward"
        says = "It is that rank's own gradient: this backward was not exchanged. Start a round in backward, not in forward."
        mistake = Hypothesis("not-averaged", says, Each(own))
    seen = run.observed("again" if second else "gradient")
    grader.explain(what, seen, own[1], [mistake], otherwise="wrong-mean", at=at)
