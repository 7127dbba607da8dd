"""Whether a name of the source means the same tensor on every rank, so that one of each rank belongs together.

What comes from an object, a subscript, a part of a value, or from a call that gets the rank, may be another one on each rank,
and mean to be. Only a plain name counts whose every assignment can't choose by the rank. Nothing of the source is executed.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Sequence

from .rank_values import DEEPEST, EQUAL_ON_ALL, RANKS, Assigned, Function, Scope, called_name

FRESH = (
    "ones", "zeros", "empty", "full", "tensor", "as_tensor", "arange", "rand", "randn", "randint", "ones_like", "zeros_like",
    "empty_like", "full_like", "rand_like", "randn_like",
)  # fmt: skip
"""Functions of torch that make a tensor: its numbers may come from the rank."""
NUMBERS = ("int", "float", "abs", "min", "max", "len", "round", "sum")
LOOKS = ("list", "tuple", "sorted", "reversed", "set", "len", "enumerate", "print")
"""What doesn't change the dictionary that it is given."""


def is_same(operand: ast.expr, scope: Scope) -> bool:
    """Whether this is a name that means the same on every rank for sure. Raises TooLong."""
    return isinstance(operand, ast.Name) and _is_bound(operand.id, scope) and _same_name(operand.id, scope)


def entry(operand: ast.expr, loop: ast.For, scope: Scope, called: Collection[str]) -> bool:
    """Whether the operand of a call in a loop over names is what a dictionary has for the name, the same on every rank, or
    the parameter of that name.

    `called` are the functions that got the dictionary on the way to the loop.
    """
    turn, value = (*loop.target.elts, None)[:2] if isinstance(loop.target, ast.Tuple) else (loop.target, None)
    variables = {part.id for part in ast.walk(loop.target) if isinstance(part, ast.Name)}
    inside = (node for one in loop.body for node in ast.walk(one))
    if any(isinstance(node, ast.Name) and node.id in variables and isinstance(node.ctx, ast.Store) for node in inside):
        return False
    match operand, loop.iter:
        case ast.Subscript(value=table, slice=ast.Name(id=key)), _ if value is None:
            return isinstance(turn, ast.Name) and key == turn.id and _is_table(table, scope, called)
        case ast.Name(id=name), ast.Call(func=ast.Attribute(value=table, attr="items")):
            return isinstance(value, ast.Name) and name == value.id and _is_table(table, scope, called)
        case _, ast.Call(func=ast.Attribute(attr="named_parameters")):
            if isinstance(operand, ast.Attribute) and operand.attr in ("grad", "data"):
                operand = operand.value
            return isinstance(value, ast.Name) and isinstance(operand, ast.Name) and operand.id == value.id
    return False


def goes_by(operand: ast.expr, loop: ast.For, turn: str) -> bool:
    """Whether the operand of a call in a loop has the loop's variable, or gets in it what a table has under that."""
    read = {one.id for one in ast.walk(operand) if isinstance(one, ast.Name)}
    stores = [
        one for one in ast.walk(loop) if isinstance(one, ast.Assign) and read & set(map(ast.unparse, one.targets))
    ]
    entries = [one.slice for store in stores for one in ast.walk(store.value) if isinstance(one, ast.Subscript)]
    return turn in read or any(isinstance(one, ast.Name) and one.id == turn for one in entries)


def is_set(one: ast.expr, scope: Scope, deep: int = 0) -> bool:
    """Whether this is a set, or has the order of one: a list made of it that nothing in the source may have sorted."""
    match one:
        case ast.Call(func=ast.Name(id="list" | "tuple" | "reversed" as name), args=[inner]):
            return _is_builtin(name, scope) and is_set(inner, scope, deep)
        case ast.DictComp(generators=[ast.comprehension(iter=inner)]):
            return is_set(inner, scope, deep)
        case ast.Call(func=ast.Attribute(value=ast.Name(id="dict"), attr="fromkeys"), args=[inner, *_]):
            return is_set(inner, scope, deep)
        case ast.Name(id=name) if deep < DEEPEST:
            if given := scope.given(name):
                home, values = scope.home, [given]
            else:
                home, found = next(_homes(name, scope), (scope.source.tree, []))
                if len(found) < scope.source.stores(home)[name] or any(part.part for part in found):
                    return False
                values = [(part.value, scope) for part in found]
            kept = all(_is_proper_set(value, inside, deep + 1) for value, inside in values) or _keeps_order(name, home)
            return bool(values) and kept and all(is_set(value, inside, deep + 1) for value, inside in values)
    return _is_proper_set(one, scope, deep)


