"""Each package that is imported is declared, and each that is declared is imported: in pyproject.toml, in the right place.

The distribution's own dependencies are those of the tool, `lockstep run`; the group `course` has what grading, the
notebooks and the tests need besides; `dev` is for those who work on Lockstep.
"""

import ast
import json
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = (
    "attach",
    "author",
    "bank",
    "cli",
    "console",
    "explain",
    "learner",
    "options",
    "project",
    "run",
    "run_options",
    "run_report",
    "teacher",
    "terminal",
)
TOOL = ("__main__.py", *(f"commands/{name}.py" for name in COMMANDS), "course", "ranks", "cluster", "outside")
FOLDERS = ("src", "autograder", "chapters", "exercises", "solutions", "tests")
DISTRIBUTIONS = {"bs4": "beautifulsoup4", "sklearn": "scikit-learn", "xdist": "pytest-xdist", "yaml": "pyyaml"}

# What is needed without an import of ours.
BY_NAME = {
    "ipykernel": "runs the chapters' cells",
    "mypy": "a command",
    "nbval": "pytest --nbval",
    "py-spy": "a command: `lockstep attach` reads stacks with it",
    "pytest-randomly": "shuffles the tests",
    "ruff": "a command",
    "uv": "a command",
}


def declared(where: str) -> set[str]:
    """The packages in `dependencies` or in a dependency group."""
    loaded: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    listed = loaded["project"]["dependencies"] if where == "dependencies" else loaded["dependency-groups"][where]
    return {canonicalize_name(Requirement(line).name) for line in listed}


def imports(code: str) -> Iterator[str]:
    """The top-level names of what is imported anywhere in this code, by pytest.importorskip too."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.importorskip":
            yield ast.literal_eval(node.args[0]).partition(".")[0]


def notebook_code(notebook: Path) -> Iterator[str]:
    """Each cell without its magics. What is left is Python, also in a cell for ranks."""
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            yield "\n".join(line for line in "".join(cell["source"]).splitlines() if not line.startswith("%"))


@cache
def imported(*paths: str) -> frozenset[str]:
    """The distributions that the code below these paths imports: neither the standard library's nor our own."""
    found: set[str] = set()
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    ours = {"lockstep"} | {path.parent.name if path.name == "__init__.py" else path.stem for path in files}
    for path in paths:
        below = ROOT / path
        assert below.exists(), path
        for file in [below] if below.is_file() else [*below.rglob("*.py"), *below.rglob("*.ipynb")]:
            if {".ipynb_checkpoints", "submissions", "source", "jobs"} & set(file.parts):
                continue  # chapters/source has what the notebooks have; the foreign jobs import what is not ours
            text = file.read_text(encoding="utf-8")
            names = {
                name for code in (notebook_code(file) if file.suffix == ".ipynb" else [text]) for name in imports(code)
            }
            if file.suffix == ".ipynb":
                ours |= set(re.findall(r"\b(\w+)\.py\b", text))  # modules that its cells write
            found |= names - ours - set(sys.stdlib_module_names)
    return frozenset(canonicalize_name(DISTRIBUTIONS.get(name, name)) for name in found)


def test_the_tool_declares_what_it_imports_and_nothing_else() -> None:
    needed = imported(*(f"src/lockstep/{path}" for path in TOOL))
    assert needed == declared("dependencies") - set(BY_NAME)


def test_the_course_declares_what_it_imports_besides_and_nothing_else() -> None:
    needed = imported(*FOLDERS) - declared("dependencies") - declared("dev")
    assert needed == declared("course") - set(BY_NAME)


def test_for_development_only_tests_import() -> None:
    assert declared("dev") - set(BY_NAME) <= imported("tests")
    assert not declared("dev") & imported(*(folder for folder in FOLDERS if folder != "tests"))


def test_what_is_needed_without_an_import_is_declared() -> None:
    assert set(BY_NAME) <= declared("dependencies") | declared("course") | declared("dev")


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("import torch.nn as nn, os", ["torch", "os"]),
        ("def late():\n    from rich.text import Text", ["rich"]),
        ("from . import words\nfrom .words import number", []),
        ("bs4 = pytest.importorskip('bs4.element', reason='x')", ["bs4"]),
    ],
)
def test_imports_are_found_where_they_are(code: str, names: list[str]) -> None:
    assert list(imports(code)) == names
