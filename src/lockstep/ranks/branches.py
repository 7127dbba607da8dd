"""Which statement parted the ranks' code: one that some are inside of or past, and others are not.

A branch or a loop is named if the lines where the ranks stand tell it apart, or if what decides it depends on the rank and
fits who stands where. Of several that might be it, none is named.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from .rank_values import Assigned, Function, Loop, Scope, Source, TooLong, called_name
from .report import Frame
from .ways import LEAVES, Block, Unsure, ends, may_catch, missing, swallowing, within
from .words import names, one_or_more

UNLIKELY, MAYBE, FITS, SURE = range(4)
"""The odds that a statement parted the ranks. `MAYBE`: what decides it depends on the rank. `FITS`: what it is on each rank
is known, and tells these ranks apart as they stand. `SURE`: nothing else can have (`skipped`).
"""


@dataclass(frozen=True)
class Parting:
    """A statement that the ranks `inside` are in, or in the rest after, and the ranks `out` are not; both are sorted.

    `leaves` is true for an `if` that leaves the rest of its block. `odds` says how sure it is that it parted them.
    """

    node: Block
    inside: list[int]
    out: list[int]
    leaves: bool = False
    odds: int = UNLIKELY
    why: str = ""
    certain: bool = False
    """Those that are not inside of an `if` cannot have been there, and have left it."""


Chains = Mapping[int, Sequence[Frame]]
"""Where ranks stand: for each, its line in the function that all of them had called, and below that the calls to where it
is, the innermost last.
"""


def stands(stood: Mapping[int, Frame | None]) -> Chains:
    """The same of ranks of which no more than a line is known."""
    return {rank: [frame] if frame else [] for rank, frame in stood.items()}


def branch(
    chains: Chains, finished: Collection[int] = (), *, size: int, callers: Sequence[Frame] = (), past: bool = False,
    together: Collection[Collection[int]] = (),
) -> tuple[str, Frame | None]:  # fmt: skip
    """Name the statement that parted the ranks, if there is one; its line. `past` says that they have gone on from there.

    `chains` has ranks that haven't `finished`, of a world of `size`; `callers` are the calls that led all of them to the
    function where the chains begin, the nearest first. What parts ranks that are `together` isn't it.
    """
    chains = {rank: chain for rank, chain in chains.items() if chain}
    files = {chain[0].file for chain in chains.values()}
    if len(files) != 1:
        return "", None
    file = files.pop()

    def here(frames: Sequence[Frame]) -> list[Frame]:
        return list(takewhile(lambda frame: frame.file == file, frames))

    chains = {rank: here(chain) for rank, chain in chains.items()}
    try:
        source = Source.of(file)
        found = _found(source, chains, finished, here(callers), size)
    except (SyntaxError, RecursionError, TooLong, ValueError):
        return "", None
    if found is None or any({*found.inside} & {*some} and {*found.out} & {*some} for some in together):
        return "", None
    return in_words(found, source, past), Frame(file, found.node.lineno)


def _found(
    source: Source, chains: Chains, finished: Collection[int], callers: Sequence[Frame], size: int
) -> Parting | None:
    homes = [source.around(chain[0].line)[:1] for chain in chains.values()]
    if any(home != homes[0] for home in homes):  # one may have been called from within the block that another stands in
        return None
    seen = scopes(source, [*callers[::-1], next(iter(chains.values()))[0]], size)
    lines = {rank: chain[0].line for rank, chain in chains.items()}
    around = _innermost(seen[-1], lines)
    levels = [(seen[-1], lines)]  # The function where they stand, and if that's one line, those that have called it
    if finished and len({*lines.values()}) == 1:
        called = zip(seen[-2::-1], callers, strict=False)
        levels += [(scope, dict.fromkeys(lines, frame.line)) for scope, frame in called]
    might = [one for scope, there in levels for one in _partings(scope, there, finished)]
    fits = [one for one in might if one.odds == FITS]
    direct = [one for one in fits if not one.why]
    if direct or len(fits) == 1:
        return (direct or fits)[0]
    below = _below(source, chains, size)
    if fits := [one for one in below if one.odds == FITS]:
        return fits[0]
    if below and (around is None or any(one.inside == around.inside for one in below)):
        return below[0] if around is None and len(below) == 1 else None
    if around is None and finished:
        left = (_innermost(scope, there, finished) for scope, there in levels)
        around = next((one for one in left if one and one.odds == FITS), None)
    around = _as_far_as_known(around, chains, seen[-1])
    return around or next((one for one in might if len(might) == 1 and one.odds == MAYBE), None)


def _as_far_as_known(found: Parting | None, chains: Chains, scope: Scope) -> Parting | None:
    """Of an `if` with ranks inside, also whether others may have left it; None if they are known to have been there."""
    if found is None or found.leaves or not isinstance(node := found.node, ast.If):
        return found
    if any(scope.value(node.test, rank) for rank in found.out):
        return None
    stand = [chains[rank][0].line for rank in found.out if rank in chains]  # or they have left the function
    certain = not may_catch(scope.home, node.lineno) and all(line > (node.body[-1].end_lineno or 0) for line in stand)
    try:
        for chain in {tuple(chains[rank]) for rank in found.inside}:
            for depth, (one, frame) in enumerate(zip(scopes(scope.source, chain, scope.size), chain, strict=True)):
                ways = missing(one.home.body if depth else node.body, frame.line, LEAVES, 0)
                certain &= all(alike(way, one) for way, _ in ways)
    except Unsure:
        certain = False
    return replace(found, certain=certain)


def _below(source: Source, chains: Chains, size: int) -> list[Parting]:
    """What may have parted ranks that are in a function from others that have left it, or were not in need of it."""
    found = []
    home = source.home(next(iter(chains.values()))[0].line)
    for chain in {tuple(chain) for chain in chains.values() if len(chain) > 1}:
        side = [rank for rank, other in chains.items() if (*other,) == chain]
        others = [rank for rank in chains if rank not in side]
        if not others or not all(_may_be_past(home, chain[0].line, chains[rank][0].line) for rank in others):
            continue
        through = [*zip(scopes(source, chain, size), chain, strict=True)]
        for depth, (scope, frame) in enumerate(through[1:], 1):
            lines = dict.fromkeys(side, frame.line)
            might = [one for one in _partings(scope, lines, others) if one.odds == FITS]
            around = _as_far_as_known(_innermost(scope, lines, others), dict.fromkeys(side, chain[depth:]), scope)
            if around and any(may_catch(one.home, above.line) for one, above in through[:depth]):
                around = replace(around, certain=False)
            sure = not any(_skips_turns(home, chain[0].line, chains[rank][0].line) for rank in others)
            found += might[:1] or ([around] if around and sure else [])
    return found


def _skips_turns(home: Function | ast.Module, call: int, line: int) -> bool:
    """Whether a loop around both lines goes on early: then the ranks inside may have missed a call after this one."""
    return any(isinstance(node, ast.Continue) for one in loops_around(home, call, line) for node in ast.walk(one))


def _may_be_past(home: Function | ast.Module, call: int, line: int) -> bool:
    """Whether code at this line may have made the call before: the line comes later, or both are in one loop."""
    return line > call or bool(loops_around(home, call, line))


def loops_around(home: ast.AST, *lines: int) -> list[Loop]:
    """The loops of this code whose bodies have all these lines, the outermost first."""
    loops = [node for node in ast.walk(home) if isinstance(node, Loop)]
    return sorted((one for one in loops if all(within(one.body, line) for line in lines)), key=lambda one: one.lineno)


def shared(one: Sequence[Frame], other: Sequence[Frame]) -> int:
    """How many frames, from the outermost on, the two calls of a rank have in common."""
    return len(list(takewhile(lambda frames: frames[0] == frames[1], zip(one, other, strict=False))))


def scopes(source: Source, chain: Sequence[Frame], size: int) -> list[Scope]:
    """The names as each function of a chain of calls sees them, the innermost last. `source` is the first one's file."""
    found: list[Scope] = []
    line = 0
    for frame in chain:
        above, source = source, source if frame.file in ("", source.file) else Source.of(frame.file)
        home = next(iter(source.around(frame.line)), None)
        calls = [
            node
            for node in (source.calls.get(home.name, []) if found and home and source is above else [])
            if node.lineno <= line <= (node.end_lineno or 0)
        ]
        found.append(found[-1].called(calls[0], home) if home and len(calls) == 1 else Scope(source, size, home))
        line = frame.line
    return found


