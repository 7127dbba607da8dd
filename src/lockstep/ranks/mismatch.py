"""Ranks that met in one collective with different things: another call, size, type or reduction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from .report import Cause, Collective, Kind, Outcome, RankReport, Topic, Waiting

FREE_SIZES = (
    "scatter", "gather", "all_to_all", "all_to_all_single", "all_to_all_v_single", "all_gather_v", "reduce_scatter_v", "send",
    "recv", "monitored_barrier",
)  # fmt: skip
SAME_TENSORS = "Ranks must call the same collective with tensors of the same size and type."


def first_mismatch(ranks: Sequence[RankReport]) -> dict[int, Collective] | None:
    """The first collective in which two ranks met with different calls, sizes, types or reductions: {rank: its call}.

    Not all of these fail by themselves. gloo mixes unrelated tensors of equal size without a word.
    """
    groups: dict[tuple[str, tuple[int, ...]], dict[int, dict[int, Collective]]] = {}
    for report in ranks:
        for collective in report.collectives:
            if collective.is_point_to_point or not _meets_others(collective):
                continue
            numbered = groups.setdefault((collective.group, collective.members), {})
            numbered.setdefault(collective.group_number, {})[report.rank] = collective
    found = [
        met
        for numbered in groups.values()
        for number, met in sorted(numbered.items())
        if len(met) > 1 and len({_signature(collective) for collective in met.values()}) > 1
    ]
    return min(found, key=lambda met: min(collective.start for collective in met.values()), default=None)


def _meets_others(collective: Collective) -> bool:
    """False for a rank that has made a group of its own: no other rank is in it."""
    return not collective.members or (len(collective.members) > 1 and collective.rank in collective.members)


def _signature(collective: Collective) -> tuple[object, ...]:
    sized = collective.kind not in FREE_SIZES
    return (
        collective.kind,
        collective.nbytes if sized else None,
        collective.dtype if sized else None,
        collective.reduce_op,
    )


def odd_ones(found: dict[int, Collective]) -> list[int]:
    """The ranks that differ from most."""
    ranks = sorted(found)
    usual = Counter(_signature(found[rank]) for rank in ranks).most_common(1)[0][0]
    return [rank for rank in ranks if _signature(found[rank]) != usual] or ranks[:1]


def say_mismatch(found: dict[int, Collective]) -> str:
    """Who brought what, without a full stop."""
    odd = odd_ones(found)
    other = next(rank for rank in sorted(found) if rank not in odd)
    mine, theirs = found[odd[0]], found[other]
    if mine.kind != theirs.kind:
        return f"rank {odd[0]} called {mine.title} where rank {other} called {theirs.title}"
    if mine.reduce_op != theirs.reduce_op and mine.tensor == theirs.tensor:
        return f"in {mine.title} rank {odd[0]} reduces by {mine.reduce_op}, rank {other} by {theirs.reduce_op}"
    return f"in {mine.title} rank {odd[0]} brought {mine.tensor}, rank {other} {theirs.tensor}"


def mismatch_rows(found: dict[int, Collective], differs: Sequence[int]) -> tuple[Waiting, ...]:
    """What each rank brought; `differs` are those to point at."""
    return tuple(
        Waiting(rank, one.title, one.tensor, None, one.frame, rank in differs) for rank, one in sorted(found.items())
    )


def mismatch_cause(found: dict[int, Collective], ranks: Sequence[RankReport]) -> Cause:
    """For a run that failed by it."""
    odd = odd_ones(found)
    notes = [SAME_TENSORS]
    if any(report.outcome is Outcome.CRASHED for report in ranks):
        notes.append("gloo cannot match them and ends the process: no Python error, exit by SIGABRT.")
    rows, frame = mismatch_rows(found, odd), found[odd[0]].frame
    return Cause(Kind.MISMATCH, f"{say_mismatch(found)}.", tuple(odd), frame, rows, tuple(notes), topic=Topic.HANGS)
