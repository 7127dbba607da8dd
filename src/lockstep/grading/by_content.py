"""Which exercise a file is, when its name does not tell: by the functions and classes that it defines.

For notebooks, and for files such as `my launch.py`. What strangers wrote is parsed within the limits of `source`, and
never raises.
"""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Iterator

from ..course import Course
from .source import parse

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DEFINITIONS = (*_FUNCTIONS, ast.ClassDef)
_IN_FRONT_ENDS = {"IPython", "google", "lockstep"}  # What only a notebook imports


def definitions(course: Course) -> dict[str, frozenset[str]]:
    """By exercise, the public names that it defines and no other exercise does. An exercise whose names others define
    too is known by their parameters (`train_step(ddp_model, …)`), and left out when others have these as well.
    """
    texts = {}
    for name in course.names:
        places = (course.solutions, course.autograder / "stubs", course.exercises)
        file = next((place / f"{name}.py" for place in places if (place / f"{name}.py").is_file()), None)
        texts[name] = file.read_text("utf-8") if file else ""
    by_name = _own({name: _defined(text) for name, text in texts.items()})
    by_parameters = _own({name: _signatures(text) for name, text in texts.items()})
    return {name: names for name in texts if (names := by_name[name] or by_parameters[name])}


def exercises_in(text: str, wanted: dict[str, frozenset[str]]) -> list[str]:
    """The exercises that a source defines completely."""
    there = _defined(text) | _signatures(text)
    return [name for name, names in wanted.items() if names <= there]


def _own(found: dict[str, set[str]]) -> dict[str, frozenset[str]]:
    """By exercise, what no other exercise has."""
    count = Counter(one for names in found.values() for one in names)
    return {name: frozenset(one for one in names if one[0] != "_" and count[one] == 1) for name, names in found.items()}


def of_notebook(data: bytes) -> str:
    """A notebook's imports, functions, classes and constants: what its cells run and print is left out."""
    kept = []
    for cell in _cells(data):
        text = re.sub(r"^[ \t]*[%!?].*$", "", cell, flags=re.MULTILINE)
        tree, lines = parse(text), text.splitlines()
        for node in tree.body if tree is not None else ():
            if _stays(node):
                first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))])
                kept += [*lines[first - 1 : node.end_lineno], ""]
    future = [line for line in kept if line.startswith("from __future__ ")]  # only at the top
    lines = [*dict.fromkeys(future), *(line for line in kept if line not in future)]
    there, tree = _defined("\n".join(lines)), parse("\n".join(lines))
    for node in tree.body if tree is not None else ():
        if isinstance(node, ast.ImportFrom) and {one.name for one in node.names} <= there:  # of another exercise in it
            lines[node.lineno - 1 : node.end_lineno] = [""] * ((node.end_lineno or node.lineno) - node.lineno + 1)
    return "\n".join(lines)


def _cells(data: bytes) -> Iterator[str]:
    try:
        cells = json.loads(data)["cells"]
        for cell in cells:
            if cell["cell_type"] == "code":
                source = cell["source"]
                yield source if isinstance(source, str) else "".join(source)
    except (ValueError, LookupError, TypeError, RecursionError, MemoryError):
        return


def _stays(node: ast.stmt) -> bool:
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [one.name for one in node.names]
        return not any(module.partition(".")[0] in _IN_FRONT_ENDS for module in modules)
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        name = ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
        calls = any(isinstance(part, (ast.Call, ast.Await)) for part in ast.walk(node))
        return not calls or name.startswith("_") or name.isupper()  # a module's own, computed once
    return isinstance(node, _DEFINITIONS)


def _defined(text: str) -> set[str]:
    tree = parse(text)
    return {node.name for node in tree.body if isinstance(node, _DEFINITIONS)} if tree is not None else set()


def _signatures(text: str) -> set[str]:
    """The functions with their parameters' names, as in `train_step(ddp_model, optimizer)`."""
    tree = parse(text)
    functions = [node for node in tree.body if isinstance(node, _FUNCTIONS)] if tree is not None else []
    return {f"{node.name}({', '.join(_parameters(node.args))})" for node in functions}


def _parameters(given: ast.arguments) -> list[str]:
    return [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