def _innermost(scope: Scope, lines: Mapping[int, int], gone: Collection[int] = ()) -> Parting | None:
    """The innermost block that some ranks stand in and others don't, unless it is one that all of them come through alike.

    `gone` are ranks that have left the function.
    """
    best: Block | None = None
    for node in ast.walk(scope.source.tree):
        if isinstance(node, Block) and (best is None or node.lineno > best.lineno):
            inside = [rank for rank, line in lines.items() if within(node.body, line)]
            if inside and len(inside) < len({*lines, *gone}) and not alike(node, scope):
                best = node
    if best is None:
        return None
    inside = [rank for rank, line in lines.items() if within(best.body, line)]
    out = sorted({*lines, *gone} - {*inside})
    if isinstance(best, Loop) and (exits := _exits(best)):
        decides = _decides(best)
        if len(exits) == 1 and decides is not None and isinstance(best, ast.For):
            if _is_plain(decides, scope):
                why = why_of(exits[0].test, scope, inside, out)
                return Parting(exits[0], inside, out, leaves=True, odds=FITS, why=why)
            return Parting(best, inside, out, why=f"The loop can also be left {header(exits[0], scope.source)}.")
    return Parting(best, inside, out)


def _exits(loop: Loop) -> list[ast.If]:
    """The `if`s by which a loop is left before its end; none if it's left in other ways too."""
    ways = [one for one in _walked(loop.body, loop) if _goes_away(one[0])]
    ways = [one for one in ways if one[2] is loop or not isinstance(one[0], ast.Break)]
    found = [node for node, _, _ in _walked(loop.body, loop) if isinstance(node, ast.If)]
    exits = [node for node in found if any(way[0] is node.body[-1] for way in ways)]
    return exits if len(exits) == len(ways) else []


