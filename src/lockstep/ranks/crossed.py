"""Two collectives that ranks of a run called in opposite order, with tensors that look alike: nothing fails, and each
combines both.

Lines that differ prove nothing: `if rank == src: broadcast(mine, src)`, `else: broadcast(theirs, src)` is right, and so is a
rank that contributes zeros when it has no batch. Two calls count as crossed only if each side made them one after the other
in straight code of one function, in the same words, the one side as X, Y and the other as Y, X, and if the words mean the same
tensors on every rank.
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from .branches import branch, scopes, shared, stands
from .meanings import entry, goes_by, is_same, is_set
from .mismatch import signature
from .places import groups
from .rank_values import Scope, Source, TooLong, called_name
from .report import Collective, Frame, RankReport
from .words import names

MOST_PAIRS = 1000  # Different ones that are looked up in the source
MOST_TURNS = 1000  # Of a loop, in which a rank's call is looked for that another rank made first
INPUT = {
    "all_reduce": 0, "all_gather": 1, "all_gather_into_tensor": 1, "reduce_scatter": 1, "reduce_scatter_tensor": 1,
    "all_to_all": 1, "all_to_all_single": 1,
}  # fmt: skip
"""Where each call has the tensor that it combines with the other ranks'."""

Pair = tuple[Collective, Collective]


@dataclass(frozen=True)
class Words:
    """The two calls as the code has them, and what each brought."""

    calls: str
    brought: tuple[str, str]


@dataclass(frozen=True)
class Crossed:
    """What met: two calls of each rank in its own order, and how the lowest rank and those like it wrote them."""

    calls: Mapping[int, Pair]
    side: list[int]
    words: Words

    @property
    def others(self) -> list[int]:
        """The ranks that made the two in the opposite order."""
        return [rank for rank in self.calls if rank not in self.side]

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
        """Who called what before what, and what met by that."""
        x, y = self.words.brought
        first, then = (call.title for call in self.calls[min(self.calls)])
        mine, theirs = names(self.side), names(self.others)
        swapped = len({pair[1].group_number for pair in self.calls.values()}) == 1
        return (
            f"{mine} called {self.words.calls}, {theirs} in the opposite order. So {first} combined {x} of {mine} with {y} of "
            f"{theirs}{f', and {then} the other way round' if swapped else ''}. No rank failed, but unless this is meant, "
            f"{'both' if swapped else 'the'} results are wrong."
        )

    def why(self, size: int) -> str:
        """The statement that parted them, if it is known."""
        return branch(stands(self.places), size=size, past=True)[0]


def first_crossed(members: Sequence[RankReport]) -> Crossed | None:
    """The first two calls that ranks made in opposite order; None if there are none for sure."""
    search = _Search()
    found = (one for group in groups(members) for one in search.within(group))
    return min(found, key=lambda one: min(call.start for call in one.met.values()), default=None)


def over_a_set(members: Sequence[RankReport]) -> tuple[Collective, str, str] | None:
    """The first call in a loop over a set of texts, the set and the call in the code's words.

    Each process goes through such a set in its own order, but for ranks that are forked from one: these have one hash seed.
    """
    search = _Search()
    sites: dict[tuple[Frame, ...], dict[object, Collective]] = {}
    for call in (call for report in members for call in report.collectives if len(call.members) != 1):
        if call.turn and _is_text(call.turn):
            sites.setdefault(call.chain, {}).setdefault(call.turn, call)
    with contextlib.suppress(RecursionError, TooLong, ValueError):
        for call, *others in [[*turns.values()] for turns in sites.values()][:MOST_PAIRS]:
            if others and (found := search.over_a_set(call)):
                return call, *found
    return None


@dataclass(frozen=True)
class _Turning:
    """A call in a loop, what it is given, and the loop's variable."""

    called: ast.Call
    operand: ast.expr
    loop: ast.For
    turn: str
    scope: Scope


def _is_text(turn: tuple[str, str]) -> bool:
    return turn[1][0] in "'\""


