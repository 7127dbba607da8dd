"""Where the ranks' code parted: the first call of a group that one rank made more, less or in place of another.

Where a hang stands is often far behind that: a collective that one rank made alone meets the next one of the others, and
as long as the two look alike, all go on, one call apart. What tells them from each other is the line that made each. Lines
may differ for good reasons (`if rank == 0:` sends, `else:` receives), so a difference counts only if the calls after it fit
better when one side is moved by a few.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from .mismatch import first_mismatch, signature
from .places import IN_DDP, groups, said_of
from .report import Collective, Frame, RankReport
from .words import at, names

FURTHEST = 64  # Calls by which a side may be moved: a rank that skips a step is as many behind as the step has calls
FIT = 0.8  # The share of the calls behind the difference that must fit then
COMPARED = 500

Site = tuple[object, ...]


@dataclass(frozen=True)
class Divergence:
    """The calls that met there, {rank: its call}, and the ranks that differ from most; nobody if there is no majority."""

    calls: dict[int, Collective]
    odd: list[int]
    by_callers: bool = False  # The lines of the calls are the same, but not what has called their functions

    @property
    def others(self) -> list[int]:
        """The ranks that are not odd; of two sides of which none is, all but the first."""
        return [rank for rank in sorted(self.calls) if rank not in (self.odd or self.first_side)]

    @property
    def first_side(self) -> list[int]:
        """The ranks that made the call of the lowest one, as far as its line tells."""
        key = _chain if self.by_callers else _site
        site = key(self.calls[min(self.calls)])
        return [rank for rank in sorted(self.calls) if key(self.calls[rank]) == site]

    @property
    def places(self) -> dict[int, Frame | None]:
        """Where each made its call, or, if that is one line, where the code that came to it parted."""
        came = _parting(self.calls) if self.by_callers else {}
        return {rank: came[rank][-1] if came.get(rank) else call.frame for rank, call in self.calls.items()}


def first_divergence(members: Sequence[RankReport]) -> Divergence | None:
    """Of a run that went wrong. None if all ranks made the same calls as far as each came."""
    met = first_mismatch(members)
    found = [Divergence(met, _odd(met, members, signature))] if met is not None else []
    for sequences in groups(members):
        for key in (_site, _chain):
            if (moved := _moved(sequences, key)) is not None:
                found.append(Divergence(moved, _odd(moved, members, key), by_callers=key is _chain))
    return min(found, key=lambda one: min(call.start for call in one.calls.values()), default=None)


def say(parted: Divergence) -> str:
    """Who called what where the others called something else, each line by itself."""
    odd = parted.odd or parted.first_side
    mine, others = _sides(parted, odd), _sides(parted, parted.others)
    heads = [
        f"{names(ranks)} called {called}{at(place) if not parted.odd or len(mine) > 1 else ''}"
        for (called, place), ranks in mine.items()
    ]
    tails = []
    for (called, place), ranks in others.items():
        if parted.calls[odd[0]].frame is not None and parted.calls[ranks[0]].frame is None:
            tails.append(f"{names(ranks)} had left your code")
        else:
            same = len(mine) == 1 and place is not None and called == next(iter(mine))[0]
            tails.append(f"{names(ranks)} called {'it' if same else called}{at(place)}")
    *first, last = tails
    return f"{', '.join(heads)} where {', '.join(first)}{' and ' if first else ''}{last}."


def _sides(parted: Divergence, ranks: Sequence[int]) -> dict[tuple[str, Frame | None], list[int]]:
    """These ranks by what each called, and where."""
    sides: dict[tuple[str, Frame | None], list[int]] = {}
    for rank in ranks:
        sides.setdefault((said_of(parted.calls[rank]), parted.places[rank]), []).append(rank)
    return sides


def reached(calls: Mapping[int, Collective]) -> list[str]:
    """How each side's code came to its call, if not directly: from where the sides parted, and through which libraries."""
    sides: dict[tuple[str, str, str], list[int]] = {}
    for rank, frames in _parting(calls).items():
        came = ", called ".join(f"from {frame.short} ({frame.text})" for frame in frames[1:])
        libraries = " and ".join(calls[rank].via)
        via = f"via {calls[rank].folded} frames of {libraries}" if libraries else ""
        sides.setdefault((came, via, libraries), []).append(rank)
    direct = sides.get(("", "", ""), [])
    if len(direct) == len(calls):
        return []
    if direct and not any(came for came, _, _ in sides):
        own = " and ".join(sorted({_maker(calls[rank]) for rank in direct}))
        made = [f"on {names(ranks)}, {by} made it" for (_, _, by), ranks in sides.items() if by]
        return [f"On {names(direct)}, {own} made the call; {'; '.join(made)}."]
    led = {side: ranks for side, ranks in sides.items() if any(side[:2])}
    first, *others = [f"{names(ranks)} {', '.join(filter(None, side[:2]))}" for side, ranks in led.items()]
    head = names(next(iter(led.values())))
    return [f"{head.capitalize()} reached the call{'; '.join([first.removeprefix(head), *others])}."]


