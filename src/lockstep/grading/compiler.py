"""torch's compiler, kept out of the process that grades: a check that predicts some steps of training never compiles.

torch.optim imports `torch._dynamo`, 1.6 s of a processor's time, only to tell it where not to look.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

NAME = "torch._dynamo"
Made = TypeVar("Made", bound=Callable[..., Any])


def leave_out() -> None:
    """Put a stand-in in its place, which makes way when something asks for more than to be left alone."""
    sys.modules.setdefault(NAME, _StandIn(NAME))


class _StandIn(ModuleType):
    def graph_break(self, *_: object) -> None:
        """There is no graph."""

    def disable(self, function: Made, *_: object, **__: object) -> Made:
        """Nothing compiles it."""
        return function

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # what any module may be asked; a path is for its parts
            raise AttributeError(name)
        if sys.modules.get(NAME) is self:
            del sys.modules[NAME]
        return getattr(importlib.import_module(NAME), name)
