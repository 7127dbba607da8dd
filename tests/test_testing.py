"""`lockstep test`: what it runs, what it leaves out and how it says so."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest
from support import ROOT

from lockstep.commands import testing

NUMBERED = "import pytest\n\n@pytest.mark.parametrize('{name}', range({count}))\ndef test_{file}({name}):\n    pass\n"
FEW = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "-p xdist -p randomly"}
"""The plugins that these tests need: the others take ten times as long to import as such a test runs."""
SLOW = "import pytest\n\n@pytest.mark.slow\ndef test_slow():\n    pass\n\ndef test_usual():\n    pass\n"


@pytest.fixture
def course(tmp_path: Path) -> Path:
    """Tests of three kinds: 60 submissions of a bank and 3 other tests of the same file, a slow one and one as usual."""
    tests = tmp_path / "tests"
    tests.mkdir()
    shutil.copy(ROOT / "tests" / "conftest.py", tests)
    bank = NUMBERED.format(name="entry", count=60, file="wrong") + NUMBERED.format(name="name", count=3, file="stub")
    (tests / "test_bank.py").write_text(bank)
    (tests / "test_other.py").write_text(SLOW)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow: is slow\n")
    return tmp_path


def call(course: Path, *options: str) -> str:
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *options, "tests"]
    done = subprocess.run(command, cwd=course, env=FEW, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def ran(output: str) -> list[str]:
    return sorted(set(re.findall(r"tests/(test_\w+\.py::\S+) ?(?:PASSED|$)", output, re.MULTILINE)))


@pytest.mark.parametrize("spread", [(), ("--numprocesses=2",)])
def test_quick_leaves_out_slow_tests_and_most_of_the_bank(course: Path, spread: tuple[str, ...]) -> None:
    output = call(course, "--quick", *spread)
    names = ran(output)
    assert len([name for name in names if "wrong" in name]) == 20
    assert len([name for name in names if "stub" in name]) == 3
    assert "test_other.py::test_usual" in names and "test_other.py::test_slow" not in names
    assert "Not run: 1 slow tests, 40 submissions of the bank, and the chapters. `./lockstep test --all`" in output


def test_a_file_stays_in_one_process_and_the_bank_is_dealt_out(course: Path) -> None:
    for number in range(3):
        (course / f"tests/test_file{number}.py").write_text(
            NUMBERED.format(name="number", count=20, file=f"file{number}")
        )
    (course / "tests/test_bank.py").write_text(NUMBERED.format(name="entry", count=500, file="wrong"))
    dealt = re.findall(r"\[(gw\d)\] .*PASSED tests/(test_\w+)\.py", call(course, "--numprocesses=2"))
    processes = {file: {process for process, of in dealt if of == file} for _, file in dealt}
    assert all(len(processes[f"test_file{number}"]) == 1 for number in range(3))
    assert processes["test_bank"] == {"gw0", "gw1"}


def test_all_runs_everything_and_says_nothing_of_it(course: Path) -> None:
    output = call(course)
    assert len(ran(output)) == 65 and "Not run" not in output


def test_the_seed_decides_what_is_drawn(course: Path) -> None:
    one, again, other = (ran(call(course, "--quick", f"--randomly-seed={seed}")) for seed in (1, 1, 2))
    assert one == again != other


@pytest.mark.parametrize("spread", [(), ("--numprocesses=2",)])
def test_the_bank_ends_when_its_minutes_are_over(course: Path, spread: tuple[str, ...]) -> None:
    output = call(course, "--bank-minutes=0", *spread)
    assert "5 passed, 60 skipped" in output
    assert "Not graded: 60 submissions of the bank, whose turn had not come after 0 minutes." in output
    assert "Not graded" not in call(course, "--bank-minutes=5", *spread)


def test_what_is_called(course: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    called: list[list[str]] = []
    monkeypatch.setattr(
        testing, "_call", lambda command, root, environment: called.append(command[len(testing.PYTEST) :]) or 0
    )
    assert testing.run_tests(course, ["-x", "-k", "rank"]) == 0
    assert capsys.readouterr().out.startswith("The course's own tests. Ctrl-C stops them.\n"), "how long depends on -k"
    (quick,) = called
    assert quick[0] == "-q" and quick[3:] == ["--quick", "-x", "-k", "rank", "tests"]
    called.clear()
    assert testing.run_tests(course, ["--all", "--durations=5"]) == 0
    tests, chapters = (command[2:] for command in called)  # each has a cache of its failures
    assert [command[-1] for command in called] == ["tests", "-q"] and "--quick" not in tests
    assert tests[-2:] == ["--durations=5", "tests"]
    assert chapters[1:] == ["--dist=loadfile", "--nbval", "chapters", "-q"]
    called.clear()
    assert testing.run_tests(course, ["tests/test_bank.py::test_wrong", "-p", "no:cacheprovider"]) == 0
    assert called == [["tests/test_bank.py::test_wrong", "-p", "no:cacheprovider"]]
    assert "claims.toml is missing" in capsys.readouterr().out


@pytest.mark.parametrize(("memory", "most"), [(64, 5), (8, 5), (4, 2), (1, 2)])
def test_more_processes_than_cores_as_far_as_the_memory_reaches(
    memory: int, most: int, course: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(testing, "cores", lambda: 2)
    monkeypatch.setattr("os.sysconf", {"SC_PAGE_SIZE": 1 << 12, "SC_PHYS_PAGES": memory << 18}.__getitem__)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    called: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(testing, "_call", lambda command, root, environment: called.append((command, environment)) or 0)
    testing.run_tests(course, [])
    testing.run_tests(course, ["--all"])
    for (command, environment), processes in zip(called, (most, most, 2), strict=True):
        assert f"--numprocesses={processes}" in command
        assert "PYTHONDONTWRITEBYTECODE" not in environment, "each process would compile all tests"


@pytest.mark.parametrize(("option", "minutes"), [([], "about 10 minutes"), (["--all"], "about 60 minutes")])
def test_how_long_it_takes_is_said_first(
    option: list[str], minutes: str, course: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []
    monkeypatch.setattr(testing, "_call", lambda *given: said.append(capsys.readouterr().out) or 0)
    assert testing.run_tests(course, option) == 0
    assert said[0] == f"The course's own tests, {minutes} on two cores. Ctrl-C stops them.\n"


@pytest.mark.parametrize("codes", [(1, 0), (0, 1)])
def test_the_worst_exit_code_counts(codes: tuple[int, int], course: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = iter(codes)
    monkeypatch.setattr(testing, "_call", lambda command, root, environment: next(left))
    assert testing.run_tests(course, ["--all"]) == 1


COUNTS = """
from pathlib import Path

