"""The environment's files say the same thing, pin everything, and name no package index.

That a learner's environment is the one the authors tested depends on these files alone.
"""

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXACT = re.compile(r"[A-Za-z0-9._-]+(\[[a-z,]+\])?==[0-9][0-9A-Za-z.]*(; python_version (<|>=) '3\.\d+')?")

# What gives an index, or the host of one, away: a simple/ or whl/ folder in an address, a host that only serves
# packages, an index named to pip, uv or conda. Written in parts, so that this file does not match itself.
INDEX = re.compile(
    r"https?://[^\s\"'<>)]*/" + r"(simple|whl)\b"
    r"|\b(download|files|index|pypi|mirrors?)\.[a-z0-9-]+\.(org|com|io|net|cn|internal|local)\b"
    r"|--(extra-)?index-" + r"url[= ]+\S"
    r"|--find-" + r"links[= ]+[/\w]",
    re.IGNORECASE,
)


def pyproject() -> dict[str, Any]:
    tomllib = pytest.importorskip("tomllib", reason="not run: Python 3.10 has no TOML reader")
    loaded: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return loaded


def conda() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")  # jupytext brings it
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    return loaded


def bootstrap() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bootstrap_read_by_test", ROOT / "src" / "lockstep" / "bootstrap.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def tracked_files() -> list[Path]:
    """What git would hand to a learner; outside a checkout, there is nothing to look at."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    if listing.returncode != 0:
        pytest.skip("not run: this is no git checkout")
    return [ROOT / name for name in listing.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_every_requirement_is_pinned_exactly() -> None:
    project = pyproject()
    groups = project["dependency-groups"]
    requirements = [
        *project["build-system"]["requires"],
        *project["project"]["dependencies"],
        *groups["dev"],
        *groups["bootstrap"],
    ]
    floating = [requirement for requirement in requirements if EXACT.fullmatch(requirement) is None]
    assert floating == []


def test_a_pin_for_one_python_has_its_counterpart() -> None:
    """Each package is required once for every Python: without a marker, or once below a version and once from it."""
    markers: dict[str, list[str]] = {}
    for requirement in pyproject()["project"]["dependencies"]:
        name, _, marker = requirement.partition("==")[0], "", requirement.partition("; ")[2]
        markers.setdefault(name, []).append(marker)
    pairs = [["python_version >= '3.11'", "python_version < '3.11'"], [""]]
    assert [name for name, found in markers.items() if found not in pairs] == []


def test_conda_takes_the_same_pins_in_the_same_order() -> None:
    [pip] = [entry for entry in conda()["dependencies"] if isinstance(entry, dict)]
    assert pip == {"pip": pyproject()["project"]["dependencies"]}


def test_conda_leads_the_launcher_to_its_own_python() -> None:
    assert conda()["variables"] == {"LOCKSTEP_PYTHON": "python"}
    [python] = [entry for entry in conda()["dependencies"] if str(entry).startswith("python")]
    minor = re.fullmatch(r"python=3\.(\d+)", python)
    assert minor is not None
    assert int(minor[1]) >= 10


@pytest.mark.parametrize("table", ["dependencies", "bootstrap"])
def test_bootstrap_reads_pyproject_as_a_toml_reader_does(table: str) -> None:
    project = pyproject()
    expected = project["project"]["dependencies"] if table == "dependencies" else project["dependency-groups"][table]
    assert bootstrap().pinned((ROOT / "pyproject.toml").read_text(encoding="utf-8"), table) == expected


def test_bootstrap_says_what_is_wrong_when_pyproject_is_damaged() -> None:
    module = bootstrap()
    with pytest.raises(module.Trouble, match="git checkout pyproject"):
        module.pinned("[project]\n", "dependencies")


def test_every_old_python_can_read_bootstrap_far_enough_to_be_told() -> None:
    source = (ROOT / "src" / "lockstep" / "bootstrap.py").read_text(encoding="utf-8")
    tree = ast.parse(source, feature_version=(3, 6))
    docstring, first_import, guard = tree.body[:3]
    assert isinstance(docstring, ast.Expr)
    assert isinstance(first_import, ast.Import)
    assert [name.name for name in first_import.names] == ["sys"]
    assert isinstance(guard, ast.If)
    assert ast.unparse(guard.test) == "sys.version_info < (3, 10)"


def test_no_file_names_a_package_index() -> None:
    """Where packages come from is the learner's to configure; uv knows where PyTorch publishes CPU builds."""
    found = []
    for path in tracked_files():
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue  # a picture
        found += [f"{path.relative_to(ROOT)}:{number}" for number, line in enumerate(lines, 1) if INDEX.search(line)]
    assert found == []


@pytest.mark.parametrize(
    "line",
    [
        "https://example.org/" + "simple",
        "http://10.0.0.1:8080/a/" + "simple/torch",
        "pip install --index-" + "url https://x",
        "download." + "example.org",
        "uv pip install --find-" + "links /somewhere",
    ],
)
def test_the_pattern_for_an_index_finds_one(line: str) -> None:
    assert INDEX.search(line) is not None


@pytest.mark.parametrize(
    "line", ["https://docs.python.org/3/", "a simple/plain case", "set PIP_INDEX_URL", "download it"]
)
def test_the_pattern_for_an_index_lets_the_rest_be(line: str) -> None:
    assert INDEX.search(line) is None
