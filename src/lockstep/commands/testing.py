"""`lockstep test`: the course's tests in minutes, and with `--all` everything that proves the course.

The tests run in one process more than there are cores, because many of them wait, and in an order that is shuffled each
time (pytest prints the seed). The chapters come last and alone, because some of their cells compare what they measure.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ..authoring import claims
from ..course import CourseError
from ..ranks.processes import cores

PYTEST = [sys.executable, "-m", "pytest"]


def run_tests(root: Path, options: Sequence[str]) -> int:
    """Run the tests of the course at `root`: quickly, all of them (`--all`), or those that `options` name.

    Returns the worst exit code.
    """
    everything = "--all" in options
    options = [option for option in options if option != "--all"]
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    if any((root / option.partition("::")[0]).exists() for option in options):
        return _call([*PYTEST, *options], root, environment)
    if not (root / "tests").is_dir():
        print("This is a learner's copy, without the course's own tests. ./lockstep check --all grades your exercises.")
        return 2
    spread = ["-q", f"--numprocesses={cores() + 1}"]
    # Tests bind sockets in their folders, and a socket's path has a limit of some hundred bytes: keep them short.
    with tempfile.TemporaryDirectory(prefix="lockstep-", ignore_cleanup_errors=True) as place:
        options = [f"--basetemp={place}/t", *([] if everything else ["--quick"]), *options]
        codes = [_call([*PYTEST, *spread, *options, "tests"], root, environment)]
    if everything:
        codes.append(_call([*PYTEST, "--nbval", "chapters", "-q"], root, environment))
    print(_claims(root), flush=True)
    return max(codes)


def _claims(root: Path) -> str:
    """How many claims are shown, or why that cannot be said. `tests/test_claims.py` is what fails."""
    try:
        ledger = claims.read(root)
        broken = len(claims.problems(ledger, root))
        return claims.share(ledger) + (f"; {broken} problems, see tests/test_claims.py" if broken else "")
    except CourseError as error:
        return f"Claims: {error}"


def _call(command: Sequence[str], root: Path, environment: dict[str, str]) -> int:
    return subprocess.run(command, cwd=root, env=environment, stdin=subprocess.DEVNULL).returncode
