"""`pytest --nbval chapters` compares every cell's output with the stored one, from any folder and on any machine."""

import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
NBVAL_DEFAULT_TIMEOUT = 2000
CELL_TIMEOUT = 60

sys.path.insert(0, str(HERE.parent / "src"))


def pytest_configure(config: pytest.Config) -> None:
    """Compare strictly, apart from what nbval_sanitize.cfg names, and never read what a learner has written."""
    option = config.option
    if not (getattr(option, "nbval", False) or getattr(option, "nbval_lax", False)):
        return
    from lockstep.authoring.chapters import reference_environment

    option.nbval_sanitize_with = option.nbval_sanitize_with or str(HERE / "nbval_sanitize.cfg")
    option.nbval_current_env = True  # the kernel of this environment, whatever is registered under its name
    if int(option.nbval_cell_timeout) == NBVAL_DEFAULT_TIMEOUT:
        option.nbval_cell_timeout = CELL_TIMEOUT
    os.environ.update(reference_environment(HERE.parent))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE.parent / "src"), os.environ.get("PYTHONPATH")]))
