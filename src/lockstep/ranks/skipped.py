"""A collective that some ranks skipped, and the `if` that let them: proved from the source, or not said.

Two sides parted in one function: a line of it led one side to its call; the other has come past that line without the call.
If there is only one `if` by which a rank can come past, there or in what is called from there, that `if` parted them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise, product

from .branches import SURE, Parting, alike, header, in_words, line_of, loops_around, scopes, shared, why_of
from .places import IN_STEP, groups, of_gradient, part_of, said_of
from .rank_values import Function, Loop, Scope, Source, TooLong, called_name
from .report import Collective, Frame, RankReport
from .ways import CALLED_ANYWAY, LEAVES, Block, Leaves, Unsure, may_catch, missing, plain_name, within
from .words import names

Chain = tuple[Frame, ...]
MAY_SKIP = "A rank that"
MAYBE_NOT = (ast.BoolOp, ast.IfExp, ast.Lambda, ast.comprehension, ast.Await, ast.Yield, ast.YieldFrom)
"""An expression with one of these need not make a call that is in it."""


@dataclass(frozen=True)
class Skip:
    """The ranks `without` skipped the `call` that those of `made` made, because of the statement that `parting` names, and
    went on to `next`, in the function in which the others made it, or what led to it, `at` a line."""

    call: Collective
    group: str
    """Of which ranks the call is, if not of all."""
    made: list[int]
    without: list[int]
    parting: str
    branch: Frame | None
    at: Frame
    next: Frame
    usual: bool
    """Half of them or more made the call, and not in a branch of their own: the others should have, too."""
    turn: str = ""
    """In which turn of a loop, if that is how it was seen."""

    @property
    def at_fault(self) -> list[int]:
        """Who should have made it, too; or the fewer; or all, if nobody but their author knows who is wrong."""
        if self.usual or len(self.made) > len(self.without):
            return self.without
        return self.made if len(self.made) < len(self.without) else [*self.made, *self.without]

    @property
    def headline(self) -> str:
        """Who skipped what, or only who called what."""
        on = f"and went on to {self.next.short}"
        apart = (
            self.turn and self.call.inside == "backward" and self.branch is None
        )  # it may have run it under no_sync()
        called = (of_gradient if apart else said_of)(self.call) + self.group
        if self.turn:
            called += f"{',' * (',' in called)} when {self.turn}"
            if self.usual:
                return f"{names(self.without)} skipped {called}; {names(self.made)} called it."
            return f"{names(self.made)} called {called}; {names(self.without)} did not."
        if self.usual:
            return f"{names(self.without)} skipped {called}, which {names(self.made)} called, {on}."
        return f"{names(self.made)} called {called}; {names(self.without)} did not, {on}."


def first_skipped(members: Sequence[RankReport]) -> tuple[Skip, dict[int, Collective]] | None:
    """The same where the lines of a group's calls first differ, and the calls that met there."""
    for group in groups(members):
        for number in sorted(set.intersection(*map(set, group.values()))):
            met = {rank: calls[number] for rank, calls in group.items()}
            if len({call.chain for call in met.values()}) > 1:
                if skip := skipped(met, members):
                    return skip, met
                break
    return None


def skipped(calls: Mapping[int, Collective], members: Sequence[RankReport]) -> Skip | None:
    """Which of the ranks whose `calls` met had skipped one; None if it isn't certain."""
    sides: dict[Chain, list[int]] = {}
    for rank, call in sorted(calls.items()):
        sides.setdefault(call.chain, []).append(rank)
    if len(sides) != 2 or any(call.via for call in calls.values()):
        return None
    one, other = sides
    common = shared(one, other)
    if common in (len(one), len(other)) or one[common].file != other[common].file:
        return None
    try:
        source = Source.of(one[common].file)
        again = any(frame.file != one[common].file or loops_around(source.tree, frame.line) for frame in one[:common])
        parted = Parted(one, other, common, calls, _before(calls, members), source, again)
        if turn := _left(parted):
            made, past = turn.made, turn.past
        else:
            made, past = (one, other) if _is_next(parted, len(members)) else (other, one)
        if calls[sides[made][0]].inside:  # DDP makes its calls at some turns only
            return None
        either = ((made, past), (past, made))
        # In code that runs once, who is at the earlier of two lines can't have missed the later one.
        once = not again and not loops_around(source.tree, one[common].line, other[common].line)
        ways = [
            [*_ways(source, mine[common:], theirs[common].line, sides[mine], sides[theirs], len(members), again, turn)]
            for mine, theirs in either[: 1 if once or turn else 2]
        ]
    except (Unsure, SyntaxError, RecursionError, TooLong, ValueError):
        return None
    if not ways[0] or len({place for some in ways for _, place in some}) > 1:
        return None
    found, place = ways[0][0]
    call = calls[sides[made][0]]
    aside = not found.leaves and place.file == source.file and source.home(place.line) is source.home(made[common].line)
    usual = not aside and len(sides[made]) >= len(sides[past])
    parting = in_words(found, Source.of(place.file), past=True)
    return Skip(
        call, part_of(call, len(members)), sides[made], sides[past], parting, place, made[common], past[common], usual
    )


