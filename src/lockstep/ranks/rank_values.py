"""What an expression of the ranks' source is on each rank, and whether it depends on the rank at all.

It is read from the source, and nothing of it is executed. A name has what is assigned to it in its function, in the
file's outermost code, or as the argument of the call that a rank stands in. What can't be told is None.
"""

from __future__ import annotations

import ast
import functools
import linecache
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

MOST_PARTS = 50_000  # Of expressions that are looked at
DEEPEST = 8  # Assignments that one expression is followed through
RANKS = ("rank", "global_rank", "local_rank", "RANK", "LOCAL_RANK")
EQUAL_ON_ALL = (
    "all_reduce", "all_reduce_", "broadcast", "broadcast_object_list", "all_gather", "all_gather_object",
    "all_gather_into_tensor", "DistributedSampler", "DistributedDataParallel", "DDP", "device", "Generator", "get_world_size",
)  # fmt: skip
"""What these return or fill is the same on all ranks, or, as a DistributedSampler, as long on each."""
COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.In: lambda one, some: one in some, ast.NotIn: lambda one, some: one not in some,
}  # fmt: skip
COMPUTE: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}  # fmt: skip
CALCULATE: dict[str, Callable[..., Any]] = {"int": int, "bool": bool, "abs": abs, "min": min, "max": max}

Function = ast.FunctionDef | ast.AsyncFunctionDef
Loop = ast.For | ast.AsyncFor | ast.While
Guards = tuple[tuple[ast.expr, bool], ...]


class TooLong(Exception):
    """The source is too long to be read on."""


@dataclass(frozen=True)
class Assigned:
    """A value that a name gets, under the conditions around it; `repeats` is true within a loop or of a `part` of a value."""

    value: ast.expr
    line: int
    guards: Guards = ()
    repeats: bool = False
    part: bool = False


