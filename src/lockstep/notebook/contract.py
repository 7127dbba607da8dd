"""Show what an exercise asks for: its functions' signatures and docstrings, as they stand in the learner's file."""

from __future__ import annotations

import ast
import os
from pathlib import Path

from ..grading.course import find


def contract(exercise: str, *functions: str) -> None:
    """Print the contract of `functions` (default: the one named like the exercise) from `exercises/<exercise>.py`."""
    text = _file(exercise).read_text(encoding="utf-8")
    defined = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
    print(f"exercises/{exercise}.py")
    for name in functions or (exercise,):
        node = defined[name]
        documentation = node.body[0]  # a contract is a docstring, so every function of an exercise has one
        print("", *text.splitlines()[node.lineno - 1 : documentation.end_lineno], sep="\n")


def _file(exercise: str) -> Path:
    """The learner's file; where outputs are compared, the reference, whose contract is the same."""
    told = os.environ.get("LOCKSTEP_SUBMISSION")
    folder = Path(told) if told else find().exercises
    return folder / f"{exercise}.py"
