"""Imports run one way: downwards between packages, without a circle between modules, and checks use one surface."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import ROOT

from lockstep import grading
from lockstep.grading import on_rank, surface

SOURCE = ROOT / "src"
FLOORS = (("ranks",), ("cluster", "outside"), ("course",), ("grading",), ("notebook", "authoring"), ("commands",))
FLOOR = {package: number for number, packages in enumerate(FLOORS) for package in packages}
FLOOR_OF_THE_TOOL = (
    "lockstep.ranks",
    "lockstep.cluster",
    "lockstep.outside",
    "lockstep.commands.run",
    "lockstep.commands.attach",
    "lockstep.commands.explain",
    "lockstep.commands.console",
)
"""What `lockstep run`, `attach` and `explain` consist of: a tool that people install without a course."""
OF_A_COURSE = re.compile(
    r"chapter|exercise|lesson|learner|notebook (?!cell)|\bcourse\b|\bclaims?\b|\b[A-Z]\d\d\b|%%|sklearn|\./lockstep|doctor"
    r"|lockstep\.(?:course|grading|notebook|authoring)", re.IGNORECASE
)  # fmt: skip
FREE_OF_CIRCLES = ("ranks", "cluster", "outside", "course", "grading", "notebook", "authoring", "commands")
AUTOGRADER = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "autograder").rglob("*.py")
    if path != ROOT / "autograder" / "conftest.py"  # the bridge to pytest: it takes the plugin's hooks
)


def name_of(file: Path) -> str:
    """`lockstep.grading.bulk`; a package's own name for its `__init__.py`."""
    return ".".join(file.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(file): file for file in sorted((SOURCE / "lockstep").rglob("*.py"))}
PACKAGES = {module for module, file in MODULES.items() if file.name == "__init__.py"} - {"lockstep"}


def imported(module: str) -> Iterator[str]:
    """The modules of ours that this one imports: at the top, in a function or for types alone."""
    file = MODULES[module]
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parts, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                if inner in MODULES or base in MODULES:
                    yield inner if inner in MODULES else base


def package_of(module: str) -> str:
    """`grading`; empty for what is in no package, such as `lockstep.bootstrap`."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and f"lockstep.{parts[1]}" in PACKAGES else ""


@pytest.mark.parametrize("package", FLOOR)
def test_no_package_imports_from_above_or_beside(package: str) -> None:
    below = {one for one in FLOOR if FLOOR[one] < FLOOR[package]} | {package, ""}
    wrong = [
        f"{module} imports {other}"
        for module in MODULES
        if package_of(module) == package
        for other in imported(module)
        if package_of(other) not in below
    ]
    assert not wrong


def test_every_package_has_its_floor() -> None:
    assert {package_of(module) for module in PACKAGES} == set(FLOOR)


@pytest.mark.parametrize("package", FREE_OF_CIRCLES)
def test_no_modules_import_each_other(package: str) -> None:
    graph = {module: set(imported(module)) - {module} for module in MODULES if package_of(module) == package}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " → ".join([*path[path.index(module) :], module])
        if module not in done:
            for other in sorted(graph.get(module, ())):
                visit(other, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())


@pytest.mark.parametrize("file", AUTOGRADER)
def test_checks_and_scenarios_import_from_their_surface_alone(file: str) -> None:
    on_ranks = "/scenarios/" in file
    home, known = ("lockstep.grading.on_rank", on_rank.__all__) if on_ranks else ("lockstep.grading", surface.__all__)
    for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "lockstep":
            assert node.module == home, f"line {node.lineno}: {node.module}"
            unknown = [alias.name for alias in node.names if alias.name not in known]
            assert not unknown, f"line {node.lineno}: {home} has no {unknown}"
        assert not [name for name in modules if name.partition(".")[0] == "lockstep"], f"line {node.lineno}"


def test_the_surface_is_there_and_in_contributings_table() -> None:
    assert all(getattr(grading, name) is getattr(surface, name) for name in surface.__all__)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = grading.no_such_name
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    missing = [name for name in {*surface.__all__, *on_rank.__all__} - {"play"} if f"`{name}`" not in text]
    assert not missing, f"CONTRIBUTING.md has no {missing}"


@pytest.mark.parametrize("module", [module for module in MODULES if module.startswith(FLOOR_OF_THE_TOOL)])
def test_the_tool_knows_nothing_of_a_course(module: str) -> None:
    text = MODULES[module].read_text(encoding="utf-8")
    words = OF_A_COURSE.findall(text) + (re.findall(r"lockstep\.cluster", text) if ".ranks" in module else [])
    assert not words
    upwards = [other for other in imported(module) if not other.startswith(FLOOR_OF_THE_TOOL)]
    assert not upwards


def test_a_rank_does_not_load_the_judges_side() -> None:
    code = "import sys, lockstep.grading.on_rank; print([name for name in sys.modules if name.startswith('lockstep.')])"
    done = subprocess.run([sys.executable, "-c", code], cwd=SOURCE, capture_output=True, text=True, check=True)
    loaded = set(ast.literal_eval(done.stdout))
    assert {name for name in loaded if name.startswith("lockstep.grading")} == {
        "lockstep.grading",
        "lockstep.grading.on_rank",
    }
    assert not {name for name in loaded if package_of(name) not in ("ranks", "grading", "")}


@pytest.mark.parametrize("command", ["grade_class", "run"])
def test_who_only_watches_others_loads_no_torch(command: str) -> None:
    """The engine's workers and a run's ranks do. Without it a class, and each run, begins seconds sooner."""
    code = f"import sys, lockstep.commands.{command}; print(sorted({{'torch', 'pytest'}} & {{*sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=SOURCE, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
