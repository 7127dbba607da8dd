"""A turn of a loop in which a rank did not make the call that the others made: seen in the loop's variable.

All that the ranks had called before was in equal turns. Then a call of one side, in the next turn, met one that the other
side made in a later turn of the same loop: it had come past the first without making it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .branches import in_words, loops_around
from .places import groups, part_of
from .rank_values import Source, TooLong
from .report import Collective, Frame, RankReport
from .skipped import Skip, may_skip, only_way

Calls = Mapping[int, Collective]
Turn = tuple[str, int]


def missed_turn(members: Sequence[RankReport]) -> tuple[Skip, dict[int, Collective]] | None:
    """The first such call of a group, and the calls that met there; None if it isn't certain."""
    for group in groups(members):
        last: dict[str, int] = {}
        alike: list[Calls] = []
        for number in sorted(set.intersection(*map(set, group.values()))):
            met = {rank: calls[number] for rank, calls in group.items()}
            if len({call.turn for call in met.values()}) > 1:
                if (sides := _sides(met)) and _is_missed(*sides, met, alike, last, group):
                    return _skip(*sides, met, len(members)), met
                break
            alike.append(met)
            if turn := _turn(next(iter(met.values()))):
                last |= [turn]
    return None


def _sides(met: Calls) -> tuple[list[int], list[int]] | None:
    """The ranks that made their call in the earlier turn and those in the later, each at one line of the same loop."""
    turns = {rank: _turn(call) for rank, call in met.items()}
    two = sorted({turn for turn in turns.values() if turn is not None})
    if None in turns.values() or len(two) != 2 or two[0][0] != two[1][0]:
        return None
    made, without = ([rank for rank in sorted(met) if turns[rank] == turn] for turn in two)
    chains = [{met[rank].chain for rank in ranks} for ranks in (made, without)]
    if any(len(some) > 1 or () in some for some in chains):
        return None
    one, other = (some.pop() for some in chains)
    return (made, without) if one[:-1] == other[:-1] and _in_one_loop(one[-1], other[-1]) else None


def _in_one_loop(one: Frame, other: Frame) -> bool:
    """Whether the innermost loop around both lines is the same."""
    try:
        tree = Source.of(one.file).tree
    except (SyntaxError, RecursionError, TooLong, ValueError):
        return False
    loops = loops_around(tree, one.line)
    return one.file == other.file and bool(loops) and loops == loops_around(tree, other.line)


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
    (variable, missed), (_, later) = _turn(call) or ("", 0), _turn(next_) or ("", 0)
    before = last.get(variable, later)
    follows = before <= missed <= before + 1 and variable in last
    if not follows and missed in (0, 1) and later <= before:
        # A loop begins. Its turns are the same on both sides if this one comes to that of the other.
        follows = any((one.turn, one.chain) == (next_.turn, next_.chain) for one in group[made[0]].values())
    turn_so_far = (met_.values() for met_ in alike if next(iter(met_.values())).turn == call.turn)
    return follows and all(len({one.chain for one in calls}) == 1 for calls in turn_so_far)


def _skip(made: list[int], without: list[int], met: Calls, size: int) -> Skip:
    call, next_ = met[made[0]], met[without[0]]
    at, went_on = call.chain[-1], next_.chain[-1]
    way = only_way(call, made, without)
    said = in_words(way, Source.of(at.file), past=True) if way else " ".join(may_skip(call))
    branch = Frame(at.file, way.node.lineno) if way else None
    most = 2 * len(made) >= len(met) if way and way.leaves else len(made) > len(without)
    variable, missed = _turn(call) or ("", 0)
    return Skip(call, part_of(call, size), made, without, said, branch, at, went_on, most, f"`{variable}` was {missed}")


def _turn(call: Collective) -> Turn | None:
    """The variable of the loop around the call, if it is a number, and what it was."""
    name, value = call.turn or ("", "")
    return (name, int(value)) if value.isdigit() else None