def _goes_away(one: ast.stmt) -> bool:
    """True for what leaves a loop, or ends the process."""
    return ends(one) or isinstance(one, (ast.Break, ast.Return))


def _partings(scope: Scope, lines: Mapping[int, int], finished: Collection[int]) -> Iterator[Parting]:
    """The statements of this function that may have parted those ranks from others, with the odds of each."""
    ranks = sorted({*lines, *finished})

    def parting(node: Block, block: Sequence[ast.stmt], *, leaves: bool = False) -> Iterator[Parting]:
        inside = [rank for rank in ranks if rank in lines and within(block, lines[rank])]
        out = [rank for rank in ranks if rank not in inside]
        decides = _decides(node)
        if inside and out and decides is not None and not _is_plain(decides, scope):
            yield Parting(node, inside, out, leaves, *_odds(node, scope, inside, out, leaves))

    def past(loop: Loop) -> bool:
        return all(within(loop.body, line) or line > (loop.end_lineno or 0) for line in lines.values())

    for node, rest, loop in _walked(scope.home.body, None):
        if isinstance(node, ast.If) and isinstance(node.body[-1], LEAVES) and not node.orelse:
            if loop is None or isinstance(node.body[-1], ast.Continue):
                yield from parting(node, rest, leaves=True)
            elif past(loop):
                yield from parting(node, loop.body, leaves=True)
        elif isinstance(node, Loop):
            yield from parting(node, node.body) if past(node) else ()
        elif isinstance(node, ast.If) and finished:
            yield from parting(node, node.body)
            yield from parting(node, node.orelse, leaves=True)


def _walked(block: Sequence[ast.stmt], loop: Loop | None) -> Iterator[tuple[ast.stmt, Sequence[ast.stmt], Loop | None]]:
    """Each statement of a function, with what follows it in its block and the loop that it is in."""
    for number, one in enumerate(block):
        yield one, block[number + 1 :], loop
        if isinstance(one, (Function, ast.ClassDef)):
            continue
        inner = one if isinstance(one, Loop) else loop
        yield from _walked(getattr(one, "body", []), inner)
        for name in ("orelse", "finalbody"):
            yield from _walked(getattr(one, name, []), loop)
        for handler in getattr(one, "handlers", []):
            yield from _walked(handler.body, loop)


# Whether it fits who stands where --------------------------------------------------------------------------------


def _odds(node: Block, scope: Scope, inside: list[int], out: list[int], leaves: bool) -> tuple[int, str]:
    """How sure it is that this statement has these ranks inside and those out, and what of the rank decides it."""
    decides = _decides(node)
    if decides is None or not scope.depends(decides):
        return UNLIKELY, ""
    ranks, why = [*inside, *out], why_of(decides, scope, inside, out)
    if isinstance(node, (ast.For, ast.AsyncFor)):
        turns = _turns(decides, scope, ranks)
        return MAYBE if turns is None else _more(turns, inside, out), why
    can = {rank: _can_hold(decides, scope, rank) for rank in ranks}
    if None not in can.values():
        takes = out if leaves else inside
        return FITS if all(can[rank] is (rank in takes) for rank in can) else UNLIKELY, why
    bounds = _bounds(decides, scope, ranks)
    if bounds is None:
        return MAYBE, why
    if leaves and isinstance(node, ast.If) and isinstance(node.body[-1], ast.Continue):
        return FITS if not {bounds[one] for one in inside} & {bounds[one] for one in out} else UNLIKELY, why
    return _more(bounds, inside, out), why


