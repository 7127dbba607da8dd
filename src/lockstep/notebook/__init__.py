"""What the chapters use: `%load_ext lockstep` brings `%%ranks`, `%check`, `%hint`, `%course` and the quizzes.

A kernel of `./lockstep lab` has them, and what the chapters import of this package, from its start
(`commands/jupyterlab/kernels`): the next day a learner goes on in the middle of a chapter.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

NAMES = {
    "ranks": "lockstep", "cluster": "lockstep", "quiz": "lockstep.notebook.quiz",
    "contract": "lockstep.notebook.contract", "course_map": "lockstep.notebook.course_map",
    "timeline": "lockstep.notebook.timeline", "bars": "lockstep.notebook.bars",
    "stacked": "lockstep.notebook.bars", "compared": "lockstep.notebook.bars", "Stepper": "lockstep.notebook.stepper",
    "ring": "lockstep.notebook.stepper", "bytes_sent": "lockstep.notebook.stepper",
}  # fmt: skip
"""What a cell may use without an import, and the module that it is from."""
RUN_ABOVE = "Run > Run All Above Selected Cell"


def load_ipython_extension(shell: Any) -> None:
    """For a kernel's start (`--ext=lockstep.notebook`). Until the chapter's first cell has run, a NameError says so."""
    _register(shell)
    for name, module in NAMES.items():
        found = import_module(module)
        shell.user_ns.setdefault(name, getattr(found, name, None) or import_module(f"{module}.{name}"))
    shell.set_custom_exc((NameError,), _say_that_the_kernel_is_new)


def _say_that_the_kernel_is_new(shell: Any, kind: Any, error: NameError, traceback: Any, tb_offset: Any = None) -> None:
    shell.showtraceback((kind, error, traceback), tb_offset=tb_offset)
    print(f"Is `{error.name}` made in a cell above? This kernel is new, and has not run it: {RUN_ABOVE}.")


def load(shell: Any) -> None:
    """Register the magics with this IPython shell and warm the ranks up in the background."""
    from .. import ranks
    from ..course.runs import PRELOADED

    _register(shell)
    shell.set_custom_exc((), None)
    ranks.warm(PRELOADED)
    _may_be_loaded_again(shell)


def _register(shell: Any) -> None:
    from .exercise import ExerciseMagics
    from .magic import RanksMagic

    shell.register_magics(RanksMagic)
    shell.register_magics(ExerciseMagics)


def _may_be_loaded_again(shell: Any) -> None:
    """Let the cell with `%load_ext lockstep` be run twice without a word: IPython would ask for %reload_ext."""

    def forget(*_: Any) -> None:
        shell.extension_manager.loaded.discard("lockstep")
        shell.events.unregister("post_run_cell", forget)

    shell.events.register("post_run_cell", forget)
