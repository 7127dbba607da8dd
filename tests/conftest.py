"""How the tests are spread over processes, and which of them `./lockstep test` leaves out when it is not told `--all`.

The tests of one file stay together, in one process, because they share fixtures: JupyterLab starts once, not once in each
process. The files that take longest go first; the submissions of the bank are dealt out one by one, at the end, and fill
the gaps. (`--dist=loadgroup` of
pytest-xdist 3.8 no longer keeps a group together: it renames `item._nodeid`, which pytest 9.2 does not read.) `--quick`
leaves out the tests marked `slow` and draws a sample from the bank, with the seed of the shuffle. With `--bank-minutes`
the submissions whose turn has not come by then are skipped, and counted: the order is shuffled, so another run meets others.
"""

from __future__ import annotations

import fcntl
import gc
import json
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BANK = "test_bank.py"
LONGEST = (
    "test_hostile", "test_foreign", "test_front_end", "test_walk", "test_grade", "test_accessibility", "test_matrix",
    "test_check", "test_pictures", "test_slides", "test_train_script", "test_slurm", "test_grade_array", "test_timeline",
    "test_terminal", "test_book", "test_nodes", "test_slow_link", "test_benchmarks", "test_honest_waiting", "test_paper",
    "test_release", "test_author_check", "test_chapters", "test_launcher", "test_testing", "test_recorder",
    "test_own_ending", "test_targets", "test_isolation", "test_intake", "test_supervising_side", "test_untrusted",
    "test_meeting",
)  # fmt: skip
"""The files that take longest, in the order in which they begin: one that began last would have a core to itself."""
SAMPLE = 20
"""How many submissions of the bank `--quick` grades."""

TOO_LATE = "not graded: the bank's minutes were over"

STARTED = time.monotonic()

left_out = {"slow": 0, "bank": 0}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A browser for the pages of one file's tests."""
    from support.browser import chromium  # here: other tests copy this file without that one

    with chromium() as started:
        yield started


@pytest.fixture(scope="session")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The book of this course with its slides, which no test changes; beside it, in `said`, what the command said.

    The processes of pytest-xdist share one.
    """
    from support import ROOT  # here, as above
    from typer.testing import CliRunner

    from lockstep.commands.author import commands

    own = tmp_path_factory.getbasetemp()
    out = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "site" / "book"
    out.parent.mkdir(exist_ok=True)
    said = out.parent / "said"
    with (out.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not said.exists():
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("LOCKSTEP_COURSE", str(ROOT))
                done = CliRunner().invoke(commands, ["book", str(out), "--slides"])
            assert done.exit_code == 0, done.output
            said.write_text(done.output, encoding="utf-8")
    return out


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="leave out slow tests and most of the bank")
    parser.addoption(
        "--bank-minutes", type=float, default=float("inf"), help="grade no submission of the bank after so many minutes"
    )
    parser.addoption("--whole", action="store_true", help="grade each wrong submission of the bank by all checks")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Draws the sample before the shuffle, so that it depends on the seed alone; after it, what takes longest goes first."""
    if config.option.quick:
        _leave_out(config, items)
    yield
    items.sort(key=_turn)


def _turn(item: pytest.Item) -> int:
    if item.path.name == BANK:
        return len(LONGEST) + 1
    return LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST)


def _leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    slow = [item for item in items if item.get_closest_marker("slow")]
    bank = [item for item in items if _submission(item) and item not in slow]
    drawn = random.Random(config.option.randomly_seed).sample(bank, min(SAMPLE, len(bank)))
    dropped = {*slow, *bank} - {*drawn}
    left_out.update(slow=len(slow), bank=len(bank) - len(drawn))
    items[:] = [item for item in items if item not in dropped]
    config.hook.pytest_deselected(items=list(dropped))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if _submission(item) and time.monotonic() - STARTED > 60 * item.config.option.bank_minutes:
        pytest.skip(TOO_LATE)


def pytest_collection_finish() -> None:
    """The tests themselves are no garbage: each process would look at half a million objects, again and again."""
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """What pytest-xdist deals out as one piece: a file, or a submission of the bank, in the order of the tests."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]
            return nodeid if path.endswith(BANK) else path

    config.option.loadscopereorder = False
    return ByFile(config, log)


def _submission(item: pytest.Item) -> bool:
    return item.path.name == BANK and "entry" in getattr(getattr(item, "callspec", None), "params", ())


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Each process of pytest-xdist collects the same tests, and tells the one that reports."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = json.dumps(left_out)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    left_out.update(json.loads(getattr(node, "workeroutput", {}).get("left_out", "{}")))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    late = sum(TOO_LATE in str(one.longrepr) for one in terminalreporter.stats.get("skipped", ()))
    if late:
        terminalreporter.write_line(
            f"Not graded: {late} submissions of the bank, whose turn had not come after {config.option.bank_minutes:g} minutes."
        )
    if config.option.quick:
        terminalreporter.write_line(
            f"Not run: {left_out['slow']} slow tests, {left_out['bank']} submissions of the bank, and the chapters. "
            "`./lockstep test --all` runs everything."
        )
