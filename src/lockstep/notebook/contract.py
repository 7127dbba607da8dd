"""Show what an exercise asks for: its functions' signatures and docstrings, as they stand in the learner's file."""

from __future__ import annotations

import ast
import os
import textwrap
from pathlib import Path

from ..grading.course import find


def contract(exercise: str, *functions: str) -> None:
    """Print the contract of `functions` (default: the one named like the exercise) from `exercises/<exercise>.py`."""
    file = _file(exercise)
    tree = ast.parse(file.read_text(encoding="utf-8"))
    print(f"exercises/{exercise}.py")
    for name in functions or (exercise,):
        print()
        print(_contract(next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)))


def _contract(node: ast.FunctionDef) -> str:
    arguments = ast.unparse(node.args)
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    head = f"def {node.name}({arguments}){returns}:"
    if len(head) > 100:
        each = [ast.unparse(one) for one in _arguments(node)]
        head = f"def {node.name}(\n" + "".join(f"    {one},\n" for one in each) + f"){returns}:"
    return head + "\n" + textwrap.indent(f'"""{ast.get_docstring(node)}\n"""', "    ")


def _arguments(node: ast.FunctionDef) -> list[ast.arguments]:
    """The arguments one by one, each as an argument list of its own, so that its default is printed with it."""
    split: list[ast.arguments] = []
    plain, defaults = node.args.args, node.args.defaults
    for index, argument in enumerate(plain):
        default = index - (len(plain) - len(defaults))
        split.append(_single(args=[argument], defaults=defaults[default : default + 1] if default >= 0 else []))
    if node.args.kwonlyargs:
        split.append(_single(vararg=ast.arg("")))
    for argument, value in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True):
        split.append(_single(args=[argument], defaults=[value] if value is not None else []))
    return split


def _single(
    args: list[ast.arg] | None = None, defaults: list[ast.expr] | None = None, vararg: ast.arg | None = None
) -> ast.arguments:
    return ast.arguments(posonlyargs=[], args=args or [], vararg=vararg, kwonlyargs=[], kw_defaults=[], kwarg=None,
                         defaults=defaults or [])  # fmt: skip


def _file(exercise: str) -> Path:
    """The learner's file; where outputs are compared, the reference, whose contract is the same."""
    told = os.environ.get("LOCKSTEP_SUBMISSION")
    folder = Path(told) if told else find().exercises
    return folder / f"{exercise}.py"