class _Search:
    """Reads each file once, and looks once at each pair of lines, whatever turn its loop is in."""

    def __init__(self) -> None:
        self._files: dict[str, _File | None] = {}
        self._known: set[object] = set()
        self._sites: dict[tuple[Frame | None, int], int] = {}
        self._chains: dict[tuple[Frame, ...], int] = {}

    def within(self, group: Mapping[int, Mapping[int, Collective]]) -> Iterator[Crossed]:
        """The first of a group."""
        ranks = sorted(group)
        for number in sorted(set.intersection(*map(set, group.values()))):
            pairs = {
                rank: (group[rank][number], group[rank][number + 1]) for rank in ranks if number + 1 in group[rank]
            }
            if len(pairs) < len(ranks):
                continue
            made: dict[int, tuple[object, object]] = {
                rank: (self._site(x), self._site(y)) for rank, (x, y) in pairs.items()
            }
            shape: object = tuple(made.values())
            if len({*made.values()}) == 1:
                pairs = self._in_another_turn({rank: group[rank] for rank in ranks}, number)
                if not pairs:
                    continue
                made = {rank: (x.turn, y.turn) for rank, (x, y) in pairs.items()}
            if shape in self._known or len({signature(call) for pair in pairs.values() for call in pair}) > 1:
                continue
            if len(self._known) == MOST_PAIRS:
                return
            self._known.add(shape)
            side = [rank for rank in ranks if made[rank] == made[ranks[0]]]
            others = {made[rank]: pair for rank, pair in pairs.items() if rank not in side}
            if others and (words := self._words_of(pairs[ranks[0]], others.values())):
                yield Crossed(pairs, side, words)
                return

    def _in_another_turn(self, group: Mapping[int, Mapping[int, Collective]], number: int) -> dict[int, Pair]:
        """Of each rank its call of this number, in a loop, and the later one of the loop that has the others' turn."""
        turns = {rank: calls[number].turn for rank, calls in group.items()}
        pairs: dict[int, Pair] = {}
        if len({*turns.values()}) == 2:
            for rank, calls in group.items():
                first, (sought,) = calls[number], {*turns.values()} - {turns[rank]}
                later = (calls[after] for after in range(number + 1, number + MOST_TURNS) if after in calls)
                found = next((call for call in later if call.turn == sought or call.chain != first.chain), first)
                if found.turn != sought or found.chain != first.chain:
                    return {}
                pairs[rank] = first, found
        return pairs

    def _site(self, call: Collective) -> int:
        """The same for calls of one line with the same callers."""
        key = (call.frame, id(call.callers))
        if key not in self._sites:
            self._sites[key] = self._chains.setdefault(call.chain, len(self._chains))
        return self._sites[key]

    def _words_of(self, mine: Pair, others: Iterable[Pair]) -> Words | None:
        """How the code has the two, if all others made them in opposite order."""
        try:
            said = {self._words((*mine, *reversed(pair))) for pair in others}
        except (RecursionError, TooLong, ValueError):
            return None  # it can't be read
        return said.pop() if len(said) == 1 else None

    def _words(self, calls: Sequence[Collective]) -> Words | None:
        """Of X, Y, X, Y, if for sure the first and the third are the same, and the others."""
        chains = [call.chain for call in calls]
        if any(call.inside or call.kind not in INPUT or not call.chain for call in calls):
            return None
        if chains[0] == chains[1] == chains[2] == chains[3]:
            return self._in_turns(calls)
        common = shared(*chains[:2])
        parted = [chain[common] for chain in chains if len(chain) > common]
        files = {frame.file for chain in chains for frame in chain[common:]}
        if (
            shared(*chains[2:]) != common
            or len(parted) < 4
            or len(files) > 1
            or (file := self._file(files.pop())) is None
        ):
            return None
        if chains[0][common + 1 :] != chains[2][common + 1 :] or chains[1][common + 1 :] != chains[3][common + 1 :]:
            return None
        lines = [frame.line for frame in parted]
        x, y, again_x, again_y = map(file.statement, lines)
        if x is None or y is None or (x, y) != (again_x, again_y) or x == y:
            return None
        homes = [file.source.home(line) for line in lines]
        if any(home is not homes[0] for home in homes):
            return None
        if not (_follows(homes[0].body, lines[0], lines[1]) and _follows(homes[0].body, lines[3], lines[2])):
            return None
        first, then, again_first, again_then = (file.brought(call) for call in calls)
        if first is None or then is None or (first, then) != (again_first, again_then) or first == then:
            return None
        return Words(f"`{x}` before `{y}`", (f"`{first[1]}`", f"`{then[1]}`"))

    def _in_turns(self, calls: Sequence[Collective]) -> Words | None:
        """The same of one line in a loop: `for name in names: all_reduce(model[name])`, if the names come in another order."""
        (x, y), chain = (call.turn for call in calls[:2]), calls[0].chain
        if x is None or y is None or not (found := self._turning(calls[0])):
            return None
        if not entry(found.operand, found.loop, found.scope, {frame.function for frame in chain}):
            return None
        return Words(f"`{ast.unparse(found.called)}` for `{x[0]} = {x[1]}` before `{y[0]} = {y[1]}`", (x[1], y[1]))

    def _turning(self, call: Collective) -> _Turning | None:
        """The call in the code, and the loop around it over texts whose turn it was in."""
        if call.inside or call.kind not in INPUT or not call.chain or call.turn is None or not _is_text(call.turn):
            return None
        if (file := self._file(call.chain[-1].file)) is None or (called := file.call(call)) is None:
            return None
        around = (loop for loop in file.loops if _is_at(loop, called.lineno))
        loop = max(around, key=lambda one: one.lineno, default=None)
        if loop is None or call.turn[0] != next(
            (one.id for one in ast.walk(loop.target) if isinstance(one, ast.Name)), ""
        ):
            return None
        scope = scopes(file.source, file.own(call.chain), 2)[-1]
        return _Turning(called, called.args[INPUT[call.kind]], loop, call.turn[0], scope)

    def over_a_set(self, call: Collective) -> tuple[str, str] | None:
        """A set that the loop around a call goes through, and the call, in the code's words."""
        found = self._turning(call)
        if (
            found is None
            or not is_set(found.loop.iter, found.scope)
            or not goes_by(found.operand, found.loop, found.turn)
        ):
            return None
        return ast.unparse(found.loop.iter), ast.unparse(found.called)

    def _file(self, name: str) -> _File | None:
        if name not in self._files:
            try:
                self._files[name] = _File(name, Source.of(name))
            except (SyntaxError, RecursionError, ValueError):
                self._files[name] = None
        return self._files[name]


