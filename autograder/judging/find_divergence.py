"""What is changed on one rank or another, what is to be found then, and how that is judged and said."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from lockstep.grading import Collective, Grader, Run, names

WORLD = 3  # with two ranks there is no majority

PARAMETERS = [
    "brief", "scale", "empty", "frozen", "unused", "encoder.weight", "encoder.bias", "norm.weight", "norm.bias",
    "decoder.weight", "module.weight",
]  # fmt: skip
BUFFERS = [
    "ids", "places", "codes", "mask", "odd", "zeros", "precise", "plane", "norm.running_mean", "norm.running_var",
    "norm.num_batches_tracked",
]  # fmt: skip
FOREIGN = "param_groups[1].params[1]"  # of the optimizer, and not of the model

FUNCTION = r"def find_divergence"
CHECKSUM = r"def _?\w*(checksum|fingerprint|digest|hash) || checksum || sum\( || " + FUNCTION
WALK = r"named_parameters || parameters\( || " + FUNCTION
GRADIENTS = r"\.grad\b || " + FUNCTION
STATE = r"\.state\b || optimizer is || " + FUNCTION
MAJORITY = r"Counter\(|\.count\(|most_common || == 0 || \[0\] || " + FUNCTION
LARGEST = r"\babs\( || \.max\(\) || largest = || " + FUNCTION
ON_ONE_RANK = r"get_rank\(\) == 0|rank == 0|rank != 0|get_rank\(\) != 0|if rank || get_rank || " + FUNCTION

MISSED = {
    "parameter": ("parameters-not-compared", WALK),
    "buffer": ("buffers-not-compared", r"named_buffers || buffers\( || " + WALK),
    "gradient": ("gradients-not-compared", GRADIENTS),
    "optimizer": ("optimizer-not-compared", STATE),
}
"""What it usually means that nothing was found, by the kind of what was changed."""

Missed = tuple[str, str, str]
"""What it means that a difference was not found, where to look, and what was changed."""

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
        """Where it comes in the list: by kind; parameters and buffers in the model's order, the others in any order."""
        kinds = {"parameter": PARAMETERS, "buffer": BUFFERS, "gradient": [], "optimizer": []}
        return list(kinds).index(self.kind), kinds[self.kind].index(self.name) if kinds[self.kind] else 0


def found(run: Run) -> list[list[Found]]:
    """By rank, what one comparison has found."""
    return [read(one) for one in run.observed("found")]


def read(differences: list[list[Any]]) -> list[Found]:
    """A list of differences, as a rank observed it."""
    return [Found(*one) for one in differences]


def without_amount(each: list[list[Found]], name: str) -> list[list[Found]]:
    """The same, and of one tensor it does not matter how far apart its elements are."""
    return [[one._replace(largest=0.0) if one.name == name else one for one in own] for own in each]


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
        add(grader, 2, "gradient", "frozen", 6),
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


def watched(grader: Grader, changes: dict[str, Change], every: int, steps: int, **options: Any) -> Run:
    """So many steps, with these changes after the steps of their numbers, of which each rank knows its own."""
    each = [{"changes": {n: one for n, one in changes.items() if one["rank"] == rank}} for rank in range(WORLD)]
    seed = grader.random("model").randrange(1 << 30)
    return grader.run("watches", WORLD, each=each, seed=seed, every=every, steps=steps, options=options)


def between(run: Run, rank: int, begin: str, end: str) -> list[Collective]:
    """What this rank sent between two marks."""
    report = run.ranks[rank]
    at = {mark.name: mark.number for mark in report.marks}
    return [call for call in report.collectives if at[begin] < call.number < at[end]]


