"""`pytest --nbval chapters` compares every cell's output with the stored one, from any folder and on any machine."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

collect_ignore_glob = ["mine/*", "*.20*.ipynb"]  # copies that ./lockstep lab made of the chapters

HERE = Path(__file__).parent
NBVAL_DEFAULT_TIMEOUT = 2000
CELL_TIMEOUT = 240  # chapter 5 checks a batch script on a SLURM cluster of its own
NOT_COMPARED = pytest.StashKey[dict[str, list[str]]]()

sys.path.insert(0, str(HERE.parent / "src"))


def pytest_configure(config: pytest.Config) -> None:
    """Compare strictly, apart from what nbval_sanitize.cfg names, and never read what a learner has written."""
    option = config.option
    if not (getattr(option, "nbval", False) or getattr(option, "nbval_lax", False)):
        return
    from lockstep.authoring.chapters import reference_environment

    option.randomly_reorganize = False  # cells run from top to bottom
    option.nbval_sanitize_with = option.nbval_sanitize_with or str(HERE / "nbval_sanitize.cfg")
    option.nbval_current_env = True  # the kernel of this environment, whatever is registered under its name
    if int(option.nbval_cell_timeout) == NBVAL_DEFAULT_TIMEOUT:
        option.nbval_cell_timeout = CELL_TIMEOUT
    os.environ.update(reference_environment(HERE.parent))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE.parent / "src"), os.environ.get("PYTHONPATH")]))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A cell tagged `needs-…` is run everywhere, and compared only where this machine has what it needs."""
    if not getattr(config.option, "nbval", False):
        return
    from lockstep.cluster import available

    left_out: dict[str, list[str]] = {}
    for item in items:
        cell = getattr(item, "cell", None)
        for tag in cell.metadata.get("tags", ()) if cell is not None else ():
            missing = available(tag.removeprefix("needs-")) if tag.startswith("needs-") else None
            if missing is not None:
                item.options["check"] = False
                left_out.setdefault(str(missing), []).append(item.nodeid)
    config.stash[NOT_COMPARED] = left_out


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Under pytest-xdist each process collects the same cells, and tells the one that reports."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["not_compared"] = session.config.stash.get(NOT_COMPARED, {})


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """One that has crashed tells nothing."""
    node.config.stash.setdefault(NOT_COMPARED, {}).update(getattr(node, "workeroutput", {}).get("not_compared", {}))


def pytest_terminal_summary(terminalreporter: object, config: pytest.Config) -> None:
    """Say which cells were not compared, and why."""
    for reason, cells in config.stash.get(NOT_COMPARED, {}).items():
        terminalreporter.write_line(f"{len(cells)} cells not compared: {reason}")  # type: ignore[attr-defined]