def _is_proper_set(one: ast.expr, scope: Scope, deep: int) -> bool:
    match one:
        case ast.Set() | ast.SetComp():
            return True
        case ast.Call(func=ast.Name(id="set" | "frozenset" as name)):
            return _is_builtin(name, scope)
        case ast.Call(
            func=ast.Attribute(value=whole, attr="union" | "intersection" | "difference" | "symmetric_difference")
        ):
            return is_set(whole, scope, deep)
        case ast.BinOp(left=left, op=ast.Sub() | ast.BitAnd() | ast.BitOr() | ast.BitXor(), right=right):
            keys = isinstance(left, ast.Call) and isinstance(left.func, ast.Attribute) and left.func.attr == "keys"
            return keys or is_set(left, scope, deep) or is_set(right, scope, deep)
    return False


def _keeps_order(name: str, home: Function | ast.Module) -> bool:
    """Whether nothing in the source can change what this name has, under it or under another."""
    for node in ast.walk(home):
        match node:
            case ast.Assign(value=ast.Name(id=one)) | ast.NamedExpr(value=ast.Name(id=one)) if one == name:
                return False
            case ast.keyword(value=ast.Name(id=one)) if one == name:
                return False
    return _is_only_read(name, home, ())


def _same(one: ast.expr, scope: Scope) -> bool:
    """Whether this is no choice among tensors that the rank makes; numbers may differ between ranks."""
    scope.source.count()
    if scope.depth > DEEPEST:
        return False
    if _is_number(one, scope):
        return True
    match one:
        case ast.Name(id=name):
            return _same_name(name, scope)
        case ast.BinOp(left=left, right=right):
            return _same(left, scope) and _same(right, scope)
        case ast.UnaryOp(operand=part):
            return _same(part, scope)
        case ast.Call():
            return _same_call(one, scope)
    return False


def _same_name(name: str, scope: Scope) -> bool:
    if name in scope.source.declared or scope.depth > DEEPEST:
        return False
    home, found = next(_homes(name, scope), (None, []))
    if home is None:
        return True  # torch, or a function
    if name in _parameters(home):
        given = scope.arguments.get(name) if home is scope.home else None
        if given is None or not _same(given[0], given[1]):
            return False
    if len(found) < scope.source.stores(home)[name]:
        return False  # it gets more than assignments: of a `with`, a `:=`, a comprehension
    inside = scope
    if home is not scope.home:
        inside = Scope(scope.source, scope.size, None if isinstance(home, ast.Module) else home)
    found = [one for one in found if one.value not in scope.source.added]
    return all(_same_assigned(name, one, inside.deeper(), alone=len(found) == 1) for one in found)


def _same_assigned(name: str, one: Assigned, scope: Scope, *, alone: bool) -> bool:
    parts = [*ast.walk(one.value)]
    named = {part.id for part in parts if isinstance(part, ast.Name) and _is_bound(part.id, scope)}
    if named == {name} and not one.part and not any(map(_may_choose, parts)):
        return True  # count = mean(count)
    if (
        one.part
        or any(scope.depends(test) for test, _ in one.guards)
        or (isinstance(one.value, ast.Name) and not alone)
    ):
        return False
    return _same(one.value, scope)


def _may_choose(part: ast.AST) -> bool:
    return isinstance(part, ast.IfExp | ast.Subscript) or (
        isinstance(part, ast.Call) and called_name(part) == "get_rank"
    )


def _same_call(call: ast.Call, scope: Scope) -> bool:
    name, given = called_name(call), [*call.args, *(one.value for one in call.keywords)]
    if name in FRESH and isinstance(call.func, ast.Attribute):
        parts = [part for one in given for part in ast.walk(one)]
        calls = (part for part in parts if isinstance(part, ast.Call) and called_name(part) not in NUMBERS)
        return not any(
            map(scope.depends, (*calls, *(part for part in parts if isinstance(part, ast.IfExp | ast.Subscript))))
        )
    if name in EQUAL_ON_ALL:
        return True
    if isinstance(call.func, ast.Attribute):
        given.append(call.func.value)
    return not _asks_for_the_rank(name, scope, set()) and all(
        not scope.depends(one) or (not _is_number(one, scope) and _same(one, scope)) for one in given
    )


