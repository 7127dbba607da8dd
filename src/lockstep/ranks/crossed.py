"""Two collectives that ranks of a run called in opposite order, with tensors that look alike: nothing fails, and each
combines both.

Lines that differ prove nothing: `if rank == src: broadcast(mine, src)`, `else: broadcast(theirs, src)` is right, and so is a
rank that contributes zeros when it has no batch. Two calls count as crossed only if each side made them one after the other
in straight code of one function, in the same words, the one side as X, Y and the other as Y, X, and if the words mean the same
tensors on every rank.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from .branches import branch, scopes, shared, stands
from .divergence import groups
from .mismatch import ROOTED, signature
from .rank_values import Function, Scope, Source, TooLong
from .report import Collective, Frame, RankReport
from .words import names

Pair = tuple[Collective, Collective]


@dataclass(frozen=True)
class Crossed:
    """What met: two calls of each rank in its own order, and how the lowest rank and those like it wrote them."""

    calls: Mapping[int, Pair]
    side: list[int]
    words: str

    @property
    def met(self) -> dict[int, Collective]:
        """What each rank brought to the first of the two."""
        return {rank: pair[0] for rank, pair in self.calls.items()}

    @property
    def places(self) -> dict[int, Frame | None]:
        """Where the code of each called the first of the two; of calls within helpers, where it called the helper."""
        chains = {rank: [call.chain for call in pair] for rank, pair in self.calls.items()}
        return {rank: mine[0][min(shared(*mine), len(mine[0]) - 1)] for rank, mine in chains.items()}

    def say(self) -> str:
        """Who called what before what."""
        others = [rank for rank in self.calls if rank not in self.side]
        return f"{names(self.side)} called {self.words}, {names(others)} in the opposite order"

    def why(self, size: int) -> str:
        """The statement that parted them, if it is known."""
        return branch(stands(self.places), size=size, past=True)[0]


def first_crossed(members: Sequence[RankReport]) -> Crossed | None:
    """The first two calls that ranks made in opposite order; None if there are none for sure."""
    found = (one for group in groups(members) for one in _crossed_in(group))
    return min(found, key=lambda one: min(call.start for call in one.met.values()), default=None)


def _crossed_in(group: Mapping[int, Mapping[int, Collective]]) -> Iterator[Crossed]:
    """The first of a group. What has been compared once, in a loop, need not be again."""
    known: set[tuple[tuple[object, ...], ...]] = set()
    for number in range(max(map(min, group.values())), min(map(max, group.values()))):
        if len({(calls[number].frame, calls[number].callers, calls[number].turn) for calls in group.values()}) == 1:
            continue
        pairs = {rank: (calls[number], calls[number + 1]) for rank, calls in group.items()}
        shape = tuple(_made(call) for rank in sorted(pairs) for call in pairs[rank])
        if shape not in known and (one := _crossed(pairs)):
            yield one
            return
        known.add(shape)


def _crossed(pairs: Mapping[int, Pair]) -> Crossed | None:
    first = pairs[min(pairs)]
    side = [rank for rank in sorted(pairs) if list(map(_made, pairs[rank])) == list(map(_made, first))]
    others = [pair for rank, pair in pairs.items() if rank not in side]
    if not others or len({signature(call) for pair in pairs.values() for call in pair}) > 1:
        return None
    try:
        said = {_words(first, pair) for pair in others}
    except (SyntaxError, RecursionError, TooLong, ValueError):
        return None  # it can't be read
    words = said.pop()
    return Crossed(pairs, side, words) if words and not said else None


def _words(mine: Pair, theirs: Pair) -> str:
    """How the code has the two calls, if `theirs` are for sure those of `mine` in opposite order."""
    calls = (*mine, *reversed(theirs))  # X, Y, X, Y
    if any(call.inside or call.kind in ROOTED for call in calls):
        return ""
    chains = [call.chain for call in calls]
    if chains[0] == chains[1] == chains[2] == chains[3]:
        return _in_turns(calls)
    depths = {shared(*chains[:2]), shared(*chains[2:])}
    if len(depths) > 1:
        return ""
    common = depths.pop()
    parted = [chain[common] for chain in chains if len(chain) > common]
    files = {frame.file for chain in chains for frame in chain[common:]}
    if len(parted) < 4 or len(files) > 1:
        return ""
    if chains[0][common + 1 :] != chains[2][common + 1 :] or chains[1][common + 1 :] != chains[3][common + 1 :]:
        return ""
    source = Source("".join(linecache.getlines(files.pop())))
    homes = [next(iter(source.around(frame.line)), source.tree) for frame in parted]
    lines = [frame.line for frame in parted]
    if any(home is not homes[0] for home in homes):
        return ""
    if not (_follows(homes[0].body, lines[0], lines[1]) and _follows(homes[0].body, lines[3], lines[2])):
        return ""
    x, y, again_x, again_y = (_statement(homes[0], line) for line in lines)
    brought = [_operand(source, chain[common:]) for chain in chains[:2]]
    if x is None or y is None or (x, y) != (again_x, again_y) or x == y or None in brought or brought[0] == brought[1]:
        return ""
    return f"`{x}` before `{y}`"


def _made(call: Collective) -> tuple[object, ...]:
    return (*call.chain, call.turn)


def _in_turns(calls: Sequence[Collective]) -> str:
    """The same of one line in a loop: `for name in names: all_reduce(model[name])`, if the names come in another order."""
    frame, (x, y, again_x, again_y) = calls[0].frame, [call.turn for call in calls]
    if frame is None or x is None or y is None or (x, y) != (again_x, again_y) or x == y or x[1][0] not in "'\"":
        return ""
    source = Source("".join(linecache.getlines(frame.file)))
    home = next(iter(source.around(frame.line)), source.tree)
    loops = [one for one in ast.walk(home) if isinstance(one, ast.For) and _is_at(one, frame.line)]
    called = _call(home, frame.line)
    if not loops or called is None:
        return ""
    of_the_loop, in_the_call = (
        {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
        for node in (max(loops, key=lambda one: one.lineno).target, called.args[0])
    )
    if x[0] not in of_the_loop or not of_the_loop & in_the_call:
        return ""
    return f"`{ast.unparse(called)}` for `{x[0]} = {x[1]}` before `{y[0]} = {y[1]}`"


def _follows(block: Sequence[ast.stmt], line: int, later: int) -> bool:
    """Whether straight code leads from one line to the other: not back to the start of a loop, nor from one arm to another."""
    here, there = ([one for one in block if _is_at(one, n)] for n in (line, later))
    if len(here) != 1 or len(there) != 1:
        return False
    if here[0] is not there[0]:
        return here[0].lineno < there[0].lineno
    arms = [getattr(here[0], name, []) for name in ("body", "orelse", "finalbody")]
    return any(_follows(arm, line, later) for arm in arms if isinstance(arm, list))


def _statement(home: Function | ast.Module, line: int) -> str | None:
    """The one simple statement of a line, as Python writes it."""
    found = [one for one in ast.walk(home) if isinstance(one, ast.Expr | ast.Assign | ast.Return) and _is_at(one, line)]
    return ast.unparse(found[0]) if len(found) == 1 else None


def _operand(source: Source, chain: Sequence[Frame]) -> str | None:
    """What the innermost call is given, in the words of the function that has it: of a helper's argument, its caller."""
    scope, line = scopes(source, chain, 2)[-1], chain[-1].line
    called = _call(scope.home, line)
    if called is None:
        return None
    operand: ast.expr = called.args[0]
    while isinstance(operand, ast.Name) and (given := scope.given(operand.id)):
        operand, scope = given
    return None if _is_chosen(operand, scope) else f"{getattr(scope.home, 'name', '')}: {ast.unparse(operand)}"


def _call(home: Function | ast.Module, line: int) -> ast.Call | None:
    """The outermost call of a line, if it is given something."""
    calls = (one for one in ast.walk(home) if isinstance(one, ast.Call) and _is_at(one, line))
    return next((one for one in calls if one.args), None)


def _is_at(node: ast.stmt | ast.expr, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or line)


def _is_chosen(operand: ast.expr, scope: Scope) -> bool:
    """Whether the rank decides which tensor this is: then the same name has another one on each rank."""
    named = {one.id for one in ast.walk(operand) if isinstance(one, ast.Name)}
    got = [
        one
        for name in named
        for one in scope.assigned(name)
        if not any(
            isinstance(part, ast.Name) and part.id == name for part in ast.walk(one.value)
        )  # count = mean(count)
    ]
    parts = [part for value in (operand, *(one.value for one in got)) for part in ast.walk(value)]
    choices = [part for part in parts if isinstance(part, ast.IfExp | ast.Subscript)]
    return any(map(scope.depends, [*choices, *(test for one in got for test, _ in one.guards)]))