def _before(calls: Mapping[int, Collective], members: Sequence[RankReport]) -> dict[int, list[Collective]]:
    """What each rank had called before: in all groups, but no messages."""
    return {
        report.rank: [
            call for call in report.collectives
            if call.number < calls[report.rank].number and not call.is_point_to_point
        ]
        for report in members if report.rank in calls
    }  # fmt: skip


@dataclass(frozen=True)
class Parted:
    """Two ways to the `calls` that met, which are the same up to the line `common` of a function; what was called `before`.

    `again`: the function, which is in this source, may be called more than once.
    """

    one: Chain
    other: Chain
    common: int
    calls: Mapping[int, Collective]
    before: Mapping[int, Sequence[Collective]]
    source: Source
    again: bool

    @property
    def last(self) -> Chain:
        """The last call that the ranks had made before, as far as they came to it in the same way."""
        last = [mine[-1].chain if mine else () for mine in self.before.values()]
        return reduce(lambda some, more: some[: shared(some, more)], last)


@dataclass(frozen=True)
class Turn:
    """One turn of a loop, or call of a function, that those who are `past` have left, and in which others `made` their call."""

    made: Chain
    past: Chain
    body: Sequence[ast.stmt]
    leaves: Leaves


def _left(parted: Parted) -> Turn | None:
    """The turn in which all had made their last call, if one side has left it, and the other is in the rest of it."""
    one, other, common, there = parted.one, parted.other, parted.common, parted.last
    home = parted.source.home(one[common].line)
    if len(there) <= common or there[:common] != one[:common] or parted.source.home(there[common].line) is not home:
        return None
    if not (inner := loops_around(home, there[common].line)):
        return None
    for made, past in ((one, other), (other, one)):
        line, beyond, end = made[common].line, past[common].line, inner[-1].end_lineno or 0
        around, outside = loops_around(home, line), loops_around(home, beyond)
        if may_catch(home, inner[-1].lineno, beyond):
            continue
        later = line > there[common].line or _is_ahead(there, made, common)
        if around == inner and outside == inner[:-1] and later and beyond > end:
            return Turn(made, past, inner[-1].body, (ast.Continue, ast.Break))
        # An inner loop has ended and begun anew: its first turns come again.
        if outside == inner and around == inner[:-1] and line > end:
            last = {number_of_turn(mine[-1]) for mine in parted.before.values()}
            new = {number_of_turn(call) for call in parted.calls.values() if call.chain == past}
            if all(_is_anew(inner[-1], *turns) for turns in product(last, new)) and (around or parted.again):
                body = around[-1].body if around else home.body
                return Turn(made, past, body, (ast.Continue,) if around else (ast.Return,))
    return None


def number_of_turn(call: Collective) -> tuple[str, int] | None:
    """The variable of the loop around the call, if it is a number, and what it was."""
    name, value = call.turn or ("", "")
    return (name, int(value)) if value.isdigit() else None


def _is_anew(loop: Loop, last: tuple[str, int] | None, new: tuple[str, int] | None) -> bool:
    """Whether a loop that counts up has begun again between two calls in its turns."""
    if last is None or new is None or not isinstance(loop, ast.For) or not isinstance(over := loop.iter, ast.Call):
        return False
    counts_up = called_name(over) in ("range", "enumerate") and len(over.args) < 3
    named = any(isinstance(part, ast.Name) and part.id == last[0] == new[0] for part in ast.walk(loop.target))
    return counts_up and named and new <= last


