"""Calling `lockstep …` as a learner or a teacher would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import ROOT

CommandLine = Callable[..., "subprocess.CompletedProcess[str]"]


def call(
    *arguments: str, cwd: Path = ROOT, stdin: str | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """`lockstep ARGUMENTS` in a process of its own, with a deadline."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "200", **environment}
    if "LOCKSTEP_SUBMISSION" not in environment:
        env.pop("LOCKSTEP_SUBMISSION", None)
    command = [sys.executable, "-m", "lockstep", *arguments]
    return subprocess.run(command, cwd=cwd, env=env, input=stdin or "", capture_output=True, text=True, timeout=180)


def only(text: str) -> dict[str, Any]:
    """The one JSON object that stdout holds, and nothing else."""
    lines = text.strip().splitlines()
    assert len(lines) == 1, f"stdout holds {len(lines)} lines: {text[:500]}"
    found = json.loads(lines[0])
    assert isinstance(found, dict)
    return found
