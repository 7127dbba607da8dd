"""What the exercises whose jobs come back have in common: how loading fails, and how far weights lie apart."""

from __future__ import annotations

import torch

from lockstep.grading import Grader
from lockstep.grading.verdict import Diagnosis
from lockstep.ranks import Run
from lockstep.ranks.words import names


def read_loading(grader: Grader, run: Run, at: str) -> Diagnosis | None:
    """A run that failed because the model's state did not fit what was saved; `at` are patterns of lines that load."""
    cause = run.cause
    if cause is None or cause.error is None or "Error(s) in loading state_dict" not in cause.error.message:
        return None
    return grader.diagnosis(
        "weights-not-restored",
        f"{names(cause.ranks).capitalize()} raised {cause.error.type}: {' '.join(cause.error.message.split())[:200]}",
        of=cause.ranks,
        at=cause.error.frame or at,
    )


def apart(a: torch.Tensor, b: torch.Tensor) -> str:
    """The largest difference."""
    return f"{(a - b).abs().max().item():.1e}"
