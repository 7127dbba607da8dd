"""Submission → observations → verdict → report.

Everything that a check imports comes from here, everything that a scenario imports from `lockstep.grading.on_rank`:

    from lockstep.grading import Grader, Run, names, one_or_more

The names are those of `surface`. They are loaded when the first of them is asked for, so that a rank which imports
`on_rank` does not load the judge's side with it.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .surface import *  # noqa: F403


def __getattr__(name: str) -> Any:
    if find_spec(f".{name}", __name__):  # `from . import bulk`: a module of this package needs none of it
        raise AttributeError(name)
    surface = import_module(".surface", __name__)
    if name not in getattr(surface, "__all__", ()):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(surface, name)