class Source:
    """A file: its functions, and what its names get, each looked for once. It is read as far as `left` allows."""

    def __init__(self, text: str, file: str = "") -> None:
        """Raises SyntaxError, ValueError or RecursionError for what can't be read."""
        self.file = file
        self.tree, self.lines = ast.parse(text), text.splitlines()
        self.functions = [node for node in ast.walk(self.tree) if isinstance(node, Function)]
        self.left = MOST_PARTS
        self._assigned: dict[ast.AST, dict[str, list[Assigned]]] = {}
        self._filled: dict[ast.AST, set[str]] = {}
        self._stores: dict[ast.AST, Counter[str]] = {}

    @functools.cached_property
    def calls(self) -> dict[str, list[ast.Call]]:
        """All calls, by the name of what is called; of several in one expression the outermost comes first."""
        found: dict[str, list[ast.Call]] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call):
                found.setdefault(called_name(node), []).append(node)
        return found

    def filled(self, home: Function | ast.Module) -> set[str]:
        """The names whose value is the same on all ranks, by a collective of this function that fills it."""
        if home not in self._filled:
            calls = (node for node in ast.walk(home) if isinstance(node, ast.Call))
            given = (call.args[0] for call in calls if call.args and called_name(call) in EQUAL_ON_ALL)
            self._filled[home] = {part.id for one in given for part in ast.walk(one) if isinstance(part, ast.Name)}
        return self._filled[home]

    @functools.cached_property
    def declared(self) -> set[str]:
        """The names that a function has from outside, and may change there."""
        found = (node.names for node in ast.walk(self.tree) if isinstance(node, ast.Global | ast.Nonlocal))
        return {name for names in found for name in names}

    @functools.cached_property
    def added(self) -> set[ast.expr]:
        """What is added to a value that stays: `total += loss`."""
        return {node.value for node in ast.walk(self.tree) if isinstance(node, ast.AugAssign)}

    def stores(self, home: Function | ast.Module) -> Counter[str]:
        """How often each name gets something in the code of a function or of the file itself, in whatever way."""
        if home not in self._stores:
            names = (node for node in own(home) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
            self._stores[home] = Counter(node.id for node in names)
        return self._stores[home]

    def assigned(self, home: Function | ast.Module, name: str) -> list[Assigned]:
        """What a name gets in the code of a function or of the file itself, but not in functions inside."""
        if home not in self._assigned:
            found = self._assigned[home] = {}
            for known, one in _assignments(home.body, (), False):
                found.setdefault(known, []).append(one)
        return self._assigned[home].get(name, [])

    @classmethod
    def of(cls, file: str) -> Source:
        """The source of a file, as `linecache` has it. Raises SyntaxError, RecursionError, ValueError."""
        return cls("".join(linecache.getlines(file)), file)

    def home(self, line: int) -> Function | ast.Module:
        """The innermost function that a line is in, or the file's outermost code."""
        return next(iter(self.around(line)), self.tree)

    def around(self, line: int) -> list[Function]:
        """The functions that a line is in, the innermost first."""
        found = [one for one in self.functions if one.lineno <= line <= (one.end_lineno or line)]
        return sorted(found, key=lambda one: -one.lineno)

    def count(self) -> None:
        """One more part is read."""
        self.left -= 1
        if self.left < 0:
            raise TooLong


@dataclass(frozen=True)
class Scope:
    """The names that a function can see; without a function, those of the file. `size` is the number of ranks."""

    source: Source
    size: int
    function: Function | None = None
    arguments: Mapping[str, tuple[ast.expr, Scope]] = field(default_factory=dict)
    depth: int = 0
    known: dict[str, bool] = field(default_factory=dict)

    @property
    def home(self) -> Function | ast.Module:
        return self.function or self.source.tree

    def called(self, call: ast.Call, function: Function) -> Scope:
        """The scope of a function of the file that this one calls so."""
        named = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
        named = named[isinstance(call.func, ast.Attribute) and named[:1] == ["self"] :]
        given = {name: (value, self) for name, value in zip(named, call.args, strict=False)}
        given |= {one.arg: (one.value, self) for one in call.keywords if one.arg}
        starred = any(isinstance(one, ast.Starred) for one in call.args)
        return Scope(self.source, self.size, function, {} if starred else given, self.depth + 1)

    def assigned(self, name: str) -> list[Assigned]:
        """What the name gets in this function, or else in one around it or in the file's outermost code."""
        homes = [*(self.source.around(self.function.lineno) if self.function else []), self.source.tree]
        return next(filter(None, (self.source.assigned(home, name) for home in homes)), [])

    def given(self, name: str) -> tuple[ast.expr, Scope] | None:
        """What the call gives for a name that is an argument and nothing else, and the scope of the call."""
        return self.arguments.get(name) if not self.source.assigned(self.home, name) else None

    def deeper(self) -> Scope:
        """The same, one assignment further."""
        return replace(self, depth=self.depth + 1)

    # What an expression is -------------------------------------------------------------------------------------

    def value(self, one: ast.expr, rank: int) -> Any:
        """A number, a truth value or a text; None for what can't be told. Raises TooLong."""
        try:
            return self._value(one, rank)
        except (TypeError, ValueError, ArithmeticError):
            return None

    def _value(self, one: ast.expr, rank: int) -> Any:
        self.source.count()

        def of(part: ast.expr) -> Any:
            return self._value(part, rank)

        match one:
            case ast.Constant(value=int() | str() as known):
                return known
            case ast.Name(id=name):
                return self._named(name, rank, getattr(one, "lineno", 0))
            case ast.Attribute(attr="rank"):
                return rank
            case ast.UnaryOp(op=ast.Not(), operand=part):
                return None if (known := of(part)) is None else not known
            case ast.UnaryOp(op=ast.USub(), operand=part):
                return None if (known := of(part)) is None else -known
            case ast.BoolOp(op=op, values=parts):
                decides = isinstance(op, ast.Or)
                values = [None if (known := of(part)) is None else bool(known) for part in parts]
                return decides if decides in values else None if None in values else not decides
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                if isinstance(right, (ast.Tuple, ast.List, ast.Set)):
                    several = [of(part) for part in right.elts]
                    known = of(left)
                    return None if known is None or None in several else COMPARE[type(op)](known, several)
                compare = COMPARE.get(type(op))
                if compare is None or (mine := of(left)) is None or (theirs := of(right)) is None:
                    return None
                return compare(mine, theirs)
            case ast.BinOp(op=op, left=left, right=right):
                compute = COMPUTE.get(type(op))
                if compute is None or not isinstance(mine := of(left), int) or not isinstance(theirs := of(right), int):
                    return None
                return compute(mine, theirs)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return None if (known := of(test)) is None else of(body if known else orelse)
            case ast.Call():
                return self._returned(one, rank)
            case ast.Subscript(slice=ast.Constant(value="RANK")) if _is_environment(one.value):
                return str(rank)
        return None

    def _named(self, name: str, rank: int, line: int) -> Any:
        if self.depth > DEEPEST:
            return None
        if given := self.given(name):
            value, outside = given
            known = replace(outside, depth=self.depth + 1)._value(value, rank)
            return rank if known is None and name == "rank" else known
        found = self._before(name, line)
        if not found:
            return rank if name == "rank" else self.size if name == "world_size" else None
        for one in reversed(found):
            holds = [self.deeper()._value(test, rank) for test, _ in one.guards]
            if one.repeats or any(known is None for known in holds):
                return rank if name == "rank" and not _is_of_group(one.value) and len(found) == 1 else None
            if all(bool(known) is side for known, (_, side) in zip(holds, one.guards, strict=True)):
                known = self.deeper()._value(one.value, rank)
                return rank if known is None and name == "rank" and not _is_of_group(one.value) else known
        return None

    def _before(self, name: str, line: int) -> list[Assigned]:
        """What the name may have got by this line; nothing if a loop comes back to it with what it gets after."""
        found = self.assigned(name)
        if not line or not self.source.assigned(self.home, name):
            return found
        later = [one.line for one in found if one.line > line]
        if later:  # a loop that has both lines has the nearest of the later ones
            loops = (node for node in ast.walk(self.home) if isinstance(node, Loop))
            if any(loop.lineno <= line and min(later) <= (loop.end_lineno or 0) for loop in loops):
                return []
        return [one for one in found if one.line <= line]

    def _returned(self, call: ast.Call, rank: int) -> Any:
        name, args = called_name(call), call.args
        if name in ("get_rank", "get_world_size") and not args and not call.keywords:
            return rank if name == "get_rank" else self.size
        if name in ("is_initialized", "is_available") and _is_distributed(call):
            return True
        if name in ("get", "getenv") and args and isinstance(args[0], ast.Constant) and args[0].value == "RANK":
            return str(rank) if name == "getenv" or _is_environment(getattr(call.func, "value", call)) else None
        if name in CALCULATE and isinstance(call.func, ast.Name) and args:
            values = [self._value(one, rank) for one in args]
            return None if None in values else CALCULATE[name](*values)
        function = self._function(call)
        if function is None or self.depth > DEEPEST:
            return None
        returns = [node.value for node in own(function) if isinstance(node, ast.Return)]
        return self.called(call, function)._value(returns[0], rank) if len(returns) == 1 and returns[0] else None

    def _function(self, call: ast.Call) -> Function | None:
        """The function of the file that is called."""
        named = call.func.id if isinstance(call.func, ast.Name) else ""
        found = [node for node in self.source.functions if node in self.source.tree.body and node.name == named]
        return found[0] if len(found) == 1 else None

    # Whether it depends on the rank ----------------------------------------------------------------------------

    def depends(self, one: ast.AST | None) -> bool:
        """True if it is made from the rank, so that it may differ between ranks. Raises TooLong."""
        self.source.count()
        if one is None or self.depth > DEEPEST:
            return False
        match one:
            case ast.Name(id=name):
                return self._depends_named(name)
            case ast.Attribute(attr=name):
                return name in RANKS or self.depends(one.value)
            case ast.Call():
                return self._depends_called(one)
            case ast.Subscript(slice=ast.Constant(value=str() as key)) if _is_environment(one.value):
                return key in RANKS
            case ast.JoinedStr() | ast.Lambda():
                return False
        return any(map(self.depends, ast.iter_child_nodes(one)))

    def _depends_named(self, name: str) -> bool:
        if name in ("rank", "global_rank", "local_rank"):
            return True
        if name not in self.known:
            self.known[name] = False  # of a name that is made from itself, the rest decides
            self.known[name] = name not in self.source.filled(self.home) and self._depends_assigned(name)
        return self.known[name]

    def _depends_assigned(self, name: str) -> bool:
        if given := self.given(name):
            value, outside = given
            return replace(outside, depth=self.depth + 1).depends(value)
        deeper = self.deeper()
        return any(
            deeper.depends(part)
            for one in self.assigned(name)
            for part in (one.value, *(test for test, _ in one.guards))
        )

    def _depends_called(self, call: ast.Call) -> bool:
        name = called_name(call)
        if name in ("get_rank", "get_local_rank", "get_node_local_rank"):
            return True
        if name in ("get", "getenv") and call.args and isinstance(call.args[0], ast.Constant):
            return call.args[0].value in RANKS
        if name in EQUAL_ON_ALL:
            return False
        if isinstance(call.func, ast.Attribute) and self.depends(call.func.value):
            return True
        if name in ("to", "cuda"):
            return False
        function = self._function(call)
        if function is not None and self.depth < DEEPEST:
            inside = self.called(call, function)
            return any(inside.depends(node.value) for node in own(function) if isinstance(node, ast.Return))
        return any(map(self.depends, (*call.args, *(one.value for one in call.keywords))))


def called_name(call: ast.Call) -> str:
    """`get_rank` of `dist.get_rank()`."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _is_distributed(call: ast.Call) -> bool:
    """`dist.is_initialized()`, of a rank that communicates."""
    return isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) in ("dist", "torch.distributed")


def _is_environment(one: ast.expr) -> bool:
    return (isinstance(one, ast.Attribute) and one.attr == "environ") or (
        isinstance(one, ast.Name) and one.id == "environ"
    )


def _is_of_group(value: ast.expr) -> bool:
    """True for `dist.get_rank(group)`: a rank's number in another group."""
    return (
        isinstance(value, ast.Call)
        and called_name(value) in ("get_rank", "get_local_rank")
        and bool(value.args or value.keywords)
    )


def own(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes below this one, without those of the functions and classes in it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (Function, ast.ClassDef, ast.Lambda)):
            yield child
            yield from own(child)


def _assignments(block: list[ast.stmt], guards: Guards, repeats: bool) -> Iterator[tuple[str, Assigned]]:
    """All names that get a value in a block, in order."""
    for one in block:
        match one:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    yield from _targets(target, value, guards, repeats)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                yield from _targets(target, value, guards, repeats)
            case ast.AugAssign(target=target, value=value):
                yield from _targets(target, value, guards, True)
            case ast.For(target=target, iter=value) | ast.AsyncFor(target=target, iter=value):
                yield from _targets(target, value, guards, True, part=True)
                yield from _assignments(one.body, guards, True)
                yield from _assignments(one.orelse, guards, repeats)
            case ast.While():
                yield from _assignments(one.body, guards, True)
            case ast.If(test=test):
                yield from _assignments(one.body, (*guards, (test, True)), repeats)
                yield from _assignments(one.orelse, (*guards, (test, False)), repeats)
            case ast.With():
                yield from _assignments(one.body, guards, repeats)
            case ast.Try():
                yield from _assignments([*one.body, *one.orelse, *one.finalbody], guards, repeats)


def _targets(
    target: ast.expr, value: ast.expr, guards: Guards, repeats: bool, part: bool = False
) -> Iterator[tuple[str, Assigned]]:
    if isinstance(target, ast.Name):
        yield target.id, Assigned(value, target.lineno, guards, repeats, part)
    elif isinstance(target, (ast.Tuple, ast.List)):
        values = value.elts if isinstance(value, (ast.Tuple, ast.List)) else []
        paired = len(values) == len(target.elts)
        for number, inner in enumerate(target.elts):
            given = values[number] if paired else value
            yield from _targets(inner, given, guards, repeats or not paired, part or not paired)