def _maker(call: Collective) -> str:
    """Who made a call that no library lies before: the user's code, or DDP in a part of it."""
    return IN_DDP.get(call.inside) or {"": "your code", "backward": "DDP's backward"}.get(call.inside, call.inside)


def called_from(calls: Mapping[int, Collective]) -> tuple[Frame, ...]:
    """The places that `reached` names."""
    return tuple(frame for frames in _parting(calls).values() for frame in frames[1:])


def parted_at(calls: Mapping[int, Collective]) -> dict[int, list[Frame]]:
    """Where each stood in the function that all of them had called, and the calls below that to its own, the last."""
    return {rank: frames[::-1] for rank, frames in _parting(calls).items()}


def _parting(calls: Mapping[int, Collective]) -> dict[int, list[Frame]]:
    """The line of each call and its callers, the nearest first, but not those that all sides have in common."""
    chains = {rank: [frame for frame in (one.frame, *one.callers) if frame] for rank, one in calls.items()}
    outer = [chain[:0:-1] for chain in chains.values()]
    common = next(
        (n for n, ones in enumerate(zip(*outer, strict=False)) if len({*ones}) > 1), min(map(len, outer), default=0)
    )
    return {rank: chain[: len(chain) - common] for rank, chain in chains.items()}


def _odd(met: dict[int, Collective], members: Sequence[RankReport], key: Callable[[Collective], Site]) -> list[int]:
    """The ranks that differ from most. If that leaves it open, groups like theirs (the other rows of a mesh) decide."""
    seen = Counter(map(key, met.values()))
    if 2 * max(seen.values()) <= len(met):
        one = next(iter(met.values()))
        beside = [
            key(call)
            for report in members
            for call in report.collectives
            if call.group_number == one.group_number and len(call.members) == len(one.members)
            and not {*call.members} & {*one.members}
        ]  # fmt: skip
        seen.update(site for site in beside if site in seen)
    usual, count = seen.most_common(1)[0]
    return [rank for rank in sorted(met) if key(met[rank]) != usual] if 2 * count > sum(seen.values()) else []


def _moved(group: dict[int, dict[int, Collective]], key: Callable[[Collective], Site]) -> dict[int, Collective] | None:
    """The first number at which a side fits the other better when it is moved."""
    first = max(min(calls) for calls in group.values())
    last = max(max(calls) for calls in group.values())
    for number in range(first, last + 1):
        met = {rank: calls[number] for rank, calls in group.items() if number in calls}
        if len(met) < 2:
            return None
        sites = Counter(map(key, met.values()))
        if len(sites) == 1:
            continue
        usual = sites.most_common(1)[0][0]
        one = next(rank for rank in sorted(met) if key(met[rank]) == usual)
        odd = [rank for rank in sorted(met) if key(met[rank]) != usual]
        if any(_is_moved(_from(group[rank], number, key), _from(group[one], number, key)) for rank in odd):
            return met
    return None


def _from(calls: dict[int, Collective], number: int, key: Callable[[Collective], Site]) -> list[Site]:
    return [key(calls[n]) for n in range(number, min(number + COMPARED, max(calls) + 1)) if n in calls]


def _is_moved(one: list[Site], other: list[Site]) -> bool:
    """True when the two, which begin with different calls, fit if one of them is moved, and not as they stand."""
    as_they_stand = _fit(one[1:], other[1:])
    if as_they_stand >= FIT:
        return False
    further = range(1, FURTHEST + 1)
    moved = [_fit(one[by:], other) for by in further] + [_fit(one, other[by:]) for by in further]
    return max(moved) >= FIT


def _fit(one: list[Site], other: list[Site]) -> float:
    """The share of equal calls, as far as both go."""
    pairs = list(zip(one, other, strict=False))
    return sum(a == b for a, b in pairs) / len(pairs) if pairs else 0.0


def _site(call: Collective) -> Site:
    frame = call.frame
    return (call.kind, call.inside, frame.file, frame.line) if frame is not None else (call.kind, call.inside)


def _chain(call: Collective) -> Site:
    """Of a call in a function that several places use, the line alone tells nothing."""
    return (*_site(call), *call.callers)