def _asks_for_the_rank(name: str, scope: Scope, asked: set[str]) -> bool:
    """Whether a function of the file, or one that it calls, has to do with the rank."""
    functions = [one for one in scope.source.functions if one.name == name and name not in asked]
    asked.add(name)
    for function in functions:
        inside = Scope(scope.source, scope.size, function)
        if any(map(inside.depends, function.body)):
            return True
        calls = (node for node in ast.walk(function) if isinstance(node, ast.Call))
        if any(_asks_for_the_rank(called_name(call), scope, asked) for call in calls):
            return True
    return False


def _is_number(one: ast.expr, scope: Scope) -> bool:
    """A number that the source tells, or what is computed of such."""
    match one:
        case ast.Constant():
            return True
        case ast.BinOp(left=left, right=right):
            return _is_number(left, scope) and _is_number(right, scope)
        case ast.Attribute(attr=name) if name in RANKS:
            return True
    return scope.value(one, 0) is not None


def _is_table(table: ast.expr, scope: Scope, called: Collection[str]) -> bool:
    """Whether this is a dictionary, or one of several, that has the same under each name on every rank."""
    if isinstance(table, ast.Name):
        if not _is_only_read(table.id, scope.home, called):
            return False
        if given := scope.given(table.id):
            return _is_table(*given, called)
        home, found = next(_homes(table.id, scope), (scope.source.tree, []))
        if not found or any(one.part for one in found) or len(found) < scope.source.stores(home)[table.id]:
            return False
        if not _is_only_read(table.id, home, called):
            return False
        values = [one.value for one in found]
        if len(values) == 1 and isinstance(values[0], ast.DictComp):
            return _same(values[0].value, scope.deeper())
        return _are_tables(values, scope.deeper())
    return _are_tables([table], scope)


def _are_tables(given: Sequence[ast.expr], scope: Scope) -> bool:
    """Whether these are dictionaries, or choices among some, of which no two have another thing under the same name."""
    tables: list[ast.expr] = []
    for table in given:
        match table:
            case ast.Subscript(value=ast.Dict() as choice):
                tables.append(choice)
            case ast.IfExp(body=ast.Dict() as one, orelse=ast.Dict() as other):
                tables += one, other
            case ast.Dict():
                tables.append(table)
            case _:
                return False
    entries: dict[str, str] = {}
    for one in (part for table in tables for part in ast.walk(table) if isinstance(part, ast.Dict)):
        for key, value in zip(one.keys, one.values, strict=True):
            text = ast.unparse(value)
            if key is None or entries.setdefault(ast.unparse(key), text) != text:
                return False
            if not isinstance(value, ast.Dict) and not _same(value, scope):
                return False
    return True


def _is_only_read(name: str, home: Function | ast.Module, called: Collection[str]) -> bool:
    for node in ast.walk(home):
        match node:
            case ast.Subscript(value=ast.Name(id=one)) if one == name and not isinstance(node.ctx, ast.Load):
                return False
            case ast.Attribute(value=ast.Name(id=one), attr=attr) if one == name and attr not in (
                "items",
                "keys",
                "values",
            ):
                return False
            case ast.Call(args=args) if called_name(node) not in (*LOOKS, *called):
                if any(isinstance(one, ast.Name) and one.id == name for one in args):
                    return False
            case ast.AugAssign(target=ast.Name(id=one)) if one == name:
                return False
    return True


def _is_builtin(name: str, scope: Scope) -> bool:
    """Whether nothing in the file has this name."""
    made = (
        getattr(node, "asname", None) or node.name
        for node in ast.walk(scope.source.tree)
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.alias)
    )
    return not _is_bound(name, scope) and name not in made


def _is_bound(name: str, scope: Scope) -> bool:
    return next(_homes(name, scope), None) is not None


def _homes(name: str, scope: Scope) -> Iterator[tuple[Function | ast.Module, list[Assigned]]]:
    """Where the name gets something, from the innermost function on, and what is assigned to it there."""
    around = scope.source.around(scope.function.lineno) if scope.function else []
    for home in (*around, scope.source.tree):
        if name in _parameters(home) or name in scope.source.stores(home):
            yield home, scope.source.assigned(home, name)


def _parameters(home: Function | ast.Module) -> set[str]:
    if isinstance(home, ast.Module):
        return set()
    return {node.arg for node in ast.walk(home.args) if isinstance(node, ast.arg)}
