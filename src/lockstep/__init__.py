"""Lockstep: distributed training with PyTorch DDP, taught by running it.

This package is the machinery: it starts ranks, watches them, grades what they did and shows it. It knows no exercise
by name. The course itself lives beside it, in `chapters`, `exercises`, `solutions` and `autograder`.
"""

__version__ = "0.1.0"


def load_ipython_extension(shell: object) -> None:
    """`%load_ext lockstep` in a notebook."""
    from .notebook import load

    load(shell)
