"""`lockstep test`: everything that proves the course, in as little time as two cores allow.

The grader's own exam (hundreds of submissions, wrong and right, each mostly waiting for its ranks) runs beside
the other tests; its output is kept and shown when they are through. The chapters come last and alone, since some of their cells
compare what they measure.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from .authoring import claims

PYTEST = [sys.executable, "-m", "pytest"]


def run_tests(root: Path, options: Sequence[str]) -> int:
    """Run all tests of the course at `root`, or, where `options` name some, these. Returns the worst exit code."""
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    if any(not option.startswith("-") for option in options):
        return _call([*PYTEST, *options], root, environment)
    if not (root / "tests").is_dir():
        print(
            "This is a learner's copy, and the course's own tests are not in it. ./lockstep check --all grades your exercises."
        )
        return 2
    exam = root / "tests" / "grading" / "test_bank.py"
    rest = [*PYTEST, *options, "tests", f"--ignore={exam}"]
    with tempfile.TemporaryFile() as kept:
        beside = None
        if exam.is_file():
            command = [*PYTEST, *options, str(exam)]
            beside = subprocess.Popen(command, cwd=root, env=environment, stdout=kept, stderr=kept)
        try:
            codes = [_call(rest, root, environment)]
            if beside is not None:
                codes.append(beside.wait())
        finally:
            if beside is not None and beside.poll() is None:
                beside.terminate()
                beside.wait()
            kept.seek(0)
            print(kept.read().decode(errors="replace"), flush=True)
    codes.append(_call([*PYTEST, "--nbval", "chapters", "-q"], root, environment))
    print(_claims(root), flush=True)
    return max(codes)


def _claims(root: Path) -> str:
    """How many claims are shown, or why that cannot be said. `tests/test_claims.py` is what fails."""
    try:
        ledger = claims.read(root)
        broken = len(claims.problems(ledger, root))
        return claims.share(ledger) + (f"; {broken} problems, see tests/test_claims.py" if broken else "")
    except claims.LedgerError as error:
        return f"Claims: {error}"


def _call(command: list[str], root: Path, environment: dict[str, str]) -> int:
    return subprocess.call(command, cwd=root, env=environment)
