"""What the chapters use: `%load_ext lockstep` brings `%%ranks`, `%check`, `%hint`, `%course` and the quizzes."""

from __future__ import annotations

from typing import Any


def load(shell: Any) -> None:
    """Register the magics with this IPython shell and warm the ranks up in the background."""
    from .. import ranks
    from ..course.runs import PRELOADED
    from .exercise import ExerciseMagics
    from .magic import RanksMagic

    shell.register_magics(RanksMagic)
    shell.register_magics(ExerciseMagics)
    ranks.warm(PRELOADED)
    _may_be_loaded_again(shell)


def _may_be_loaded_again(shell: Any) -> None:
    """Let the cell with `%load_ext lockstep` be run twice without a word: IPython would ask for %reload_ext."""

    def forget(*_: Any) -> None:
        shell.extension_manager.loaded.discard("lockstep")
        shell.events.unregister("post_run_cell", forget)

    shell.events.register("post_run_cell", forget)
