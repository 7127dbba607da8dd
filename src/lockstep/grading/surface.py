"""What a check may import, from `lockstep.grading`: CONTRIBUTING.md has the table."""

from __future__ import annotations

from .. import cluster
from ..ranks import Cause, Collective, Frame, Mark, Outcome, Run
from ..ranks.mismatch import say_mismatch
from ..ranks.processes import seconds_in_queue
from ..ranks.words import names, one_or_more
from .diagnose import ending, evidence, sentence
from .grader import OUTPUT_BYTES, CheckNotRun, Failed, Grader, Lacking, Play
from .hypotheses import (
    EXACT,
    ROUNDING,
    Each,
    Hypothesis,
    Tolerance,
    Where,
    difference,
    equal,
    factor_of,
    fitting,
    on_ranks,
    show,
    wrong_ranks,
)
from .source import parse
from .verdict import Diagnosis

__all__ = [
    "EXACT", "OUTPUT_BYTES", "ROUNDING", "Cause", "CheckNotRun", "Collective", "Diagnosis", "Each", "Failed", "Frame",
    "Grader", "Hypothesis", "Lacking", "Mark", "Outcome", "Play", "Run", "Tolerance", "Where", "cluster", "difference",
    "ending", "equal", "evidence", "factor_of", "fitting", "names", "on_ranks", "one_or_more", "parse", "say_mismatch",
    "seconds_in_queue", "sentence", "show", "wrong_ranks",
]  # fmt: skip