def test_{name}():
    tries = Path(__file__).with_suffix(".tries")
    tries.write_text(tries.read_text() + "x" if tries.exists() else "x")
    assert len(tries.read_text()) > {fails}
"""


def counting(course: Path, name: str, fails: int) -> Path:
    """A test that fails so many times and then passes; returns where it counts its tries."""
    file = course / f"tests/{name}.py"
    file.parent.mkdir(exist_ok=True)
    file.write_text(COUNTS.format(name=file.stem.removeprefix("test_"), fails=fails))
    return file.with_suffix(".tries")


def failing_chapter(course: Path, fails: int) -> Path:
    """A chapter whose first cell fails so many times; its second needs the first. Returns where it counts."""
    tries = course / "tries"
    first = f"from pathlib import Path\np = Path({str(tries)!r})\np.open('a').write('x')\nassert len(p.read_text()) > {fails}\nx = 1"
    (course / "chapters").mkdir()
    (course / "chapters" / "conftest.py").write_text(
        "def pytest_configure(config):\n    config.option.randomly_reorganize = False\n"
    )
    cells = [nbformat.v4.new_code_cell(source) for source in (first, "y = x")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), course / "chapters" / "01_numbers.ipynb")
    return tries


def call_twice(course: Path, first: str, alone: str, plugins: str = "") -> int:
    environment = FEW | {"PYTEST_ADDOPTS": f"{FEW['PYTEST_ADDOPTS']} {plugins}"}
    return testing._call_twice(first.split(), alone.split(), course, environment, course / "cache")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fails", "code", "tries"),
    [
        ("test_once", 1, 0, 2),
        ("test_always", 9, 1, 2),
        ("grading/test_bank", 1, 1, 1),
        ("grading/test_hostile", 1, 1, 1),
    ],
)
def test_what_failed_beside_others_is_run_once_more(
    name: str, fails: int, code: int, tries: int, course: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One that passes alone is named. What has to hold at any load has failed."""
    counted = counting(course, name, fails)
    assert call_twice(course, "-q --numprocesses=2 tests", "-q") == code
    said = capfd.readouterr().out
    assert counted.read_text() == "x" * tries
    assert ("Unsteady, failed beside others and passed alone: tests/test_once.py::test_once" in said) is (code == 0)


@pytest.mark.parametrize("beginning", testing.PROMISES)
def test_what_is_promised_is_there(beginning: str) -> None:
    assert list(ROOT.glob(f"{beginning}*"))


@pytest.mark.slow
def test_many_failures_are_no_accident(course: Path) -> None:
    counted = [counting(course, f"test_once{number}", 1) for number in range(testing.SECOND_TRIES + 1)]
    assert call_twice(course, "-q tests", "-q") == 1
    assert {one.read_text() for one in counted} == {"x"}


@pytest.mark.slow
def test_a_chapter_is_run_again_from_its_first_cell(course: Path, capfd: pytest.CaptureFixture[str]) -> None:
    counted = failing_chapter(course, 1)
    spread = "--nbval chapters -q --numprocesses=2 --dist=loadfile"
    assert call_twice(course, spread, "--nbval -q", "-p nbval") == 0
    assert counted.read_text() == "xx"
    assert "passed alone: chapters/01_numbers.ipynb\n" in capfd.readouterr().out


@pytest.mark.slow
def test_ctrl_c_says_what_has_failed_so_far(course: Path) -> None:
    """The terminal sends it to all processes at once; `timeout` sends the first one two of it. No chapter is started."""
    (course / "tests/test_bank.py").write_text(
        "import time\n\ndef test_a():\n    assert 'a' == 'b'\n\ndef test_b():\n    time.sleep(60)\n"
    )
    (course / "tests/test_other.py").unlink()
    run = (
        "import sys; from pathlib import Path; from lockstep.commands.testing import run_tests; "
        f"sys.exit(run_tests(Path({str(course)!r}), ['--all', '-p', 'no:randomly']))"
    )
    environment = FEW | {"PYTHONPATH": str(ROOT / "src")}
    output = course / "output"
    with (
        output.open("w") as said,
        subprocess.Popen([sys.executable, "-c", run], stdout=said, env=environment, start_new_session=True) as running,
    ):
        give_up = time.monotonic() + 60
        while "\nF" not in output.read_text() and time.monotonic() < give_up:
            time.sleep(0.05)
        os.kill(running.pid, signal.SIGINT)
        os.killpg(running.pid, signal.SIGINT)
        assert running.wait(60) == 2, output.read_text()
    told = output.read_text()
    assert "FAILED tests/test_bank.py::test_a - AssertionError: assert 'a' == 'b'" in told, told
    assert "Traceback" not in told and "nbval" not in told, told
