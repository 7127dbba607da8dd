"""Ranks that met in one collective with different things: another call, size, type or reduction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

from .places import groups, said_of
from .report import Cause, Collective, Kind, Outcome, RankReport, Topic, Waiting
from .skipped import may_skip
from .words import names, one_or_more

FREE_SIZES = (
    "scatter", "gather", "all_to_all", "all_to_all_single", "all_to_all_v_single", "all_gather_v", "reduce_scatter_v", "send",
    "recv", "monitored_barrier",
)  # fmt: skip
ROOTED = ("broadcast", "reduce", "gather", "scatter")
"""Collectives with one rank that all name: the one that has the data, or gets them."""
SAME_ROOT = "Ranks must name the same source (src) or destination (dst)."
SAME_OP = "Ranks must reduce by the same operation (op=)."
SAME_TENSORS = "Ranks must call the same collective with tensors of the same size and type."
SKIPPED = (
    "Calls meet in the order in which each rank makes them. If these two don't belong together, a rank makes its calls in another "
    "order, has skipped one, or made one too many."
)
OTHER_ORDER = "If both tensors are right, a rank makes its calls in another order or skips one: order alone decides which calls meet."

MISMATCHED = (SAME_ROOT, SAME_OP, SAME_TENSORS, SKIPPED, OTHER_ORDER)


def first_mismatch(ranks: Sequence[RankReport]) -> dict[int, Collective] | None:
    """The first collective in which two ranks met with different calls, roots, sizes, types or reductions: {rank: its call}.

    Not all of these fail by themselves. gloo mixes unrelated tensors of equal size without a word.
    """
    found = [
        met
        for group in groups(ranks)
        for number in sorted(set().union(*group.values()))
        for met in [{rank: calls[number] for rank, calls in group.items() if number in calls}]
        if len({signature(collective) for collective in met.values()}) > 1
    ]
    return min(found, key=lambda met: min(collective.start for collective in met.values()), default=None)


def signature(collective: Collective) -> tuple[object, ...]:
    """What has to be equal on all ranks."""
    sized = collective.kind not in FREE_SIZES
    return (
        collective.kind,
        collective.nbytes if sized else None,
        collective.dtype if sized else None,
        collective.reduce_op,
        collective.peer if collective.kind in ROOTED else None,
    )


def kinds_of(found: dict[int, Collective]) -> set[str]:
    """Of the calls that met."""
    return {call.kind for call in found.values()}


def odd_ones(found: dict[int, Collective]) -> list[int]:
    """The ranks that differ from most; nobody if no call is that of most: of two, only their author knows which is wrong."""
    return apart_from_most({rank: signature(call) for rank, call in found.items()})


def apart_from_most(values: Mapping[int, Hashable]) -> list[int]:
    """The ranks whose value is not that of most; nobody if no value is that of most."""
    usual, count = Counter(values.values()).most_common(1)[0]
    return [rank for rank in sorted(values) if values[rank] != usual] if 2 * count > len(values) else []


def two_sides(found: dict[int, Collective]) -> tuple[Collective, Collective]:
    """A call that differs from most, or from that of the lowest rank, and one that it differs from."""
    odd = odd_ones(found)
    other = found[min(rank for rank in found if rank not in odd)]
    mine = next(found[rank] for rank in odd or sorted(found) if signature(found[rank]) != signature(other))
    return mine, other


def say_mismatch(found: dict[int, Collective]) -> str:
    """Who passed what, without a full stop."""
    mine, theirs = two_sides(found)
    these, those = (
        [rank for rank, one in found.items() if signature(one) == signature(side)] for side in (mine, theirs)
    )
    who, whom = names(these), names(those)
    if mine.kind != theirs.kind:
        return f"{who} called {mine.title} where {whom} called {theirs.title}"
    if mine.kind in ROOTED and mine.peer != theirs.peer:
        roots = {
            one.named: [rank for rank, its in sorted(found.items()) if its.named == one.named] for one in found.values()
        }
        if len(roots) > 2:
            said = ", ".join(
                f"{names(ranks)} {one_or_more(ranks, 'names', 'name')} rank {root}" for root, ranks in roots.items()
            )
            return f"in {mine.title}, the ranks name different roots: {said}"
        name = one_or_more(these, "names", "name"), one_or_more(those, "names", "name")
        return (
            f"in {mine.title}, {who} {name[0]} rank {mine.named} as the root, and {whom} {name[1]} rank {theirs.named}"
        )
    if mine.reduce_op != theirs.reduce_op and mine.tensor == theirs.tensor:
        return f"in {mine.title}, {who} {one_or_more(these, 'reduces', 'reduce')} by {mine.reduce_op}, {whom} by {theirs.reduce_op}"
    return f"in {mine.title}, {who} passed {mine.tensor}, and {whom} passed {theirs.tensor}"


def rules(found: dict[int, Collective]) -> list[str]:
    """What the ranks have to keep to, and did not; where they called from different lines, why these calls met."""
    mine, theirs = two_sides(found)
    other_root = mine.kind == theirs.kind and mine.kind in ROOTED and mine.peer != theirs.peer
    other_op = mine.reduce_op != theirs.reduce_op and mine.tensor == theirs.tensor
    said = [SAME_ROOT if other_root else SAME_OP if other_op else SAME_TENSORS]
    if mine.frame is None or theirs.frame is None:
        return said
    if mine.frame.short == theirs.frame.short and mine.tensor != theirs.tensor and not other_root:
        said += [*_turns(found), OTHER_ORDER, *may_skip(mine)]
    elif mine.frame.short != theirs.frame.short:
        said.append(SKIPPED)
    return said


def _turns(found: Mapping[int, Collective]) -> list[str]:
    """If the ranks were in different turns of the loop around the call: what its variable was on each."""
    was: dict[str, list[int]] = {}
    variables = {call.turn[0] if call.turn else "" for call in found.values()}
    for rank, call in sorted(found.items()):
        was.setdefault(call.turn[1] if call.turn else "", []).append(rank)
    if len(variables) > 1 or "" in variables or len(was) == 1:
        return []
    each = [f"{value} on {names(ranks)}" for value, ranks in was.items()]
    return [f"At this call `{variables.pop()}` was {', '.join(each[:-1])} and {each[-1]}."]


def mismatch_rows(found: dict[int, Collective], differs: Sequence[int]) -> tuple[Waiting, ...]:
    """What each rank passed; `differs` are those to point at."""
    return tuple(
        Waiting(rank, said_of(one), one.tensor, None, one.frame, rank in differs, waits=False, called=True)
        for rank, one in sorted(found.items())
    )


def mismatch_cause(found: dict[int, Collective], ranks: Sequence[RankReport], odd: Sequence[int]) -> Cause:
    """For a run that failed by it; `odd` are those that differ from most."""
    notes = rules(found)
    if any(report.outcome is Outcome.CRASHED for report in ranks):
        notes.append("gloo cannot match them and ends the process: no Python error, exit by SIGABRT.")
    rows, frame = mismatch_rows(found, odd), found[odd[0]].frame if odd else two_sides(found)[0].frame
    at_fault = tuple(odd or sorted(found))
    return Cause(Kind.MISMATCH, f"{say_mismatch(found)}.", at_fault, frame, rows, tuple(notes), topic=Topic.MISMATCHES)
