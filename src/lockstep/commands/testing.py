"""`lockstep test`: the course's tests in minutes, and with `--all` everything that proves the course.

The tests run in more processes than there are cores, because most of them wait, and in an order that is shuffled each
time (pytest prints the seed). The chapters come last, with no other tests beside them, because some of their cells
compare what they measure.

With `--all`, when few tests have failed, they are run once more, alone. A test that passes then is named at the end as
unsteady. What is promised at any load (`PROMISES`) has no second try.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from ..authoring import claims
from ..course import CourseError
from ..ranks.processes import cores

PYTEST = [sys.executable, "-m", "pytest", "-p", "lockstep.authoring"]
"""The plugin makes the import of nbformat, by nbval, a second shorter."""
PROMISES = ("tests/grading/test_bank.py", "tests/grading/test_hostile.py", "tests/ranks/test_honest")
"""How the names of tests begin that hold at any load: a grade, a verdict or an alarm is never chance."""
WAITING = 3
"""How many processes more than there are cores: a grading computes for a third of its time, and waits otherwise. More
of them slow each other down: seven on two cores need 92 minutes of the processor for what one does in 70 (2026-11-28).
"""
PROCESS_BYTES = 1500 << 20  # What a process holds with all that it has started
DRAWN = """\
A tenth of the bank's wrong submissions that were graded, drawn by this run's seed, met all checks; the others met the
check that must notice them. `./lockstep test --all --whole` grades each by all checks."""
SECOND_TRIES = 6  # How many tests, or chapters, may be run once more


def run_tests(root: Path, options: Sequence[str]) -> int:
    """Run the tests of the course at `root`: quickly, all of them (`--all`), or those that `options` name.

    Returns the worst exit code.
    """
    everything = "--all" in options
    options = [option for option in options if option != "--all"]
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # each process would compile all tests, which takes 4 s
    if any((root / option.partition("::")[0]).exists() for option in options):
        return _call([*PYTEST, *options], root, environment)
    if not (root / "tests").is_dir():
        print("This is a learner's copy, without the course's own tests. ./lockstep check --all grades your exercises.")
        return 2
    minutes = "" if options else f", {'about 60' if everything else 'about 10'} minutes on two cores"
    print(f"The course's own tests{minutes}. Ctrl-C stops them.", flush=True)
    spread = ["-q", f"--numprocesses={_processes()}"]
    # Tests bind sockets in their folders, and a socket's path has a limit of some hundred bytes: keep them short.
    with tempfile.TemporaryDirectory(prefix="lockstep-", ignore_cleanup_errors=True) as place:
        options = [f"--basetemp={place}/t", *([] if everything else ["--quick"]), *options]
        tests = [*spread, *options, "tests"]
        if not everything:
            codes = [_call([*PYTEST, *tests], root, environment)]
        else:
            at_once = [f"--numprocesses={cores()}", "--dist=loadfile", "--nbval", "chapters", "-q"]
            cache = Path(place) / "cache"
            codes = [_call_twice(tests, ["-q", *options], root, environment, cache / "tests")]
            if codes == [pytest.ExitCode.INTERRUPTED]:
                return codes[0]  # and nothing is said of what has been graded
            codes += [_call_twice(at_once, ["--nbval", "-q"], root, environment, cache / "chapters")]
    if everything and "--whole" not in options:
        print(DRAWN)
    print(_claims(root), flush=True)
    return max(codes)


def _processes() -> int:
    """How many processes run tests: what fits into this machine's memory, and at least one for each core."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(cores(), min(cores() + WAITING, memory // PROCESS_BYTES))


def _claims(root: Path) -> str:
    """How many claims are shown, or why that cannot be said. `tests/test_claims.py` is what fails."""
    try:
        ledger = claims.read(root)
        broken = len(claims.problems(ledger, root))
        return claims.share(ledger) + (f"; {broken} problems, see tests/test_claims.py" if broken else "")
    except CourseError as error:
        return f"Claims: {error}"


def _call_twice(
    first: Sequence[str], alone: Sequence[str], root: Path, environment: dict[str, str], cache: Path
) -> int:
    """The exit code of pytest with `first`; if few tests have failed and none is a promise, that of pytest with `alone`
    and these tests.
    """
    code = _call([*PYTEST, "-o", f"cache_dir={cache}", *first], root, environment)
    failed = _failed(cache)
    if code != 1 or not 0 < len(failed) <= SECOND_TRIES or any(name.startswith(PROMISES) for name in failed):
        return code
    print(f"\nOnce more, alone: {', '.join(failed)}", flush=True)
    code = _call([*PYTEST, *alone, *failed], root, environment)
    if code == 0:
        print(f"Unsteady, failed beside others and passed alone: {', '.join(failed)}", flush=True)
    return code


def _failed(cache: Path) -> list[str]:
    """The tests that failed, as pytest's cache has them. Cells lean on earlier cells: of a chapter, the whole file."""
    try:
        names = json.loads((cache / "v" / "cache" / "lastfailed").read_text(encoding="utf-8"))
    except OSError:
        return []
    return sorted({name.partition("::")[0] if ".ipynb" in name else name for name in names})


def _call(command: Sequence[str], root: Path, environment: dict[str, str]) -> int:
    """The exit code of a pytest. Ctrl-C is for it alone: it says what has failed so far, and ends."""
    with subprocess.Popen(command, cwd=root, env=environment, stdin=subprocess.DEVNULL) as running:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            return running.wait()
        finally:
            signal.signal(signal.SIGINT, before)
