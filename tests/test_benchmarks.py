"""The benchmarks that must work when a machine with GPUs is there at last: `train_throughput.py` and `gpu.py`.

Every variant of the first trains the same model on the same data, or says why it could not run. The second plays all of
its rows, whatever becomes of one, and believes none that does not show what it should.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "benchmarks/train_throughput.py"
TINY = ("--device", "cpu", "--no-compile", "--model", "tiny", "--rounds", "2", "--steps", "6", "--side", "64")
STEPS = 3 * 6  # two rounds and the one that warms up
LIBRARIES = ("accelerate", "lightning")


@pytest.fixture(scope="module")
def without_libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which neither library can be imported, whether it is installed or not."""
    folder = tmp_path_factory.mktemp("hidden")
    for name in LIBRARIES:
        Path(folder, f"{name}.py").write_text(f'raise ImportError("no {name} here")\n')
    return {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def alone(without_libraries: dict[str, str]) -> dict[str, Any]:
    """The report of one process in fp32, where neither library can be imported."""
    return dict(json.loads(play("--precision", "fp32", "--json", environment=without_libraries)))


def play(*arguments: str, environment: dict[str, str] | None = None) -> str:
    """What the script prints."""
    environment = environment or {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), *TINY, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses(report: dict[str, Any], name: str) -> list[float]:
    """Of every step of a variant that ran; its figures are looked at too."""
    one = report["variants"][name]
    assert one["not_run"] == ""
    assert len(one["seconds"]) == 2 and min(one["seconds"]) > 0
    assert len(one["losses"]) == STEPS
    assert min(report["rates"][one["dtype"]]) > 0
    return list(one["losses"])


def test_plain_and_course_train_the_same(alone: dict[str, Any]) -> None:
    """In fp32 they compute the same thing, so their losses agree step by step."""
    course, plain = losses(alone, "course"), losses(alone, "plain")
    assert course == pytest.approx(plain, rel=1e-5)
    assert course[0] == pytest.approx(math.log(64), rel=0.02)  # An untrained model guesses among 64 tokens.
    assert max(course[:8]) - min(course[:8]) > 0.01, "the batches differ, so a variant on others would be found"
    assert sum(course[-8:]) < sum(course[:8]) - 0.1, "it learns"


def test_missing_libraries_are_not_run(alone: dict[str, Any], without_libraries: dict[str, str]) -> None:
    """They get a line that says how to get them, and no figure."""
    for name in LIBRARIES:
        missing = alone["variants"][name]
        assert missing["not_run"] == f"pip install {name} (no {name} here)"
        assert missing["seconds"] == [] and missing["losses"] == []
        assert name not in alone, "no version of what did not run"
    lines = play(environment=without_libraries).splitlines()
    for name in LIBRARIES:
        (line,) = (line for line in lines if line.startswith(name))
        assert re.fullmatch(rf"{name} +not run: pip install {name} \(no {name} here\)", line)
    for name in ("course", "plain"):
        (line,) = (line for line in lines if line.startswith(name))
        assert re.fullmatch(name + r" +[\d.]+ +[\d.]+ \([\d.]+\) +[\d.]+% +\w+ +[\d.]+", line)


def test_several_ranks_train_on_different_data(alone: dict[str, Any], without_libraries: dict[str, str]) -> None:
    """Under torchrun: one report, the ranks' mean losses, course and plain still the same."""
    both = json.loads(play("--precision", "fp32", "--json", "--ranks", "2", environment=without_libraries))
    assert (alone["ranks"], both["ranks"]) == ("1", "2")
    assert losses(both, "course") == pytest.approx(losses(both, "plain"), rel=1e-5)
    assert losses(both, "course")[0] != pytest.approx(losses(alone, "course")[0], rel=1e-5), "rank 1 has its own data"


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_library_trains_the_same(library: str) -> None:
    """With its autocast on: bf16 as in `course`, not fp32 as in `plain`."""
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"not run: pip install {library}")
    report = json.loads(play("--json", "--variants", f"course,plain,{library}"))
    course, plain, theirs = (losses(report, name) for name in ("course", "plain", library))
    assert theirs == pytest.approx(course, rel=1e-6)
    assert course == pytest.approx(plain, rel=1e-3)
    assert course != pytest.approx(plain, rel=1e-6), "bf16 rounds otherwise than fp32"
    assert library in report


def gpu() -> Any:
    """`benchmarks/gpu.py` as a module."""
    spec = importlib.util.spec_from_file_location("gpu_benchmark", ROOT / "benchmarks/gpu.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look there for their annotations
    spec.loader.exec_module(module)
    return module


def test_the_gpu_rows_are_rehearsed_without_a_gpu(tmp_path: Path) -> None:
    """A hang is explained and a trace recorded, and the table says what happened."""
    command = [sys.executable, str(ROOT / "benchmarks/gpu.py"), "--device", "cpu", "--out", str(tmp_path)]
    done = subprocess.run([*command, "--only", "hang,trace,nccl-hang"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {row["name"]: row for row in json.loads((tmp_path / "rows.json").read_text())["rows"]}
    assert {name: row["result"] for name, row in found.items()} == {
        "hang": "as it should", "trace": "as it should", "nccl-hang": "not run"}  # fmt: skip
    assert "all_reduce #1" in found["hang"]["said"] and found["nccl-hang"]["said"] == "needs 2 GPUs, found 1"
    assert (tmp_path / "trace.json.gz").stat().st_size > 1000
    lines = (tmp_path / "table.md").read_text().splitlines()
    assert len(lines) == 5 and not any(str(path) in line for path in (ROOT, tmp_path) for line in lines)


def test_a_gpu_row_that_fails_is_told_and_ends(tmp_path: Path) -> None:
    module = gpu()

    def result(*words: str, left: float = 60.0, seconds: int = 60, **expected: Any) -> tuple[str, str]:
        row = module.Row("row", "a row", (sys.executable, "-c", *words), seconds, **expected)
        outcome = module.play(row, tmp_path, 1, left)
        return outcome.result, outcome.said

    assert result("print('all well')") == ("as it should", "all well")
    assert result("print('all well')", shows="kernels") == ("failed", "no line with 'kernels': all well")
    assert result("import sys; print('oh'); sys.exit(3)") == ("failed", "exit code 3, expected 0: oh")
    assert result("import sys; sys.exit(1)", code=1) == ("as it should", "it printed nothing")
    assert result("import time; time.sleep(600)", seconds=1)[1] == "did not end within 1 s: it printed nothing"
    assert result("print(1)", left=5.0) == ("not run", "no time left")
    assert result("print(1)", gpus=2) == ("not run", "needs 2 GPUs, found 1")