def _more(number: Mapping[int, int], inside: list[int], out: list[int]) -> int:
    """A rank that has gone on had fewer turns than one that is still inside."""
    return FITS if max(number[rank] for rank in out) < min(number[rank] for rank in inside) else UNLIKELY


def _decides(node: Block) -> ast.expr | None:
    """What is asked before each turn, or once."""
    return node.iter if isinstance(node, (ast.For, ast.AsyncFor)) else None if isinstance(node, ast.Try) else node.test


def alike(node: Block, scope: Scope) -> bool:
    """True for a loop over a plain range that nothing leaves, and for an `if` that asks for the turn of such a loop."""
    decides = _decides(node)
    if isinstance(node, ast.If):
        return _asks_for_the_turn(node.test, scope)
    leaves = (isinstance(one, LEAVES) and not isinstance(one, ast.Continue) for one in ast.walk(node))
    return isinstance(node, ast.For) and decides is not None and _is_plain(decides, scope) and not any(leaves)


def _is_plain(decides: ast.expr, scope: Scope) -> bool:
    """True for `range(epochs)` that doesn't depend on the rank: it turns equally often on each."""
    return isinstance(decides, ast.Call) and called_name(decides) == "range" and not scope.depends(decides)


def _asks_for_the_turn(test: ast.expr, scope: Scope) -> bool:
    """True for `step % 10 == 0`, of numbers alone that are the same on all ranks in the same turn."""
    parts = [*ast.walk(test)]
    named = {part.id for part in parts if isinstance(part, ast.Name)}
    turns = {
        name
        for name in named
        for one in [scope.assigned(name)]
        if one and not scope.depends(ast.Name(name)) and all(_counts(known, name) for known in one)
    }
    same = {
        name
        for name in named - turns
        if scope.value(ast.Name(name), 0) is not None and not scope.depends(ast.Name(name))
    }
    plain = not any(isinstance(part, (ast.Call, ast.Attribute, ast.Subscript)) for part in parts)
    return bool(turns) and plain and turns | same == named


def _counts(one: Assigned, name: str) -> bool:
    """Whether the name counts the turns of a loop: `for name in range(…)`."""
    return one.repeats and isinstance(one.value, ast.Call) and called_name(one.value) == "range"


def _can_hold(test: ast.expr, scope: Scope, rank: int) -> bool | None:
    """Of `step == 1 and rank == 2`, what is known decides; None if nothing is."""
    parts = test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]
    known = [None if (value := scope.value(part, rank)) is None else bool(value) for part in parts]
    return False if False in known else True if True in known else None


def _bounds(test: ast.expr, scope: Scope, ranks: list[int]) -> dict[int, int] | None:
    """The number on each rank that something else is compared with, as in `step == batches`."""
    match test:
        case ast.Compare(left=left, ops=[ast.Eq() | ast.NotEq() | ast.GtE() | ast.Gt() | ast.Lt() | ast.LtE()],
                         comparators=[right]):  # fmt: skip
            for one, other in ((right, left), (left, right)):
                if not scope.depends(other) and (found := _numbers(one, scope, ranks)):
                    return found
    return None


def _turns(over: ast.expr, scope: Scope, ranks: list[int]) -> dict[int, int] | None:
    """How often a loop turns on each rank, as far as a number says so: `range(batches)`, `data[:batches]`."""
    match over:
        case ast.Call(args=[first, *_]) if called_name(over) in ("enumerate", "tqdm", "list", "iter"):
            return _turns(first, scope, ranks)
        case ast.Call(args=[stop]) if called_name(over) == "range":
            return _numbers(stop, scope, ranks)
        case ast.Call(args=[start, stop]) if called_name(over) == "range":
            begin, end = _numbers(start, scope, ranks), _numbers(stop, scope, ranks)
            return {rank: end[rank] - begin[rank] for rank in ranks} if begin and end else None
        case ast.Call(args=[some, stop]) if called_name(over) == "islice" and not scope.depends(some):
            return _numbers(stop, scope, ranks)
        case ast.Subscript(value=some, slice=ast.Slice(lower=None, upper=ast.expr() as stop, step=None)):
            return None if scope.depends(some) else _numbers(stop, scope, ranks)
    return None


