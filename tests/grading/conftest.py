"""What the grader's tests share: a warm process that grades, and the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.grading.course import Course
from lockstep.grading.worker import Worker

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def course() -> Course:
    """This checkout."""
    return Course(ROOT)


@pytest.fixture(scope="session")
def worker() -> Iterator[Worker]:
    """A process that grades; its own crash would show as a fault in the report."""
    one = Worker()
    yield one
    one.stop()


CommandLine = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def lockstep(tmp_path: Path) -> CommandLine:
    """Call `lockstep …` as a learner would, with a deadline."""

    def call(
        *arguments: str, cwd: Path = ROOT, stdin: str | None = None, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "200", **environment}
        env.pop("LOCKSTEP_SUBMISSION", None) if "LOCKSTEP_SUBMISSION" not in environment else None
        return subprocess.run([sys.executable, "-m", "lockstep", *arguments], cwd=cwd, env=env, input=stdin or "",
                              capture_output=True, text=True, timeout=180)  # fmt: skip

    return call


def only(text: str) -> dict[str, Any]:
    """The one JSON object that stdout holds, and nothing else."""
    lines = text.strip().splitlines()
    assert len(lines) == 1, f"stdout holds {len(lines)} lines: {text[:500]}"
    found = json.loads(lines[0])
    assert isinstance(found, dict)
    return found
