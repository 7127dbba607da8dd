"""Makes `pytest autograder` grade `exercises/`: the hooks and fixtures are the grader's."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from lockstep.grading.plugin import (  # noqa: F401
    grader,
    pytest_addoption,
    pytest_configure,
    pytest_report_header,
    pytest_runtest_makereport,
    pytest_runtest_setup,
)
