"""The rank's side of a check: import the submission, play one scenario with it. It judges nothing."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from ..ranks.rank import load


def play(scenario_file: str, scenario: str, submission: str, kwargs: dict[str, Any]) -> Any:
    """Run `scenario` of `scenario_file` with the submission's module and these arguments, on this rank.

    The scenario's module may define `before()`, which is called ahead of the submission's import.
    """
    sys.path.insert(0, str(Path(submission).parent))
    stage = load(scenario_file)
    if hasattr(stage, "before"):
        stage.before()
    module = load(submission)
    return getattr(stage, scenario)(module, **kwargs)


def rank() -> int:
    """This rank's number; 0 in a launcher."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """How many ranks there are; 1 in a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))