class _File:
    """What the lines of a file have."""

    def __init__(self, name: str, source: Source) -> None:
        self.name, self.source = name, source
        self.loops = [node for node in ast.walk(source.tree) if isinstance(node, ast.For)]
        self._brought: dict[tuple[Frame, ...], tuple[str, str] | None] = {}
        self._statements: dict[int, list[ast.stmt]] = {}
        self._said: dict[int, str | None] = {}
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Expr | ast.Assign | ast.Return):
                for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                    self._statements.setdefault(line, []).append(node)

    def statement(self, line: int) -> str | None:
        """The one simple statement of a line, as Python writes it."""
        if line not in self._said:
            found = self._statements.get(line, [])
            self._said[line] = ast.unparse(found[0]) if len(found) == 1 else None
        return self._said[line]

    def call(self, made: Collective) -> ast.Call | None:
        """The call in the code, if it's there by its own name, and alone on its line."""
        line = made.chain[-1].line
        statements = self._statements.get(line, [])
        calls = (
            node for one in statements for node in ast.walk(one) if isinstance(node, ast.Call) and _is_at(node, line)
        )
        found = [node for node in calls if called_name(node) == made.kind and len(node.args) > INPUT[made.kind]]
        return found[0] if len(found) == 1 else None

    def brought(self, call: Collective) -> tuple[str, str] | None:
        """What a call is given: a function, and the name there that means the same on every rank. Of a helper's argument,
        that of its caller. None if it may be another tensor on each."""
        if call.chain not in self._brought:
            self._brought[call.chain] = self._looked_up(call)
        return self._brought[call.chain]

    def _looked_up(self, call: Collective) -> tuple[str, str] | None:
        called, scope = self.call(call), scopes(self.source, self.own(call.chain), 2)[-1]
        if called is None:
            return None
        operand: ast.expr = called.args[INPUT[call.kind]]
        while isinstance(operand, ast.Name) and (given := scope.given(operand.id)):
            operand, scope = given
        return (getattr(scope.home, "name", ""), ast.unparse(operand)) if is_same(operand, scope) else None

    def own(self, chain: Sequence[Frame]) -> list[Frame]:
        """The part of a chain of calls that is in this file, the innermost last."""
        return [*takewhile(lambda frame: frame.file == self.name, reversed(chain))][::-1]


def _follows(block: Sequence[ast.stmt], line: int, later: int) -> bool:
    """Whether straight code leads from one line to the other: not back to the start of a loop, nor from one arm to another."""
    here, there = ([one for one in block if _is_at(one, n)] for n in (line, later))
    if len(here) != 1 or len(there) != 1:
        return False
    if here[0] is not there[0]:
        return here[0].lineno < there[0].lineno
    arms = [getattr(here[0], name, []) for name in ("body", "orelse", "finalbody")]
    return any(_follows(arm, line, later) for arm in arms if isinstance(arm, list))


def _is_at(node: ast.stmt | ast.expr, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or line)
