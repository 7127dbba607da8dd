"""A turn of a loop in which a rank did not make the call that the others made: seen in the loop's variable.

All that the ranks had called before was in equal turns. Then a call of one side, in the next turn, met one that the other
side made in a later turn of the same loop: it had come past the first without making it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile

from .branches import in_words, loops_around, shared
from .places import groups, part_of
from .rank_values import Source, TooLong
from .report import Collective, Frame, RankReport
from .skipped import Skip, may_skip, number_of_turn, only_way

Calls = Mapping[int, Collective]


def missed_turn(members: Sequence[RankReport]) -> tuple[Skip, dict[int, Collective]] | None:
    """The first such call of a group, and the calls that met there; None if it isn't certain."""
    for group in groups(members):
        last: dict[str, int] = {}
        alike: list[Calls] = []
        for number in sorted(set.intersection(*map(set, group.values()))):
            met = {rank: calls[number] for rank, calls in group.items()}
            if len({call.turn for call in met.values()}) > 1:
                if (sides := _sides(met)) and _is_missed(*sides[:2], met, alike, last, group):
                    return _skip(*sides, met, len(members)), met
                break
            alike.append(met)
            if turn := number_of_turn(next(iter(met.values()))):
                last |= [turn]
    return None


def _sides(met: Calls) -> tuple[list[int], list[int], int] | None:
    """The ranks that made their call in the earlier turn and those in the later, each at one line; the level of the loop."""
    turns = {rank: number_of_turn(call) for rank, call in met.items()}
    two = sorted({turn for turn in turns.values() if turn is not None})
    if None in turns.values() or len(two) != 2 or two[0][0] != two[1][0]:
        return None
    made, without = ([rank for rank in sorted(met) if turns[rank] == turn] for turn in two)
    chains = [{met[rank].chain for rank in ranks} for ranks in (made, without)]
    if any(len(some) > 1 or () in some for some in chains):
        return None
    level = _level(*(some.pop() for some in chains))
    return None if level is None else (made, without, level)


def _level(one: Sequence[Frame], other: Sequence[Frame]) -> int | None:
    """Where in two chains of calls the loop is that is around both, and nothing below is in one of its own."""
    for level in range(min(shared(one, other), len(one) - 1, len(other) - 1), -1, -1):
        loops = _loops(one[level])
        if loops and loops == _loops(other[level]):
            below = (*one[level + 1 :], *other[level + 1 :])
            return None if any(_loops(frame) != [] for frame in below) else level
    return None


def _loops(frame: Frame) -> list[tuple[str, int]] | None:
    """Where the loops around a line begin; None if its file can't be read."""
    try:
        return [(frame.file, loop.lineno) for loop in loops_around(Source.of(frame.file).tree, frame.line)]
    except (SyntaxError, RecursionError, TooLong, ValueError):
        return None


def _is_missed(
    made: Sequence[int],
    without: Sequence[int],
    met: Calls,
    alike: Sequence[Calls],
    last: Mapping[str, int],
    group: Mapping[int, Calls],
) -> bool:
    """Whether those `without` a call were in the turn of those that `made` it, and the call was due there."""
    call, next_ = met[made[0]], met[without[0]]
    (variable, missed), (_, later) = number_of_turn(call) or ("", 0), number_of_turn(next_) or ("", 0)
    before = last.get(variable, later)
    follows = before <= missed <= before + 1 and variable in last
    if not follows and missed in (0, 1) and later <= before:
        # A loop begins. Its turns are the same on both sides if this one comes to that of the other.
        follows = any((one.turn, one.chain) == (next_.turn, next_.chain) for one in group[made[0]].values())
    turn = takewhile(lambda calls: calls[made[0]].turn == call.turn, reversed(alike))
    so_far = [{one.chain for one in calls.values()} for calls in turn]
    # The same call again in one turn is a new beginning of the loop.
    return follows and {call.chain} not in so_far and all(len(chains) == 1 for chains in so_far)


def _skip(made: list[int], without: list[int], level: int, met: Calls, size: int) -> Skip:
    call, next_ = met[made[0]], met[without[0]]
    at, went_on = call.chain[level], next_.chain[level]
    way = only_way(call, level, made, without)
    said, branch = " ".join(may_skip(call)), None
    most = len(made) > len(without)
    if way:
        found, branch = way
        said = in_words(found, Source.of(branch.file), past=True)
        most = 2 * len(made) >= len(met) if found.leaves else most
    variable, missed = number_of_turn(call) or ("", 0)
    return Skip(call, part_of(call, size), made, without, said, branch, at, went_on, most, f"`{variable}` was {missed}")
