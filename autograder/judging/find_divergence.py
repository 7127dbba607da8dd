"""What is changed on one rank or another, what is to be found then, and how a difference is said."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from lockstep.grading import Collective, Grader, Run, names

WORLD = 3  # with two ranks there is no majority

PARAMETERS = [
    "brief", "scale", "empty", "frozen", "unused", "encoder.weight", "encoder.bias", "norm.weight", "norm.bias",
    "decoder.weight",
]  # fmt: skip
BUFFERS = [
    "ids",
    "mask",
    "odd",
    "zeros",
    "precise",
    "plane",
    "norm.running_mean",
    "norm.running_var",
    "norm.num_batches_tracked",
]
FOREIGN = "param_groups[0].params[9]"  # of the optimizer, and not of the model

Change = dict[str, Any]


class Found(NamedTuple):
    """A difference as it was reported, or as it has to be."""

    kind: str
    name: str
    ranks: list[int]
    largest: float

    def __str__(self) -> str:
        return f"{self.kind} {self.name} on {names(self.ranks)}, by {self.largest:.4g}"

    @property
    def key(self) -> tuple[str, str]:
        """What names a tensor."""
        return self.kind, self.name

    @property
    def place(self) -> tuple[int, int]:
        """Where it comes in the list: by kind, and within it by the model's order; what is the optimizer's, in any order."""
        kinds = {"parameter": PARAMETERS, "buffer": BUFFERS, "gradient": PARAMETERS, "optimizer": []}
        return list(kinds).index(self.kind), kinds[self.kind].index(self.name) if kinds[self.kind] else 0


def found(run: Run) -> list[list[Found]]:
    """By rank, what one comparison has found."""
    return [read(one) for one in run.observed("found")]


def read(differences: list[list[Any]]) -> list[Found]:
    """A list of differences, as a rank observed it."""
    return [Found(*one) for one in differences]


def say(differences: Sequence[Found]) -> str:
    """A list of differences, in words."""
    more = f" and {len(differences) - 2} more" if len(differences) > 2 else ""
    return "; ".join(map(str, differences[:2])) + more if differences else "nothing"


def add(grader: Grader, rank: int, kind: str, name: str, size: int) -> tuple[Change, Found]:
    """Add a number to one element of this tensor on one rank; and what is to be found then."""
    random = grader.random(f"{rank} {kind} {name}")
    by = (random.choice((0.5, 0.75, 1.25)) + random.random() / 8) * (-1 if rank == 1 else 1)  # a missing abs() shows
    change = {"do": "add", "rank": rank, "kind": kind, "name": name, "at": random.randrange(size), "by": by}
    return change, Found(kind, name, [rank], abs(by))


def one_of_each_kind(grader: Grader) -> list[tuple[Change, Found]]:
    """What is not a parameter, changed on one rank each."""
    return [
        add(grader, 2, "buffer", "norm.running_mean", 3),
        add(grader, 1, "buffer", "precise", 3),
        add(grader, 1, "gradient", "decoder.weight", 12),
        add(grader, 2, "optimizer", "encoder.bias.exp_avg", 3),
        add(grader, 1, "optimizer", "scale.step", 1),
        add(grader, 2, "optimizer", "scale.turns", 1),
        add(grader, 1, "optimizer", f"{FOREIGN}.exp_avg", 3),
    ]


def compared(
    grader: Grader, case: str, changes: list[Change], *, world: int = WORLD, wrapped: bool = False, stepped: bool = True,
    **options: Any,
) -> Run:  # fmt: skip
    """Compare once, after these changes, of which each rank knows its own."""
    seed = grader.random("model").randrange(1 << 30)
    each = [{"changes": [one for one in changes if one["rank"] == rank]} for rank in range(world)]
    how = {"case": case, "seed": seed, "options": options, "wrapped": wrapped, "stepped": stepped}
    return grader.run("compares", world, each=each, **how)


def between(run: Run, rank: int, begin: str, end: str) -> list[Collective]:
    """What this rank sent between two marks."""
    report = run.ranks[rank]
    at = {mark.name: mark.number for mark in report.marks}
    return [call for call in report.collectives if at[begin] < call.number < at[end]]
