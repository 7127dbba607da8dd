"""The environment's files say the same thing: the lock has the whole set, exactly, and names no package index.

That a learner's environment is the one the authors tested depends on these files alone.
"""

import re
import runpy
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
BOOTSTRAP = ROOT / "src" / "lockstep" / "bootstrap.py"
EXACT = re.compile(r"[a-z0-9-]+==[0-9][0-9a-z.]*")
CUDA = re.compile(r"(torch|triton|nvidia|cuda)\b")
PLACES = [(f"3.{minor}", system) for minor in range(10, 15) for system in ("linux", "darwin")]

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
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def declared() -> list[Requirement]:
    """What the tool and the course require, in ranges."""
    project = pyproject()
    return [Requirement(line) for line in project["project"]["dependencies"] + project["dependency-groups"]["course"]]


def lock() -> list[Requirement]:
    lines = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
    return [Requirement(line.partition("#")[0]) for line in lines if line and not line.startswith("#")]


def locked_at(python: str, system: str) -> dict[str, Version]:
    """The version of each package that pip takes from the lock for this Python and system."""
    names = {"linux": ("Linux", "posix"), "darwin": ("Darwin", "posix")}[system]
    place = {"python_version": python, "python_full_version": f"{python}.9", "sys_platform": system}
    place |= {"platform_system": names[0], "os_name": names[1], "implementation_name": "cpython"}
    found: dict[str, Version] = {}
    for requirement in lock():
        if requirement.marker is None or requirement.marker.evaluate(place):
            [pin] = requirement.specifier
            assert requirement.name not in found, f"{requirement.name} is there twice for Python {python}"
            found[requirement.name] = Version(pin.version)
    return found


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


def test_the_lock_pins_everything_exactly_and_leaves_torch_out() -> None:
    """Which build of torch depends on the machine; on one without a GPU, nothing of CUDA is fetched."""
    assert [str(line) for line in lock() if not EXACT.fullmatch(str(line).partition(";")[0].strip())] == []
    assert [line.name for line in lock() if CUDA.match(line.name)] == []


@pytest.mark.parametrize(("python", "system"), PLACES)
def test_the_lock_has_what_is_declared_in_its_range(python: str, system: str) -> None:
    versions = locked_at(python, system)
    for requirement in declared():
        needed = requirement.marker is None or requirement.marker.evaluate({"python_version": python})
        if needed and requirement.name != "torch":
            found = versions.get(canonicalize_name(requirement.name))
            assert found is not None and found in requirement.specifier, f"{requirement}: the lock has {found}"


def test_the_lock_is_whole() -> None:
    """Whatever an installed package requires is in the lock, which is installed without looking at what it requires."""
    versions = locked_at(f"{sys.version_info.major}.{sys.version_info.minor}", sys.platform)
    todo = {(canonicalize_name(one.name), extra) for one in declared() for extra in ("", *one.extras)}
    seen: set[tuple[str, str]] = set()
    while todo - seen:
        name, extra = (todo - seen).pop()
        seen.add((name, extra))
        try:
            requires = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        for requirement in map(Requirement, requires):
            if CUDA.match(requirement.name) or (
                requirement.marker and not requirement.marker.evaluate({"extra": extra})
            ):
                continue
            required = canonicalize_name(requirement.name)
            assert required in versions, f"{name} requires {requirement}: the lock lacks it"
            todo |= {(required, extra) for extra in ("", *requirement.extras)}
    assert len(seen) > 100 or "jupyterlab" not in {name for name, _ in seen}


def test_torchs_version_is_exact_and_in_its_range() -> None:
    exact = pyproject()["dependency-groups"]["bootstrap"]
    assert [line for line in exact if not EXACT.fullmatch(line)] == []
    [ours] = [Version(line.partition("==")[2]) for line in exact if line.startswith("torch==")]
    [range_] = [requirement.specifier for requirement in declared() if requirement.name == "torch"]
    assert ours in range_


def test_contributing_says_how_the_lock_is_written() -> None:
    command = pyproject()["tool"]["uv"]["pip"]["custom-compile-command"]
    assert command in (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()[1]
    assert command in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_conda_takes_the_lock_and_leads_the_launcher_to_its_own_python() -> None:
    conda = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    *packages, pip = conda["dependencies"]
    assert pip == {"pip": ["-r requirements.lock"]}
    [torch] = [Requirement(name) for name in packages if name.startswith("pytorch")]
    [ours] = [line for line in pyproject()["dependency-groups"]["bootstrap"] if line.startswith("torch==")]
    version = Version(ours.partition("==")[2])
    assert f"{version.major}.{version.minor}.99" in torch.specifier  # the tested one and its patches,
    assert f"{version.major}.{version.minor + 1}" not in torch.specifier and "2.7" not in torch.specifier
    [minor] = [int(name.removeprefix("python=3.")) for name in packages if name.startswith("python=")]
    assert minor in range(10, 15)
    assert conda["variables"] == {"LOCKSTEP_PYTHON": "python"}


def test_bootstrap_reads_exact_versions_as_a_toml_reader_does(tmp_path: Path) -> None:
    bootstrap = runpy.run_path(str(BOOTSTRAP))
    pin = bootstrap["pin"]
    for line in pyproject()["dependency-groups"]["bootstrap"]:
        assert pin(line.partition("==")[0]) == line
    with pytest.raises(bootstrap["Trouble"], match="git checkout pyproject"):
        pin("lost")


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