def judge(grader: Grader, each: list[list[Found]], expected: list[Found], missed: Missed | None = None) -> None:
    """All ranks must have found this and nothing else, each with its ranks and how far they are from the others."""
    judge_agreement(grader, each)
    lost, at, why = missed or ("", "", "There is a difference")
    seen = {one.key: one for one in each[0]}
    right, told = {want.key: want for want in expected}, set()
    for want in (want for want in expected if want.key not in seen):
        wrapper = next((name for _, name in seen if name.endswith(f".{want.name}")), None)
        if wrapper is not None:
            said = f"{want.name} was reported as {wrapper}: the name that it has inside DDP."
            grader.fail("wrapper-in-names", said, at=r"\.module || " + WALK)
        bare = want.name.removeprefix("module.")
        if bare != want.name and (want.kind, bare) in seen:
            said = f"{want.name} was reported as {bare}. One of the model's submodules is named `module`; only the `module.` of a DDP wrapper is left out."
            grader.fail("other-names", said, at=r"\bmodule\b || " + WALK)
        spare = [
            one for one in each[0] if one.key not in right and (one.kind, one.ranks) == (want.kind, want.ranks)
            and math.isclose(one.largest, want.largest, rel_tol=1e-3)
        ]  # fmt: skip
        if spare and missed is None:
            said = f"{want.name} ({want.kind}) differs on {names(want.ranks)}, and was reported as {spare[0].name}."
            grader.fail("other-names", said, of=want.ranks, at=WALK)
        lost, at = (lost, at) if missed else MISSED[want.kind]
        if want.name == "frozen":
            why = "A frozen parameter is compared, too, and so is its gradient"
        grader.fail(lost, f"{why}: {want}. Found: {say(each[0])}.", of=want.ranks, at=at)
    for one in each[0]:
        what = f"{one.name} ({one.kind})"
        if one.key not in right:
            said = f"All ranks agree on {what}, and it was reported: {one}."
            grader.fail("false-alarm", said, at=CHECKSUM)
        if one.key in told:
            grader.fail("false-alarm", f"{what} was reported more than once.", at=WALK)
        told.add(one.key)
    for key, want in right.items():
        one, of = seen[key], want.ranks
        others = [rank for rank in range(len(each)) if rank not in one.ranks]
        close = one.largest == want.largest or math.isclose(one.largest, want.largest, rel_tol=1e-3)
        no_number = math.isinf(want.largest) and not math.isinf(one.largest)
        blamed = f"{want.name} differs on {names(of)} from what the others have; the report blames {names(one.ranks)}."
        amount = (
            f"{want.name} differs by {want.largest:.6g} at most, on {names(of)}; the report says {one.largest:.6g}."
        )
        for is_so, id, said, place in (
            (one.ranks != of and others == of and 0 in others, "blames-the-majority", blamed, MAJORITY),
            (one.ranks != of, "wrong-ranks", blamed, MAJORITY),
            (missed and no_number, lost, f"{why}: {want}. Found: {one}.", at),
            (not close, "wrong-amount", amount, LARGEST),
        ):
            grader.fail_on(of if is_so else [], id, said, at=place)
    order = sorted(each[0], key=lambda one: one.place)
    if order != each[0]:
        first, second = next(pair for pair in zip(order, each[0], strict=True) if pair[0] != pair[1])
        said = f"{first.name} ({first.kind}) comes before {second.name} ({second.kind}), and was reported after it."
        grader.fail("order-of-the-list", said, at=r"sort || " + WALK)


def judge_changes(
    grader: Grader, case: str, pairs: list[tuple[Change, Found]], missed: Missed | None = None, **how: Any
) -> None:
    """After these changes, all ranks must have found what belongs to them."""
    run = compared(grader, case, [change for change, _ in pairs], **how)
    judge(grader, found(run), [expected for _, expected in pairs], missed)


def judge_agreement(grader: Grader, each: list[list[Found]]) -> None:
    """All ranks must have been told the same."""
    longest = max(range(len(each)), key=lambda rank: len(each[rank]))
    other = [rank for rank, own in enumerate(each) if repr(own) != repr(each[longest])][:1]
    said = "".join(f"Rank {rank} was told: {say(each[rank])}. " for rank in (longest, *other))
    said += "All ranks should get the same list, so that all can stop, or continue, together."
    grader.fail_on(other, "only-some-ranks-know", said, at=ON_ONE_RANK)
