"""Show what an exercise asks for: signatures and docstrings, from the learner's file."""

from __future__ import annotations

import ast
import os
from pathlib import Path

from ..course import find


def contract(exercise: str, *functions: str) -> None:
    """Print the contract of `functions` (default: the one named like the exercise) from `exercises/<exercise>.py`.

    A class is shown with those of its methods that have a docstring and no private name.
    """
    text = _file(exercise).read_text(encoding="utf-8")
    defined = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    print(f"exercises/{exercise}.py")
    for name in functions or (exercise,):
        node = defined[name]
        print("", *_head(text, node), sep="\n")
        for method in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(method, ast.FunctionDef) and _is_asked_for(method):
                print("", *_head(text, method), sep="\n")


def _is_asked_for(method: ast.FunctionDef) -> bool:
    private = method.name.startswith("_") and not method.name.startswith("__")
    return not private and ast.get_docstring(method) is not None


def _head(text: str, node: ast.FunctionDef | ast.ClassDef) -> list[str]:
    """The lines from the name (or its decorators) to the end of the docstring."""
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return text.splitlines()[first - 1 : node.body[0].end_lineno]


def _file(exercise: str) -> Path:
    """The learner's file; when outputs are compared, the reference, whose contract is the same."""
    return Path(os.environ.get("LOCKSTEP_SUBMISSION") or find().exercises) / f"{exercise}.py"