def _is_next(parted: Parted, size: int) -> bool:
    """Whether, after all that the ranks had called before, `one` was due rather than `other`. Raises Unsure."""
    one, other, common, there = parted.one, parted.other, parted.common, parted.last
    calls, before, source = parted.calls, parted.before, parted.source
    home, lines = source.home(one[common].line), [one[common].line, other[common].line]
    if len(there) > common and there[:common] == one[:common]:
        # They parted after one line: who goes on from there to the later of the two comes past the other.
        line = there[common].line
        around = [loops_around(home, each) for each in (line, *lines)]
        if source.home(line) is home and around[0][-1:] == around[1][-1:] == around[2][-1:]:
            if any(call.inside and call.chain[common].line == line for call in calls.values()):
                raise Unsure  # DDP makes several calls of one line
            later = [lines[n] <= line and not _is_ahead(there, chain, common) for n, chain in enumerate((one, other))]
            return (later[0], lines[0]) < (later[1], lines[1])
    if any(call.inside for call in calls.values()):
        raise Unsure
    scope = Scope(source, size, home if isinstance(home, Function) else None)
    for early, late in () if parted.again else ((one, other), (other, one)):
        # In a plain loop all make the same turns: of those who are past it, some have missed a call if they made fewer.
        loops = loops_around(home, early[common].line)
        ended = loops and late[common].line > (loops[0].end_lineno or 0) and not loops_around(home, late[common].line)
        if ended and all(alike(loop, scope) for loop in loops):
            made = {rank: sum(call.chain == early for call in [*mine, calls[rank]]) for rank, mine in before.items()}
            inside = [rank for rank in made if calls[rank].chain == early]
            if max(made[rank] for rank in made if rank not in inside) < min(made[rank] for rank in inside):
                return early == one
    due = set()
    for mine in before.values():
        # They have to have called the two in turns: else a rank may skip one of them.
        turns = [call.chain for call in mine if call.chain in (one, other)]
        if any(a == b for a, b in pairwise(turns)) or (turns and (turns[0] == one) is not (lines[0] < lines[1])):
            raise Unsure
        due.add(turns[-1] == other if turns else lines[0] < lines[1])
    if len(due) > 1:
        raise Unsure
    return due.pop()


def _is_ahead(made: Chain, call: Chain, common: int) -> bool:
    """Whether a call comes later in the function from which another has been made, if both came there by one line."""
    same = shared(made, call)
    if not common < same < min(len(made), len(call)):
        return False
    return made[same].file == call[same].file and made[same].line < call[same].line


def _ways(
    source: Source,
    frames: Sequence[Frame],
    there: int,
    made: list[int],
    past: list[int],
    size: int,
    again: bool,
    turn: Turn | None,
) -> Iterator[tuple[Parting, Frame]]:
    """How those that are `past` may have missed the call that the frames led to, on the way to line `there`; the places.

    Raises Unsure if there may be other ways. `again`: the function where they parted may be called again.
    """
    if source.home(frames[0].line) is not source.home(there):
        raise Unsure
    through = scopes(source, frames, size)
    for depth, (frame, scope) in enumerate(zip(frames, through, strict=True)):
        body: Sequence[ast.stmt] = scope.home.body
        leaves: Leaves = (ast.Return,)
        if depth == 0 and turn:
            body, leaves, there = turn.body, turn.leaves, 0
        elif depth == 0:
            # Those that are past are in this function: only a new turn of a loop is a way there, or a new call of it.
            loops = loops_around(scope.home, frame.line, there)
            leaves = LEAVES if len(loops) > 1 or again else (ast.Continue,)
            if loops:
                loop = loops[-1]
                body = loop.body
                if leaves is LEAVES and (isinstance(loop, ast.While) or scope.depends(loop.iter)):
                    raise Unsure
        for node, taken in missing(body, frame.line, leaves, 0 if depth else there):
            if alike(node, scope) or not _may(node, taken, scope, past):
                continue
            found = _parting(node, taken, scope, made, past)
            yield found, Frame(scope.source.file, line_of(found))
        _surely_calls(scope, frame.line, *through[depth + 1 : depth + 2])


def may_skip(call: Collective) -> list[str]:
    """The only `if` that lets a rank skip a call in a loop, if there is one: what it does, whether or not a rank has."""
    found = _only(call, call.members)
    if found is None:
        return []
    node, taken, scope = found
    if isinstance(node, ast.Try):
        return []
    does = "takes" if taken else "does not take"
    return [f"{MAY_SKIP} {does} the branch {header(node, scope.source)} skips this call."]


def may_part(call: Collective) -> Frame | None:
    """The place of the `if` that `may_skip` names."""
    found = _only(call, call.members)
    return Frame(found[2].source.file, found[0].lineno) if found and isinstance(found[0], ast.If) else None


def only_way(call: Collective, level: int, made: list[int], past: list[int]) -> tuple[Parting, Frame] | None:
    """What must have led those that are `past` beyond a call that others made, in one turn of a loop; None if unsure.

    The loop is around the frame at this level of the call's chain.
    """
    found = _only(call, past, level)
    if found is None or call.via:  # a library may come to this line and not call
        return None
    node, taken, scope = found
    if call.inside and (call.inside not in IN_STEP or any("no_sync" in one for one in scope.source.lines)):
        return None
    try:
        parting = _parting(node, taken, scope, made, past)
    except Unsure:
        return None
    return parting, Frame(scope.source.file, line_of(parting))