def _numbers(one: ast.expr, scope: Scope, ranks: list[int]) -> dict[int, int] | None:
    found = {rank: scope.value(one, rank) for rank in ranks}
    return found if all(isinstance(known, int) for known in found.values()) else None


def why_of(decides: ast.expr, scope: Scope, inside: list[int], out: list[int]) -> str:
    """Where the name that depends on the rank gets its value: `batches` is 8 on rank 0 and 5 on rank 1 (line 7)."""
    for one in ast.walk(decides):
        if not (isinstance(one, ast.Name) and one.id != "rank" and scope.depends(one)):
            continue
        found: list[Assigned] = scope.assigned(one.id)
        depend = [known for known in found if scope.depends(known.value) or scope.value(known.value, 0) is None]
        lines = " and ".join(str(line) for line in dict.fromkeys(known.line for known in depend[:2]))
        where = f" (line{'s' * (' ' in lines)} {lines})" if lines else ""
        sides = [{repr(scope.value(one, rank)) for rank in side} for side in (inside, out)]
        if all(len(side) == 1 for side in sides) and "None" not in sides[0] | sides[1] and sides[0] != sides[1]:
            first, second = (side.pop() for side in sides)
            return f"`{one.id}` is {first} on {names(inside)} and {second} on {names(out)}{where}."
        return f"`{one.id}` depends on the rank{where}."
    return ""


# In words ----------------------------------------------------------------------------------------------------------


def in_words(found: Parting, source: Source, past: bool) -> str:
    """Who took which branch."""
    node, inside, out = found.node, found.inside, found.out
    at = header(node, source)
    if isinstance(node, ast.If):
        takers, others = (out, inside) if found.leaves else (inside, out)
        if found.leaves and found.odds < SURE and isinstance(node.test, ast.BoolOp):
            said = f"Only {names(takers)} can take the branch {at}."
        elif found.leaves and found.odds < FITS:
            said = f"Whether a rank takes the branch {at} depends on the rank."
        elif found.odds < FITS and not found.leaves and not found.certain:
            said = _stand(found, "branch", at, past)
        else:
            said = f"{names(takers).capitalize()} took the branch {at}; {names(others)} did not."
    elif isinstance(node, ast.Try) and found.odds == SURE:
        handler = source.lines[line_of(found) - 1].partition("  #")[0].strip().removesuffix(":")
        said = f"{names(out).capitalize()} had an error, caught at line {line_of(found)} ({handler}); {names(inside)} had none."
    else:
        said = _stand(found, "block" if isinstance(node, ast.Try) else "loop", at, past)
    return f"{said} {found.why}".rstrip()


def line_of(found: Parting) -> int:
    """The line that the words are about."""
    caught = swallowing(found.node) if isinstance(found.node, ast.Try) and found.odds == SURE else []
    return caught[0].lineno if caught else found.node.lineno


def placed(said: str, place: Frame, file: str) -> str:
    """What is said of a line, with its file if that isn't the one that the reader has in mind."""
    return said if place.file == file else said.replace(f" at line {place.line} (", f" at {place.short} (", 1)


def _stand(found: Parting, block: str, at: str, past: bool) -> str:
    """Who is inside and who isn't, whether or not they have been."""
    one, more = ("was", "were") if past else ("is", "are")
    are = (one_or_more(ranks, one, more) for ranks in (found.inside, found.out))
    left = "" if block == "loop" else f", or {one_or_more(found.out, 'has', 'have')} left it"
    return (
        f"{names(found.inside).capitalize()} {next(are)} inside the {block} {at}; "
        f"{names(found.out)} {next(are)} not{left}."
    )


def header(node: Block, source: Source) -> str:
    """`at line 7 (if rank == 0)`."""
    header = source.lines[node.lineno - 1].partition("  #")[0].strip()
    if not header.endswith(":") or node.body[0].lineno == node.lineno:  # the rest is on other lines, or all on this one
        header = ast.unparse(node).partition("\n")[0]
    return f"at line {node.lineno} ({textwrap.shorten(header.removesuffix(':'), 60, placeholder=' …')})"
