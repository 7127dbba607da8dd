"""The ways by which code may come past a line of its own without running it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from .rank_values import Function, Loop, called_name

LEAVES = (ast.Continue, ast.Break, ast.Return, ast.Raise)
Block = ast.If | Loop | ast.Try
Leaves = tuple[type[ast.stmt], ...]
CALLED_ANYWAY = ("no_grad", "inference_mode", "enable_grad", "staticmethod", "classmethod", "record")
"""Decorators that call the function each time."""

LETS_OUT = ("autocast", "nullcontext", "record_function", "no_sync", "set_grad_enabled", "device", "stream", "open")
"""Blocks that no exception is swallowed by."""


class Unsure(Exception):
    """There may be another way past the call."""


def within(block: Sequence[ast.stmt | ast.expr], line: int) -> bool:
    """Whether a line is in this block."""
    return bool(block) and block[0].lineno <= line <= (block[-1].end_lineno or block[-1].lineno)


def missing(block: Sequence[ast.stmt], line: int, leaves: Leaves, there: int) -> Iterator[tuple[Block, bool]]:
    """The statements by which a rank may miss a line of this block, and whether it takes their branch then."""
    for one in block:
        if not within([one], line):
            yield from _leaving(one, leaves)
            continue
        if isinstance(one, ast.Try) and within(one.body, line):
            if there and any(
                within(some, there) for some in (one.orelse, one.finalbody, *(each.body for each in one.handlers))
            ):
                raise Unsure
            if swallowing(one) and not (there and within(one.body, there)):
                yield one, True
            yield from missing(one.body, line, leaves, there)
            return
        if isinstance(one, (Function, ast.ClassDef)) or hasattr(one, "handlers") or hasattr(one, "cases"):
            raise Unsure
        arms = [getattr(one, name, []) for name in ("body", "orelse")]
        if arm := next((arm for arm in arms if within(arm, line)), None):
            if _may_swallow(one):
                raise Unsure
            if isinstance(one, Block) and not (there and within(arm, there)):
                if there and (within([one], there) or isinstance(arm[-1], LEAVES)):  # each has a call of its own
                    raise Unsure
                yield one, arm is not one.body
            yield from missing(arm, line, leaves, there)
        return


def _leaving(one: ast.stmt, leaves: Leaves) -> Iterator[tuple[Block, bool]]:
    """The `if`s in a statement that leave the block around it, and whether by their branch or by the `else`."""
    if isinstance(one, (Function, ast.ClassDef)):
        return
    if isinstance(one, Loop):
        leaves = tuple(kind for kind in leaves if kind in (ast.Return, ast.Raise))
    for handler in getattr(one, "handlers", []):
        for inner in handler.body:
            yield from (
                [(one, True)] if isinstance(inner, leaves) and isinstance(one, ast.Try) else _leaving(inner, leaves)
            )
    for name in ("body", "orelse", "finalbody", "cases"):
        for inner in getattr(one, name, []):
            if not isinstance(inner, leaves):
                yield from _leaving(inner, leaves)
            elif isinstance(one, ast.If):
                yield one, name == "body"
            else:
                raise Unsure


def swallowing(one: ast.Try) -> list[ast.ExceptHandler]:
    """The `except`s after which the code goes on."""
    return [handler for handler in one.handlers if not ends(handler.body[-1])]


def ends(one: ast.stmt) -> bool:
    """True for what raises an error or ends the process."""
    call = one.value if isinstance(one, ast.Expr) else None
    return isinstance(one, ast.Raise) or (isinstance(call, ast.Call) and called_name(call) in ("exit", "_exit", "quit"))


def may_catch(home: ast.AST, line: int, beyond: int = 0) -> bool:
    """Whether an error at this line may be caught in the same function, which goes on after it; at the line `beyond`."""
    around = (one for one in ast.walk(home) if isinstance(one, (ast.Try, ast.With)) and within(one.body, line))
    return any(_may_swallow(one) and not (beyond and within(one.body, beyond)) for one in around)


def _may_swallow(one: ast.stmt) -> bool:
    """True for a `try` with an `except`, and for a `with` unless it is known to let errors out."""
    if isinstance(one, ast.With):
        return not all(plain_name(item.context_expr) in (*CALLED_ANYWAY, *LETS_OUT) for item in one.items)
    return bool(getattr(one, "handlers", ()))


def plain_name(one: ast.expr) -> str:
    """`no_grad` of `torch.no_grad()`."""
    return ast.unparse(one).partition("(")[0].rpartition(".")[2]
