"""The rank's side of a check: import the submission and play one scenario with it. Nothing is judged here.

A scenario imports from here what it needs: `observe`, `draw`, `mark`, `join`, `raised_at`, `rank`, `world_size`.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..ranks import draw, mark, observe
from ..ranks.rank import load

if TYPE_CHECKING:
    import torch

__all__ = ["draw", "join", "mark", "observe", "play", "raised_at", "rank", "world_size"]


class GroupOnImport(RuntimeError):
    """Importing the submission made the default process group."""


def play(scenario_file: str, scenario: str, submission: str, kwargs: dict[str, Any]) -> Any:
    """Run `scenario` of `scenario_file` with the submission's module and these arguments, on this rank.

    The scenario's module may define `before()`, which is called before the submission's import. Raises GroupOnImport.
    """
    sys.path.insert(0, str(Path(submission).parent))
    stage = load(scenario_file)
    if hasattr(stage, "before"):
        stage.before()
    had_group = _has_group()
    module = load(submission)
    if _has_group() and not had_group:
        raise GroupOnImport(submission)
    return getattr(stage, scenario)(module, **kwargs)


def _has_group() -> bool:
    distributed = sys.modules.get("torch.distributed")  # an exercise without torch does not pay for its import
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def join() -> torch.device:
    """Make the process group and return this rank's device: its own GPU over nccl, or, when ranks share GPUs or there
    are none, over gloo.
    """
    import torch
    import torch.distributed as dist

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not gpus:
        dist.init_process_group("gloo")
        return torch.device("cpu")
    torch.cuda.set_device(rank() % gpus)
    dist.init_process_group("nccl" if world_size() <= gpus else "gloo")
    return torch.device("cuda", torch.cuda.current_device())


def raised_at(submission: ModuleType, error: Exception) -> tuple[str, int]:
    """What was raised, in one line, and the last line of the submission that it passed; 0 when it passed none."""
    said = f"{type(error).__name__}: {error}".partition("\n")[0]
    lines = [one.lineno for one in traceback.extract_tb(error.__traceback__) if one.filename == submission.__file__]
    return said, [0, *lines][-1] or 0


def rank() -> int:
    """This rank's number; 0 in a launcher."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """How many ranks there are; 1 in a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))