def _parting(node: Block, taken: bool, scope: Scope, made: list[int], past: list[int]) -> Parting:
    """That those who are `past` came there by this statement. Raises Unsure if they may have called something there."""
    if isinstance(node, ast.Try) and not _communicates(
        [one for some in node.handlers for one in some.body], scope.source
    ):
        return Parting(node, made, past, taken, SURE)
    if not isinstance(node, ast.If) or _communicates(node.body if taken else node.orelse, scope.source):
        raise Unsure
    return Parting(node, made, past, taken, SURE, why_of(node.test, scope, made, past))


def _only(call: Collective, ranks: Sequence[int], level: int = -1) -> tuple[Block, bool, Scope] | None:
    """The only statement by which these ranks can skip a call in a turn of its loop, or of its function, and if they take it."""
    frames = call.chain[level:]
    ways = []
    try:
        through = scopes(Source.of(frames[0].file), frames, len(call.members))
        for depth, (frame, scope) in enumerate(zip(frames, through, strict=True)):
            loops = loops_around(scope.home, frame.line) if depth == 0 else []
            body = loops[-1].body if loops else scope.home.body
            leaves: Leaves = (ast.Continue,) if loops else (ast.Return,)
            ways += [
                (node, taken, scope) for node, taken in missing(body, frame.line, leaves, 0)
                if not alike(node, scope) and _may(node, taken, scope, ranks)
            ]  # fmt: skip
            if depth + 1 < len(frames):
                _surely_calls(scope, frame.line, through[depth + 1])
    except (Unsure, SyntaxError, RecursionError, TooLong, ValueError, IndexError):
        return None
    return ways[0] if len(ways) == 1 and not isinstance(ways[0][0], Loop) else None


def _may(node: Block, taken: bool, scope: Scope, ranks: Sequence[int]) -> bool:
    """Whether one of these ranks may have come past there, as far as the test can be told."""
    known = [scope.value(node.test, rank) if isinstance(node, ast.If) else None for rank in ranks]
    return any(one is None or bool(one) is taken for one in known)


def _communicates(block: Sequence[ast.stmt], source: Source) -> bool:
    """Whether a block has calls that may be collectives: those that have gone there may have missed one there."""
    calls = [node for one in block for node in ast.walk(one) if isinstance(node, ast.Call)]
    own = [one for one in source.functions if one.name in map(called_name, calls)]
    return any(re.search(r"\b(dist|distributed)\.", ast.unparse(node)) for node in (*calls, *own))


def _surely_calls(scope: Scope, line: int, below: Scope | None = None) -> None:
    """Raises Unsure unless all that come to this line call what led to the scope `below`; without one, anything."""
    function = below.home if below else None
    parts = [
        part
        for one in ast.walk(scope.home)
        for child in ast.iter_child_nodes(one)
        if isinstance(one, ast.stmt) and isinstance(child, ast.expr) and within([child], line)
        for part in ast.walk(child)
    ]
    calls = [part for part in parts if isinstance(part, ast.Call)]
    calls = [one for one in calls if function is None or called_name(one) == getattr(function, "name", "")]
    if any(isinstance(part, MAYBE_NOT) and not {*calls}.isdisjoint(ast.walk(part)) for part in parts):
        raise Unsure
    if below is None:
        return
    if not isinstance(function, ast.FunctionDef):
        raise Unsure
    named = [one for one in below.source.functions if one.name == function.name]
    wraps = map(plain_name, function.decorator_list)
    generates = any(isinstance(part, ast.Yield | ast.YieldFrom) for part in ast.walk(function))
    if len(calls) != 1 or len(named) != 1 or {*wraps} - {*CALLED_ANYWAY} or generates:
        raise Unsure
    if not _is_its_own(calls[0].func, function, scope, below.source):
        raise Unsure


def _is_its_own(called: ast.expr, function: Function, scope: Scope, source: Source) -> bool:
    """Whether this is the function by its name or its module's, or a method of `self` or of an object whose class is named.

    `source` is the function's.
    """
    if isinstance(called, ast.Name):
        return not scope.assigned(called.id)
    if not (isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name)):
        return False
    made = [one.value for one in scope.assigned(called.value.id)]
    if not made and source is not scope.source and function in source.tree.body:
        return True
    classes = [node.name for node in ast.walk(source.tree) if isinstance(node, ast.ClassDef) and function in node.body]
    known = all(isinstance(one, ast.Call) and called_name(one) in classes for one in made)
    return called.value.id == "self" or bool(made and known)
